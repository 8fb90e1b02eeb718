"""What the tests of reported faults share: `h = Linear(128, 128)(X)`, X of 64 x 128, and judges."""

import copy

import torch
from torch import nn

from tests.activations.proof.comparison import flat, judge, parameter_gradients, quality, wrapped

PROMISED = 0.98
"""The least cosine of `balanced` that docs/guides/activations.md states."""
DRAWS = 16


class After(nn.Module):
    """h = Linear(x), then a function of h, then a loss."""

    def __init__(self, function, width=128):
        super().__init__()
        self.first, self.function = nn.Linear(128, width), function

    def forward(self, x, **kwargs):
        return self.function(self.first(x), **kwargs)


def inputs(rows=64):
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(1))


def of_parts(model, preset="balanced"):
    """The model wrapped, as a copy: the baseline's is the one that is given."""
    return wrapped(copy.deepcopy(model), preset)


def draws_of(model, x, count=DRAWS):
    return [flat(parameter_gradients(model, x).grads) for _ in range(count)]


def found(model, x):
    """The quality of the wrapped model's gradients."""
    exact = parameter_gradients(model, x)
    assert exact.error is None, exact.message
    return quality(draws_of(of_parts(model), x), flat(exact.grads))


def assert_promised(q):
    """The cosine is what the guide states, and the norm what unbiased noise of that cosine has."""
    assert q.cosine >= PROMISED, q
    assert PROMISED <= q.norm <= 1 / PROMISED, q


def assert_sound(model, x):
    """Bit-equal, or right on average; finite in any case. Returns which."""
    baseline, mine = parameter_gradients(model, x), of_parts(model)
    assert baseline.error is None, baseline.message
    rounding = 2 * torch.finfo(x.dtype).eps * float(finite(flat(baseline.grads)).norm())
    first = parameter_gradients(mine, x)
    verdict = judge(baseline, first, lambda: parameter_gradients(mine, x), rounding)
    assert verdict.right, verdict
    return verdict.kind


def finite(x):
    return x[x.isfinite()]


def no_noisier(mine, counterpart, x):
    """The error of `mine` is no larger than that of the same mathematics in other words.

    The standard errors of both root mean squares are those of `DRAWS` draws; 1.1 allows groups
    that start at other elements, whose ranges are those of another choice of 128 numbers.
    """
    errors = []
    for model in (mine, counterpart):
        exact = flat(parameter_gradients(model, x).grads)
        noise = torch.stack([(d - exact).norm() for d in draws_of(of_parts(model), x)])
        errors.append((noise.mean(), noise.std() / DRAWS**0.5, exact.norm()))
    (a, sa, na), (b, sb, nb) = errors
    assert torch.isclose(na, nb, rtol=1e-3), "not the same mathematics"
    assert a <= 1.1 * b + 5 * (sa**2 + sb**2) ** 0.5, (float(a / na), float(b / nb))
