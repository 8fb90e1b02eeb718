"""Quantisation noise by analysis: of saved tensors, of derivatives, of optimizer states."""

from functools import cache

import torch
from torch import Tensor

from memtrain.activations.intercept.op_families import FAMILIES
from memtrain.compressors import Compressor, DerivativeCode, Keep, Key
from memtrain.compressors.fewbit.functions import CURVES
from memtrain.compressors.fewbit.step_function import EXACT
from memtrain.optim.states.layout import is_unsigned

_SOLVED = 6
"""Codebooks of more bits take seconds to solve; each bit more takes three quarters of the error."""
_OUTPUTS = {"sigmoid": lambda y: y * (1 - y), "tanh": lambda y: 1 - y * y}
"""Nonlinearities that save their output y, and their derivative in it."""


def relative_error(compressor: Compressor, op: str) -> float:
    """Compute the share of what an op's backward reads that rounding its saved tensor adds.

    It is the mean squared error for normal numbers, relative to their mean square. A nonlinearity's
    backward reads the derivative, whether codes of it are kept or its input is; masks and argmax
    indices are exact in any code.

    Example:
        >>> from memtrain.compressors import Group
        >>> 0.01 < relative_error(Group(bits=4), "linear") < 0.05
        True
        >>> relative_error(DerivativeCode(bits=3), "gelu") < relative_error(Group(bits=3), "gelu")
        True
    """
    if compressor.lossless or op == "dropout" or "max_pool" in op:
        return 0.0
    if isinstance(compressor, DerivativeCode):
        if op in EXACT or op in FAMILIES["@piecewise"]:
            return 0.0
        return _code_error(op if op in CURVES else compressor.function, compressor)
    return _slope_error(compressor, op) if op in CURVES else _error(compressor)


def derived_error(compressor: Compressor, op: str) -> float:
    """Compute the share added to an op's output that is computed again from its rounded input.

    It is the mean squared error for normal inputs, relative to the outputs' mean square. The output
    of an op that is no nonlinearity is as exact as its input.

    Example:
        >>> from memtrain.compressors import Group
        >>> derived_error(Group(bits=4), "layer_norm") == relative_error(Group(bits=4), "linear")
        True
    """
    return _through(op, compressor) if op in CURVES else _error(compressor)


def moment_error(state: str, compressor: Compressor | Keep) -> float:
    """Compute the share of an update's square that rounding one of Adam's moments adds.

    By analysis, of its steady state under normal gradients: the first moment m is normal, with
    scales that are log-normal by rows (deviation 1), columns (1/2) and elements (1/4), the second
    moment v is their square, and the update is m / sqrt(v). The relative squared errors of both
    factors add up.

    Example:
        >>> from memtrain.compressors import Block
        >>> few, many = Block(bits=4), Block(bits=8)
        >>> 0 < moment_error("exp_avg", many) < moment_error("exp_avg", few) < 1
        True
    """
    return 0.0 if isinstance(compressor, Keep) else _moment_error(is_unsigned(state), compressor)


@cache
def _code_error(function: str, code: DerivativeCode) -> float:
    bits = min(code.bits, _SOLVED)
    own = DerivativeCode(bits=bits, function=function)
    slope = torch.from_numpy(CURVES[function].slope(_normal().double().numpy()))
    return _share(_round_trip(own, _normal()), slope) * 0.25 ** (code.bits - bits)


@cache
def _slope_error(compressor: Compressor, op: str) -> float:
    if op in _OUTPUTS:
        y = torch.from_numpy(CURVES[op].value(_normal().double().numpy()))
        slope = _OUTPUTS[op]
        return _share(slope(_rounded(compressor, y.float()).double()), slope(y))
    return _through(op, compressor, slope=True)


@cache
def _error(compressor: Compressor) -> float:
    return _share(_rounded(compressor, _normal()), _normal())


@cache
def _through(op: str, compressor: Compressor, *, slope: bool = False) -> float:
    """The noise in a function of a rounded tensor, or in its derivative."""
    x, curve = _normal(), CURVES[op].slope if slope else CURVES[op].value
    back = curve(_rounded(compressor, x).double().numpy())
    return _share(torch.from_numpy(back), torch.from_numpy(curve(x.double().numpy())))


@cache
def _normal() -> Tensor:
    return torch.randn(64, 256, generator=torch.Generator("cpu").manual_seed(0), device="cpu")


def _rounded(compressor: Compressor, x: Tensor) -> Tensor:
    given = x if compressor.shaped else x.flatten()
    return _round_trip(compressor, given).view_as(x)


@cache
def _moment_error(unsigned: bool, compressor: Compressor) -> float:
    drawn = {"generator": torch.Generator("cpu").manual_seed(0), "device": "cpu"}
    rows, columns = (torch.randn(n, **drawn) for n in (128, 512))
    noise = torch.randn(128, 512, **drawn)
    scale = (rows[:, None] + columns / 2 + noise.flip(0, 1) / 4).exp()
    if not unsigned:
        return _share(_round_trip(compressor, noise * scale) / scale, noise)
    v = scale.square()
    again = _round_trip(compressor, v).clamp_min(v.min() * 1e-3)  # of what rounds to 0, eps is left
    return _share((v / again).sqrt(), torch.ones_like(v))


def _round_trip(compressor: Compressor, x: Tensor) -> Tensor:
    return compressor.decompress(compressor.compress(x, key=Key()))


def _share(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).double().square().mean() / exact.double().square().mean())
