"""What tests of every optimizer share: their names, how each is made, and how two are compared."""

import pytest
import torch
from torch import nn

from memtrain import optim
from memtrain.optim import CompressedOptimizer

ADAMS = ["AdamW4bit", "Adam4bit", "AdamW4bitFactor", "AdamW8bit", "AdamW8bitFactor", "Adam8bit"]
FUSED = [*ADAMS, "SGD4bit", "SGD8bit", "Lion4bit", "Lion8bit"]
GENERAL = "CompressedOptimizer"

every = pytest.mark.parametrize("name", [*FUSED, GENERAL])
fused = pytest.mark.parametrize("name", FUSED)


def make(name, params, **options):
    if name == GENERAL:
        return CompressedOptimizer(torch.optim.RMSprop(params, **{"lr": 0.01, **options}))
    return getattr(optim, name)(params, **{"lr": 0.01, **momentum(name), **options})


def make_plain(name, params, **options):
    """The optimizer that a fused one stands for."""
    return getattr(optim, name).plain(params, **{"lr": 0.01, **momentum(name), **options})


def momentum(name):
    return {"momentum": 0.9} if name.startswith("SGD") else {}


def parameter(*shape, dtype=torch.float32):
    param = nn.Parameter(torch.randn(shape).to(dtype))
    param.grad = torch.randn(shape).to(dtype)
    return param


def twin(param):
    copied = nn.Parameter(param.detach().clone())
    copied.grad = param.grad.clone()
    return copied


def step_equally(*pairs):
    """Step each pair's optimizer: their parameters, equal before, are equal after, and moved."""
    (first, _), *others = pairs
    start = first.detach().clone()
    for _, optimizer in pairs:
        optimizer.step()
    assert not torch.equal(first, start)
    for param, _ in others:
        assert torch.equal(param, first)
