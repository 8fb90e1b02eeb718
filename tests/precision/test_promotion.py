"""Every kind of forward tensor that overflows is promoted: inputs, weights, what ops make."""

import torch
from torch import nn

import memtrain

CFG = {"preset": "precision_only", "precision": {"assignment": "uniform", "promotion": 0.01}}


def promoted(*, inputs=1.0, weight=1.0):
    """Sites promoted by one step; each factor makes one tensor larger than 31."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with torch.no_grad():
        model[2].weight.mul_(weight)
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), CFG)
    model(inputs * torch.randn(8, 64)).sum().backward()
    return {promotion.site for promotion in memtrain.precision_state(model).promotions}


def test_nothing_overflows_nothing_is_promoted():
    assert promoted() == set()


def test_an_input_is_promoted():
    assert "(root) / input / input" in promoted(inputs=100.0)


def test_a_weight_is_promoted():
    assert "2.weight" in promoted(weight=1000.0)
