"""One-bit tables that give the very derivative: piecewise-linear functions of two slopes."""

from collections.abc import Callable

import numpy as np

from memtrain.compressors.fewbit.step_function import Approximation

_TINY = float(np.finfo(np.float32).tiny)


def _below(x: float) -> float:
    """The greatest float32 below `x`; subnormals count as 0, for the kernels flush boundaries."""
    single = np.float32(x)
    if abs(single) < _TINY:
        return -_TINY
    under = float(np.nextafter(single, np.float32(-np.inf)))
    return 0.0 if abs(under) < _TINY else under


def _step(kink: float, left: float, right: float) -> Approximation:
    return Approximation(boundaries=(float(np.float32(kink)),), levels=(left, right), error=0.0)


def _band(low: float, high: float, inside: float) -> Approximation:
    """`inside` where low < x < high, 0 elsewhere and at both ends, as torch's hardtanh does."""
    inner = float(np.float32(low)), _below(high)
    if inner[0] >= inner[1]:
        return _step(0.0, 0.0, 0.0)
    return Approximation(boundaries=inner, levels=(0.0, inside), error=0.0, parity="band")


def _shrink(lambd: float) -> Approximation:
    """0 where |x| <= lambd, 1 elsewhere."""
    if lambd < 0:
        return _step(0.0, 1.0, 1.0)
    inner = (float(np.float32(lambd)),)
    return Approximation(boundaries=inner, levels=(0.0, 1.0), error=0.0, parity="even")


# The function's parameters -> its table. Torch's own conventions hold at ties. Torch compares
# hardshrink and softshrink with lambd rounded to the dtype of x, all others in float32.
EXACT: dict[str, Callable[..., Approximation]] = {
    "relu": lambda: _step(0.0, 0.0, 1.0),
    "leaky_relu": lambda slope: _step(0.0, slope, 1.0),
    "prelu": lambda slope: _step(0.0, slope, 1.0),
    "rrelu": lambda lower, upper: _step(0.0, (lower + upper) / 2, 1.0),
    "relu6": lambda: _band(0.0, 6.0, 1.0),
    "hardtanh": lambda low, high: _band(low, high, 1.0),
    "hardsigmoid": lambda: _band(-3.0, 3.0, 1 / 6),
    "hardshrink": _shrink,
    "softshrink": _shrink,
    "threshold": lambda threshold, _: _step(threshold, 0.0, 1.0),
}
