"""Stochastic rounding of what training makes: named in a config, new in every step, repeatable."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memtrain
from memtrain.config.sources import load
from memtrain.precision import FP8_FORWARD, named_format

DRAWN = {"low": "fp8_forward:stochastic", "low_backward": "fp8_backward:stochastic"}


class Model(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.recompute = nn.Linear(32, 32), nn.Linear(32, 32), recompute
        self.seen = []

    def forward(self, x):
        x = self.first(x)
        self.seen.append(x.detach().clone())
        x = checkpoint(self.last, x, use_reentrant=False) if self.recompute else self.last(x)
        return x.tanh()


def wrapped(model, **fields):
    precision = {"assignment": "uniform", "promotion": None, **DRAWN, **fields}
    cfg = {"preset": "precision_only", "precision": precision}
    return memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.0), cfg)[0]


def gradients(model, x, passes=1):
    found = []
    for _ in range(passes):
        model.zero_grad()
        model(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return found


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_every_step_draws_anew_and_a_seed_repeats_them():
    x = torch.randn(64, 32)
    model = wrapped(Model())
    first, second = gradients(model, x, 2)
    assert not same(first, second)
    drawn = model.seen[-1]
    assert torch.equal(drawn, FP8_FORWARD.round(drawn))
    assert same(gradients(wrapped(Model()), x, 2)[1], second)
    assert not same(gradients(wrapped(Model(), seed=1), x)[0], first)


def test_a_recomputation_draws_as_the_first_time():
    x = torch.randn(64, 32)
    plain, again = (gradients(wrapped(Model(how)), x, 2) for how in (False, True))
    assert same(plain[0], again[0])
    assert same(plain[1], again[1])


def test_the_mean_of_an_input_is_kept():
    model = wrapped(Model())
    model.register_forward_pre_hook(lambda m, a: model.seen.append(a[0].detach().clone()))
    model(torch.full((64, 32), 1.0375))  # 0.3 of the way from 1 to 1.125
    drawn = model.seen[-2]  # as the forward got it
    assert set(drawn.unique().tolist()) == {1.0, 1.125}
    up = (drawn > 1).double().mean().item()
    assert abs(up - 0.3) < 5 * (0.3 * 0.7 / 2048) ** 0.5


def test_configs_name_the_rounding():
    asked = load(["precision=uniform", "precision.low=fp8_forward:stochastic"]).precision
    assert asked.low_format == named_format("1-4-3+4:stochastic")
    assert asked.low_format.rounding == "stochastic"
    assert named_format("fp16:even").rounding == "even"
    with pytest.raises(ValueError, match=r"'fp16:up': 'up'; allowed: away, even, stochastic"):
        named_format("fp16:up")
    with pytest.raises(ValueError, match=r"precision\.low='fp9:even'.*unknown"):
        load({"precision": {"low": "fp9:even"}})
