"""Recurrent layers of torch: what is compressed of them, and what the plan says of the rest."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity

import memtrain


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.head = kind(32, 64, batch_first=True), nn.Linear(64, 8)

    def forward(self, x):
        return self.head(self.layer(x)[0])


def gradients(model, x):
    model(x).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def share(model, path):
    """Planned over plain bytes of a module's saved tensors, and what the plan says of them."""
    entries = [e for e in memtrain.plan_of(model).entries("activation") if e.site.startswith(path)]
    planned, plain = sum(e.planned for e in entries), sum(e.nbytes for e in entries)
    return planned / plain, " ".join(e.reason for e in entries)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_the_tensors_of_each_step_are_compressed(kind):
    torch.manual_seed(0)
    model, x = Recurrent(kind), torch.randn(32, 40, 32)
    exact = gradients(copy.deepcopy(model), x)
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), "balanced")
    assert cosine_similarity(gradients(model, x), exact, dim=0) > 0.98  # 4 bits, 40 steps
    assert share(model, "layer")[0] < 0.2


def test_an_lstms_reserve_is_listed_with_the_way_to_spare_it():
    torch.manual_seed(0)
    plain, x = Recurrent(nn.LSTM), torch.randn(32, 40, 32)
    exact = gradients(copy.deepcopy(plain), x)
    model = copy.deepcopy(plain)
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), "balanced")
    assert cosine_similarity(gradients(model, x), exact, dim=0) > 0.98
    kept, reasons = share(model, "layer")
    spared = {"preset": "balanced", "activations": {"recompute": ["layer"]}}
    model = copy.deepcopy(plain)
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), spared)
    gradients(model, x)
    if "reserve, opaque bytes: activations.recompute" in reasons:  # this torch has oneDNN
        assert kept > 0.5
    saved = memtrain.plan_of(model).entries("activation")
    assert not any(e.site.startswith("layer / lstm") for e in saved)
