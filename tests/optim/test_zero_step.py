"""`torch.distributed.checkpoint` makes an optimizer's first states by a step whose learning rate
and gradients are zero: it changes no weight, and what is loaded after it is all that counts."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from memtrain import optim
from memtrain.optim.states.checkpoint_options import CORRECTION
from memtrain.optim.states.layout import Choice
from tests.equality import equal

FIRSTS = ("B128/DE", "B128/DE+SR", "B256/DE8", "identity")
SECONDS = ("Rank-1/Linear", "B128/Linear", "factored", "B128/DE-0+SR", "identity")
TORCH = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD",
)  # fmt: skip
OPTIMIZERS = {
    **{
        f"{name} {first} {second}": (name, {"first": first, "second": second})
        for name in ("AdamW4bit", "Adam4bit")
        for first in FIRSTS
        for second in SECONDS
    },
    "AdamW4bit Lloyd-Max": ("AdamW4bit", {"first": "Lloyd-Max", "second": "factored"}),
    **{f"SGD4bit {first}": ("SGD4bit", {"first": first, "momentum": 0.9}) for first in FIRSTS},
    **{f"Lion4bit {first}": ("Lion4bit", {"first": first}) for first in FIRSTS},
    **{name: (name, {}) for name in ("AdamW8bit", "Adam8bit", "AdamW8bitFactor", "Lion8bit")},
    **{name: (name, {}) for name in TORCH},
}
WEIGHTS = ("keep", "bf16", "bf16+sr", "bf16+8", "bf16+16", "fp16", "fp16+8", "fp16+16")


def made(name, weights, released, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 3))
    cls, options = OPTIMIZERS[name]
    options = {"lr": 0.01, **options}
    if cls != "Rprop":
        options["weight_decay"] = 0.1
    if cls in TORCH:
        plain = getattr(torch.optim, cls)(model.parameters(), **options)
        optimizer = optim.CompressedOptimizer(plain, Choice(first="B128/DE+SR"))
    else:
        optimizer = getattr(optim, cls)(model.parameters(), **options)
    if weights != "keep":
        optimizer = optim.SplitWeights(optimizer, weights)
    if released:
        optimizer = optim.ReleaseGradients(optimizer, clip="previous", limit=0.01)
    return model, optimizer


def trained(model, optimizer, steps):
    dtype = next(model.parameters()).dtype
    for step in steps:
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(step)).to(dtype)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def held(model, optimizer):
    """All that a run holds: weights, states and counters, copied."""
    return copy.deepcopy([model.state_dict(), optimizer.state_dict()])


@pytest.mark.each_value
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_it_changes_nothing(weights, released, name):
    first, second = made(name, weights, released), made(name, weights, released)
    before = held(*second)
    exact = masters(*second)
    get_optimizer_state_dict(*second)
    if weights == "fp16+8":  # midway between two float16 a correction of +128 does not exist
        for now, then in zip(masters(*second), exact, strict=True):
            torch.testing.assert_close(now, then, rtol=2.0**-18, atol=2.0**-32)
    else:
        after = held(*second)
        assert equal(after[0], before[0])
        assert equal(corrections(after), corrections(before))
    assert all(p.grad is None for p in second[0].parameters())
    trained(*first, range(2))
    saved = held(*first)
    get_optimizer_state_dict(*first)  # of an optimizer that has states: no step at all
    assert equal(held(*first), saved)
    second[0].load_state_dict(saved[0])
    second[1].load_state_dict(saved[1])
    trained(*first, range(2, 4)), trained(*second, range(2, 4))
    assert equal(held(*second), held(*first))


def masters(model, optimizer):
    if isinstance(optimizer, optim.ReleaseGradients):
        optimizer = optimizer.inner
    split = isinstance(optimizer, optim.SplitWeights)
    return [optimizer.master(p) if split else p.detach().clone() for p in model.parameters()]


def corrections(kept):
    states = kept[1]["state"]
    return {number: s[CORRECTION] for number, s in states.items() if CORRECTION in s}


def test_the_step_after_it_is_clipped_by_its_own_norms():
    """As every first one under `previous`: the norm of a step without gradients says nothing."""
    found = []
    for asked in (False, True):
        model, optimizer = made("SGD", "keep", True)
        if asked:
            get_optimizer_state_dict(model, optimizer)
        trained(model, optimizer, range(1))
        found.append(model.state_dict())
    assert equal(*found)
