"""Step functions that approximate or equal an activation's derivative."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from memtrain.compressors.fewbit.functions import Array

MAX_BITS = 8


@dataclass(frozen=True, kw_only=True)
class Approximation:
    """A step function q that replaces f' in the backward pass.

    The code of x is the number of boundaries below its side, which is x (`"plain"`) or |x|
    (`"even"`). `"band"` has two boundaries, and code 1 for lo < x <= hi. Kernels compare in
    float32.

    Attributes:
        boundaries: The 2**bits - 1 inner boundaries, ascending; 2 for a band.
        levels: The 2**bits values; `levels[i]` is the value left of and at `boundaries[i]`. For a
            band: outside, inside.
        error: The weighted integral of (f' - q)**2 over the interval; not compared.
        parity: `"plain"`, `"even"` or `"band"`.
    """

    boundaries: tuple[float, ...]
    levels: tuple[float, ...]
    error: float = field(compare=False)
    parity: str = "plain"

    @property
    def bits(self) -> int:
        """Bits per code."""
        return len(self.levels).bit_length() - 1

    @property
    def even(self) -> bool:
        """Whether the boundaries are compared with |x|."""
        return self.parity == "even"

    def __call__(self, x: Array) -> Array:
        """Return q(x) in float64; a value equal to a boundary has the level on its left."""
        side = np.abs(x) if self.even else x
        code = np.searchsorted(self.boundaries, side, side="left")
        if self.parity == "band":
            code = code % 2
        return np.array(self.levels)[code]


_TINY = float(np.finfo(np.float32).tiny)


def _below(x: float) -> float:
    """Return the greatest float32 below `x`; subnormals count as 0, as in the kernels."""
    single = np.float32(x)
    if abs(single) < _TINY:
        return -_TINY
    under = float(np.nextafter(single, np.float32(-np.inf)))
    return 0.0 if abs(under) < _TINY else under


def _step(point: float, left: float, right: float) -> Approximation:
    return Approximation(boundaries=(float(np.float32(point)),), levels=(left, right), error=0.0)


def _band(low: float, high: float, inside: float) -> Approximation:
    """Return a band: `inside` for low < x < high, else 0, as for torch's hardtanh."""
    inner = float(np.float32(low)), _below(high)
    if inner[0] >= inner[1]:
        return _step(0.0, 0.0, 0.0)
    return Approximation(boundaries=inner, levels=(0.0, inside), error=0.0, parity="band")


def _shrink(lambd: float) -> Approximation:
    """Return 0 for |x| <= lambd, else 1."""
    if lambd < 0:
        return _step(0.0, 1.0, 1.0)
    inner = (float(np.float32(lambd)),)
    return Approximation(boundaries=inner, levels=(0.0, 1.0), error=0.0, parity="even")


# Parameters -> the exact one-bit table of a piecewise-linear function with two slopes. Ties follow
# torch, which compares hardshrink and softshrink with lambd rounded to the dtype of x, and all
# others in float32.
EXACT: dict[str, Callable[..., Approximation]] = {
    "relu": lambda: _step(0.0, 0.0, 1.0),
    "leaky_relu": lambda slope: _step(0.0, slope, 1.0),
    "relu6": lambda: _band(0.0, 6.0, 1.0),
    "hardtanh": lambda low, high: _band(low, high, 1.0),
    # Torch's backward has 1 / 6 in float32, also for float64.
    "hardsigmoid": lambda: _band(-3.0, 3.0, float(np.float32(1 / 6))),
    "hardshrink": _shrink,
    "softshrink": _shrink,
    "threshold": lambda threshold, _: _step(threshold, 0.0, 1.0),
}
