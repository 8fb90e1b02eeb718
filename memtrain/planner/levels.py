"""What the planner may do to a tensor: levels for saved tensors, variants for optimizer states."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from memtrain.compressors import Compressor, DerivativeCode, Integers, Key, Mask
from memtrain.config import KEEP, ActivationRule, StateRule
from memtrain.optim.layout import is_unsigned

LOSSLESS = "lossless"
WIDTHS = (8, 6, 5, 4, 3, 2)
LEVELS = (KEEP, LOSSLESS, *map(str, WIDTHS))
"""From the most bytes to the fewest; a number is the width that most tensors get."""
BALANCED = "4"
"""The level whose rules are those of the preset `balanced`."""

TORCH, BITS8, BITS4, FACTORED = "torch", "8-bit", "4-bit", "factored"
STATES = (TORCH, BITS8, BITS4, FACTORED)
"""What may be done to optimizer states."""

_FREE = (  # one bit says all of these derivatives; masks and places in a window are whole numbers
    ActivationRule(op="@piecewise", compressor={"name": "derivative", "bits": 1}),
    ActivationRule(op="dropout|*max_pool*", compressor={"name": "group", "bits": 8}),
)
_MOMENTUM = "exp_avg|momentum_buffer"


def activation_rules(level: str) -> list[ActivationRule]:
    """The rules that do to every saved tensor what a level says.

    Widths of 2 to 8 differ from one another as `smallest` does from `balanced`, which is level
    `4`: a gate's input one bit more, nonlinearities 2 to 4 bits of their derivative, 8 bits where
    noise would be in an exponent, and nothing where it would be bias.

    Args:
        level: One of `LEVELS`.

    Returns:
        Rules for saved tensors, first match wins.

    Example:
        >>> [rule.op for rule in activation_rules("lossless")]
        ['@piecewise', 'dropout|*max_pool*']
    """
    if level in (KEEP, LOSSLESS):
        return [*_FREE] if level == LOSSLESS else []
    bits = int(level)
    own = {"name": "group", "bits": bits}
    gate = {"name": "group", "bits": min(8, bits + 1)}
    code = {"name": "derivative", "bits": max(2, min(4, bits - 1))}
    exact = {"name": "group", "bits": 8}
    return [
        ActivationRule(op="sigmoid|tanh", compressor=own),
        ActivationRule(op="silu", compressor=gate),
        *(_FREE if bits > 4 else ()),
        ActivationRule(op="@nonlinear", compressor=code),
        ActivationRule(op="@singular", compressor=KEEP),
        ActivationRule(op="@exponential", compressor=exact),
        ActivationRule(op="scaled_dot_product_attention", tensor="input|input1", compressor=exact),
        ActivationRule(compressor=own),
    ]


def state_rules(variant: str) -> list[StateRule]:
    """The rules that do to optimizer states what a variant says.

    Args:
        variant: One of `STATES`.

    Returns:
        Rules for states, first match wins.

    Example:
        >>> [rule.compressor for rule in state_rules("4-bit")]
        ['Rank-1/Linear', 'B128/DE']
    """
    first, second = {
        TORCH: ("", ""),
        BITS8: ("B256/DE8", "B256/DE8"),
        BITS4: ("B128/DE", "Rank-1/Linear"),
        FACTORED: ("B128/DE", "factored"),
    }[variant]
    if not first:
        return []
    return [
        StateRule(state="exp_avg_sq", compressor=second),
        StateRule(state=_MOMENTUM, compressor=first),
    ]


def moment_error(state: str, compressor: Compressor | str) -> float:
    """The share of an update's square that rounding one of Adam's moments adds.

    By analysis, of its steady state under normal gradients: the first moment m is normal, with
    scales that are log-normal by rows (deviation 1), columns (1/2) and elements (1/4), the second
    moment v is their square, and the update is m / sqrt(v). The relative squared errors of both
    factors add up.

    Args:
        state: `exp_avg_sq` is the second moment; others count as a first.
        compressor: What is done to it; a reason to keep it adds nothing.

    Returns:
        A share.

    Example:
        >>> from memtrain.compressors import Block
        >>> few, many = Block(bits=4), Block(bits=8)
        >>> 0 < moment_error("exp_avg", many) < moment_error("exp_avg", few) < 1
        True
    """
    return 0.0 if isinstance(compressor, str) else _moment_error(is_unsigned(state), compressor)


def relative_error(compressor: Compressor, op: str) -> float:
    """The share of a saved tensor's square that its compressor adds, by analysis.

    Args:
        compressor: Of a site.
        op: The op that saves it: masks and places are exact in any code.

    Returns:
        The mean squared error for normal numbers, relative to their mean square; for a derivative
        code that of the derivative.

    Example:
        >>> from memtrain.compressors import Group
        >>> 0.01 < relative_error(Group(bits=4), "linear") < 0.05
        True
    """
    if isinstance(compressor, Mask | Integers) or op == "dropout" or "max_pool" in op:
        return 0.0
    if isinstance(compressor, DerivativeCode) and compressor.bits == 1:
        return 0.0
    return _sample_error(compressor)


@cache
def _sample_error(compressor: Compressor) -> float:
    x = torch.randn(128, 512, generator=torch.Generator().manual_seed(0))
    given = x if getattr(compressor, "shaped", False) else x.flatten()
    back = compressor.decompress(compressor.compress(given, key=Key())).view_as(x)
    exact = _slope(x) if isinstance(compressor, DerivativeCode) else x
    return _share(back, exact)


def _slope(x: Tensor) -> Tensor:
    """GELU's derivative, that of `DerivativeCode`'s default."""
    return torch.func.grad(lambda y: F.gelu(y).sum())(x)


@cache
def _moment_error(unsigned: bool, compressor: Compressor) -> float:
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.randn(n, generator=generator) for n in (128, 512))
    noise = torch.randn(128, 512, generator=generator)
    scale = (rows[:, None] + columns / 2 + noise.flip(0, 1) / 4).exp()
    if not unsigned:
        return _share(_again(compressor, noise * scale) / scale, noise)
    v = scale.square()
    again = _again(compressor, v).clamp_min(v.min() * 1e-3)  # what rounds to 0, eps stands in for
    return _share((v / again).sqrt(), torch.ones_like(v))


def _again(compressor: Compressor, x: Tensor) -> Tensor:
    return compressor.decompress(compressor.compress(x, key=Key()))


def _share(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).double().square().mean() / exact.double().square().mean())
