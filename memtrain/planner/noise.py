"""Quantisation noise by analysis, for saved tensors, derivatives and optimizer states."""

from functools import cache

import torch
from torch import Tensor

from memtrain.activations.intercept.op_families import FAMILIES
from memtrain.compressors import Compressor, DerivativeCode, Keep, Key
from memtrain.compressors.fewbit.functions import CURVES
from memtrain.compressors.fewbit.step_function import EXACT
from memtrain.kernels.derivative.pointwise import value
from memtrain.optim.states.layout import is_unsigned

_SOLVED = 6
"""Codebooks of more bits take seconds to solve; each bit more takes three quarters of the error."""
_OUTPUTS = {"sigmoid": lambda y: y * (1 - y), "tanh": lambda y: 1 - y * y}
"""Nonlinearities that save their output y, and their derivative in it."""


def relative_error(compressor: Compressor, op: str) -> float:
    """Return the mean squared error that compression adds, relative to the mean square.

    The error is that of the tensor which the op's backward reads, for normal numbers: for a
    nonlinearity its derivative. Masks and argmax indices are exact in any code.
    """
    if compressor.lossless or op == "dropout" or "max_pool" in op:
        return 0.0
    if isinstance(compressor, DerivativeCode):
        if op in EXACT or op in FAMILIES["@piecewise"]:
            return 0.0
        return _code_error(op if op in CURVES else compressor.function, compressor)
    return _slope_error(compressor, op) if op in CURVES else _error(compressor)


def derived_error(compressor: Compressor, op: str) -> float:
    """Return the relative squared error of an op's output, recomputed from its compressed input.

    The output of an op that is no nonlinearity is as exact as its input.
    """
    return _through(op, compressor) if op in CURVES else _error(compressor)


def moment_error(state: str, compressor: Compressor | Keep) -> float:
    """Return the relative squared error of an update that compressing one of Adam's moments adds.

    This is an analysis of the steady state under normal gradients. The first moment m is normal,
    with scales that are log-normal by rows (deviation 1), columns (1/2) and elements (1/4). The
    second moment v is the scale's square, and the update is m / sqrt(v). The relative squared
    errors of both factors add up.
    """
    return 0.0 if isinstance(compressor, Keep) else _moment_error(is_unsigned(state), compressor)


@cache
def _code_error(function: str, code: DerivativeCode) -> float:
    bits = min(code.bits, _SOLVED)
    solved = DerivativeCode(bits=bits, function=function)
    slope = torch.from_numpy(CURVES[function].slope(_normal().double().numpy()))
    return _share(_round_trip(solved, _normal()), slope) * 0.25 ** (code.bits - bits)


@cache
def _slope_error(compressor: Compressor, op: str) -> float:
    if op in _OUTPUTS:
        y = value(op, _normal().double())
        slope = _OUTPUTS[op]
        return _share(slope(_rounded(compressor, y.float()).double()), slope(y))
    return _through(op, compressor, slope=True)


@cache
def _error(compressor: Compressor) -> float:
    return _share(_rounded(compressor, _normal()), _normal())


@cache
def _through(op: str, compressor: Compressor, *, slope: bool = False) -> float:
    """Return the error of a function of a compressed tensor, or of its derivative."""
    pair = _rounded(compressor, _normal()).double(), _normal().double()
    if slope:
        return _share(*(torch.from_numpy(CURVES[op].slope(x.numpy())) for x in pair))
    return _share(*(value(op, x) for x in pair))


@cache
def _normal() -> Tensor:
    return torch.randn(64, 256, generator=torch.Generator("cpu").manual_seed(0), device="cpu")


def _rounded(compressor: Compressor, x: Tensor) -> Tensor:
    return _round_trip(compressor, x if compressor.shaped else x.flatten()).view_as(x)


@cache
def _moment_error(unsigned: bool, compressor: Compressor) -> float:
    drawn = {"generator": torch.Generator("cpu").manual_seed(0), "device": "cpu"}
    rows, columns = (torch.randn(n, **drawn) for n in (128, 512))
    noise = torch.randn(128, 512, **drawn)
    scale = (rows[:, None] + columns / 2 + noise.flip(0, 1) / 4).exp()
    if not unsigned:
        return _share(_round_trip(compressor, noise * scale) / scale, noise)
    v = scale.square()
    least = v.min() * 1e-3  # of what rounds to 0, eps is left
    rounded = _round_trip(compressor, v).clamp_min(least)
    return _share((v / rounded).sqrt(), torch.ones_like(v))


def _round_trip(compressor: Compressor, x: Tensor) -> Tensor:
    return compressor.decompress(compressor.compress(x, key=Key()))


def _share(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).double().square().mean() / exact.double().square().mean())
