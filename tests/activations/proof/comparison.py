"""A wrapped model beside the baseline: the same forward, the gradients of both, and the verdict.

A verdict is one of: the gradients are equal to the bit; the mean over draws of the stochastic
rounding is the exact gradient, within its confidence interval; or neither, and by how much.
"""

import threading
import warnings
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import memtrain
from memtrain.config.sources import load

DRAWS = ((16, 4.0), (64, 9.0), (256, 18.0))
"""Draws, and the ratio above which a bias is likely; each line is new evidence on the one before.

The ratio of a pure bias is sqrt(n (n - 1) / 2): 11, 45 and 181. Of an unbiased gradient with a
single noisy element it is (chi2 - 1) / sqrt(2) with one degree of freedom, whose tails beyond the
three ratios are 1e-2, 2e-4 and 2e-7; the product of the three bounds a false alarm at 1e-12 a case.
"""


class Holder(nn.Module):
    """Calls any function as a model's forward, on modules of its own.

    Args:
        own: The modules. A parameter beside them is there for `wrap` alone.
    """

    def __init__(self, own=()):
        super().__init__()
        self.own, self.unused = nn.ModuleList(own), nn.Parameter(torch.zeros(1))

    def forward(self, function):
        return function(self.own)


@cache
def config(preset, min_elements=1024, **activations):
    """The preset's saved activations, with plain optimizer states and gradients."""
    own = {"min_elements": min_elements, **activations}
    lossless = preset == "exact"
    return load(
        {"preset": "exact" if lossless else "activations_only", "gradients": "keep"}
        | {"activations": own}
    )


def wrapped(model, preset, min_elements=1024, cfg=None):
    """The model under `exact` or `balanced`, as `memtrain.wrap` returns it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.0)
    return memtrain.wrap(model, optimizer, cfg or config(preset, min_elements))[0]


class Result(NamedTuple):
    """What a forward and a backward gave: values and gradients, or the type of their error."""

    values: list[Tensor]
    grads: list[Tensor]
    error: type[BaseException] | None = None
    message: str = ""


def step(run, leaves, seed=0):
    """`run()` returns outputs; the loss is a fixed projection of all that need a gradient.

    Args:
        run: Runs the forward.
        leaves: The tensors whose gradients are compared.
        seed: Of torch's random stream, the same for the baseline and the wrapped model.
    """
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs = [x for x in tree_leaves(run()) if isinstance(x, Tensor)]
            values = [x.detach().clone() for x in outputs]
            differentiable = [x for x in outputs if x.requires_grad]
            if not differentiable:
                return Result(values, [])
            grads = torch.autograd.grad(
                differentiable, leaves, [weights(x) for x in differentiable], allow_unused=True
            )
    except Exception as error:  # noqa: BLE001 - the wrapped model must raise the same
        return Result([], [], type(error), str(error))
    return Result(values, [torch.zeros(()) if g is None else g.detach() for g in grads])


def weights(x):
    """Fixed weights of an output, between 0.5 and 1.5 with both signs."""
    generator = torch.Generator().manual_seed(x.numel())
    w = torch.rand(x.shape, generator=generator) + 0.5
    w = w * torch.where(torch.rand(x.shape, generator=generator) < 0.5, -1.0, 1.0)
    w = w.to(x.dtype)
    return (
        w
        if x.layout is torch.strided
        else w.sparse_mask(x.detach())
        if x.is_sparse
        else w.to_sparse(layout=x.layout)
    )


def same(a, b):
    """Whether two tensors are equal to the bit, NaN to NaN."""
    if a.layout is not torch.strided or b.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point and not a.dtype.is_complex:
        return torch.equal(a, b)
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def all_same(first, second):
    """Whether two lists of tensors are equal to the bit."""
    return len(first) == len(second) and all(map(same, first, second))


def flat(grads):
    """One vector of doubles; complex numbers as two."""
    parts = [
        torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in map(dense, grads)
    ]
    return torch.cat([p.double().flatten() for p in parts])


def dense(x):
    return x if x.layout is torch.strided else x.to_dense()


def new_nan(result, baseline):
    """Whether a gradient is NaN or infinite where the baseline's is a number."""
    mine, exact = flat(result.grads), flat(baseline.grads)
    return bool((exact.isfinite() & ~mine.isfinite()).any())


