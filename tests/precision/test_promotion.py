"""Every kind of forward tensor that overflows is promoted: inputs, weights, what ops make."""

import torch
from torch import nn

import memtrain
from memtrain.precision.assignment import Precision
from memtrain.precision.loss_scaling import LossScaler
from memtrain.precision.state import PrecisionState

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


class Elsewhere(torch.Tensor):
    """Stands for a tensor of another device."""

    device = torch.device("cuda")


def test_overflows_of_two_devices_are_read_from_each(monkeypatch):
    stack = torch.stack

    def one_device(tensors):
        assert len({x.device for x in tensors}) == 1, "Expected all tensors on the same device"
        return stack(tensors)

    monkeypatch.setattr(torch, "stack", one_device)
    state = PrecisionState(Precision())
    told = []
    monkeypatch.setattr(state, "promote", told.append)
    scaler = LossScaler(state)
    scaler.count_overflows("a", torch.tensor(3), 10)
    scaler.count_overflows("b", torch.tensor(4).as_subclass(Elsewhere), 10)
    scaler.count_overflows("c", torch.tensor(5), 10)
    scaler._end_backward()
    assert told == [{"a": 0.3, "b": 0.4, "c": 0.5}]
