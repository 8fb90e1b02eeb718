"""Choices that earlier forwards settled: taken again for saves alike, made anew for all others."""

import torch
import torch.nn.functional as F
from torch import nn

from memtrain.activations.intercept.hooks import Interception
from memtrain.activations.intercept.options import Options
from memtrain.activations.saved import pack_hook
from memtrain.compressors import Group

BITS = {"mul": 2, "div": 8}


def choose(site):
    return Group(bits=BITS.get(site.op, 4))


class Changing(nn.Module):
    """Does what `how` says, from one line: no op, shape or branch is known by its place."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.how = nn.Linear(16, 16), nn.Linear(16, 4), "mul"

    def forward(self, x):
        x = self.inner(x)
        if self.how == "detached":
            x = x.detach()
        if self.how == "transposed":
            x = x.t().contiguous().t()
        if self.how == "slice":
            x = x[:, 4:12].repeat(1, 2)
        if self.how == "leaf":
            x = x * nn.Parameter(torch.ones_like(x))
        run = {"div": torch.div, "tanh": lambda x, y: torch.tanh(x + y)}.get(self.how, torch.mul)
        y = run(x, x.flip(0) + 2)
        if self.how == "in place":
            y = y.clone().add_(1).sigmoid_()
        return self.outer(F.dropout(y, 0.0)).square().sum()


def trained(*, settles):
    """Gradients of forwards that change once the first three have settled what is done."""
    torch.manual_seed(0)
    model, found = Changing(), []
    interception = Interception(
        model, choose, options=Options(min_elements=64), seed=0, on_saved=lambda records: None
    )
    interception.attach()
    hows = ["mul", "mul", "mul", "div", "tanh", "detached", "transposed", "slice", "leaf"]
    for k, how in enumerate([*hows, "in place", "mul", "div", "wide"]):
        if not settles:
            interception.record_again()
        model.how = how
        torch.manual_seed(k)
        model.zero_grad()
        model(torch.randn(1024 if how == "wide" else 256, 16)).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    return found


def test_saves_unlike_the_settled_ones_are_chosen_for_anew():
    for settled, anew in zip(trained(settles=True), trained(settles=False), strict=True):
        for one, other in zip(settled, anew, strict=True):
            assert torch.equal(one, other)


def test_shapes_that_vary_do_not_collect_without_end(monkeypatch):
    monkeypatch.setattr(pack_hook, "SETTLED", 8)
    model = Changing()
    interception = Interception(
        model, choose, options=Options(min_elements=64), seed=0, on_saved=lambda records: None
    )
    interception.attach()
    for rows in range(100, 120):
        model(torch.randn(rows, 16)).backward()
        assert len(interception.saved._settled) <= 8
    assert interception.saved._settled