class Quality(NamedTuple):
    """Errors of several draws against the exact gradient."""

    cosine: float
    norm: float
    """Of the mean draw's norm, over the exact one's."""
    rms: float
    """Root mean square distance to the exact gradient, over its norm."""
    bias: float
    """Distance of the mean draw, without what its own variance adds, over the exact norm."""
    ratio: float
    """How often the likely size of a chance deviation that bias is, squared."""

    def __str__(self):
        return (
            f"cosine {self.cosine:.4f}, norm x{self.norm:.3g}, rms {self.rms:.3g}, "
            f"bias {self.bias:.3g}, {self.ratio:.1f} deviations"
        )


def quality(draws, exact, rounding=0.0):
    """Compare draws with the exact gradient.

    Args:
        draws: Vectors.
        exact: A vector.
        rounding: The norm of what floating point alone may add to the mean draw's error.
    """
    finite = exact.isfinite()
    exact, errors = exact[finite], torch.stack([d[finite] for d in draws]) - exact[finite]
    n, norm = len(errors), float(exact.norm()) or 1.0
    products = errors @ errors.T
    off = products[~torch.eye(n, dtype=torch.bool)]
    chance = float(off.square().mean().sqrt()) * (2 / (n * (n - 1))) ** 0.5
    squared = float(off.mean())
    mine = errors + exact
    return Quality(
        cosine=float((mine @ exact / (mine.norm(dim=1) * norm)).mean()),
        norm=float(mine.norm(dim=1).mean()) / norm,
        rms=float(products.diagonal().mean().sqrt()) / norm,
        bias=max(0.0, squared) ** 0.5 / norm,
        ratio=0.0 if squared <= rounding**2 else squared / chance if chance else 0.0,
    )


def unbiased(draw, exact, rounding):
    """Whether the mean draw is the exact gradient, as far as up to 256 draws can show.

    Args:
        draw: Called for each draw; returns a vector.
        exact: The exact gradient, a vector.
        rounding: See `quality`.

    Returns:
        The verdict, and the quality that it rests on.
    """
    for count, bound in DRAWS:
        found = quality([draw() for _ in range(count)], exact, rounding)
        if found.ratio <= bound:
            return True, found
    return False, found


class Verdict(NamedTuple):
    """Whether wrapped gradients are right, and how."""

    kind: str
    """`equal`, `unbiased`, `second order`, `code`, or what is wrong."""
    detail: str = ""

    @property
    def right(self):
        return self.kind in RIGHT


RIGHT = ("equal", "unbiased", "second order", "code", "error")
SMALL = 0.2
"""Relative noise of a cosine of 0.98, the least that the guide states."""


def judge(baseline, mine, draw, rounding=0.0, slack=None):
    """Compare a wrapped result with the baseline's.

    Args:
        baseline: Its result.
        mine: The wrapped model's, on the same arguments and random numbers.
        draw: Called for another result of the wrapped model.
        rounding: The norm that floating point alone may add.
        slack: Of a pointwise op with a code of its derivative: the most that an element may be off.

    Returns:
        `equal`: to the bit. `unbiased`: the mean draw is the exact gradient. `second order`: its
        bias is no more than the square of a small noise, as of a backward that is smooth in what
        is quantised. `code`: within `slack`. `error`: both fail equally. Else what is wrong:
        `biased` for one whose noise is small.
    """
    if baseline.error or mine.error:
        equal = baseline.error == mine.error
        return Verdict("error" if equal else "another error", f"{mine.error}: {mine.message[:200]}")
    if not all_same(mine.values, baseline.values):
        return Verdict("another value")
    if all_same(mine.grads, baseline.grads):
        return Verdict("equal")
    if [g.shape for g in mine.grads] != [g.shape for g in baseline.grads]:
        return Verdict("another shape")
    if new_nan(mine, baseline):
        return Verdict("not finite")
    exact = flat(baseline.grads)
    if slack is not None and bool(((flat(mine.grads) - exact).abs() <= slack).all()):
        return Verdict("code")
    right, q = unbiased(lambda: flat(draw().grads), exact, rounding)
    if right:
        return Verdict("unbiased", str(q))
    if q.bias <= q.rms**2 and q.rms <= SMALL:
        return Verdict("second order", str(q))
    return Verdict("biased" if q.rms <= SMALL else "far off", str(q))


def parameter_gradients(model, x, loss=None):
    """The gradients of a model's parameters by one forward and backward."""
    parameters = [p for p in model.parameters() if p.requires_grad]

    def run():
        out = model(x)
        return out if loss is None else loss(out)

    return step(run, parameters)


def in_thread(function, x):
    """Call a function in a thread of its own."""
    out = []
    thread = threading.Thread(target=lambda: out.append(function(x)))
    thread.start()
    thread.join()
    return out[0]
