"""Code books: the values in [-1, 1] that codes stand for, before a scale; and what kernels read."""

import re
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

MAPS = ("DE", "DE-0", "Linear", "Power-2", "Power-3")
_FLOAT = re.compile(r"E([1-5])M([0-6])")


def float_bits(map: str, *, signed: bool) -> int | None:
    """The bits that a small-float map takes, or None for the other maps.

    Example:
        >>> float_bits("E2M1", signed=True), float_bits("DE", signed=True)
        (4, None)
    """
    match = _FLOAT.fullmatch(map)
    return int(match[1]) + int(match[2]) + signed if match else None


@cache
def codebook(map: str, *, bits: int = 4, signed: bool) -> tuple[float, ...]:
    """The ascending values that codes stand for, before the scale.

    Args:
        map: `"DE"` (dynamic exponent: each decade below 1 holds twice the values of the decade
            under it), `"DE-0"` (unsigned DE whose zero is replaced by the smallest value),
            `"Linear"` (unsigned: k / 2**bits from k = 1, so no zero; signed: even on [-1, 1]),
            `"Power-2"` and `"Power-3"` (Linear's magnitudes to that power), or a small float such
            as `"E2M1"`: exponent and mantissa bits, with subnormals, without Inf and NaN, divided
            by its largest value; the spare code of a signed one's minus zero repeats -1.
        bits: 2 to 8; a small float's own number of bits.
        signed: Whether negative values are needed. Signed DE has +1 and no -1.

    Returns:
        2**bits values.

    Raises:
        ValueError: If the map is unknown, DE-0 is asked for with a sign, or a small float with
            other bits than its own.

    Example:
        >>> codebook("DE", signed=True)[:3]
        (-0.8875, -0.6625, -0.4375)
        >>> codebook("Linear", bits=2, signed=False)
        (0.25, 0.5, 0.75, 1.0)

    Reference:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861 (DE);
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507 (DE-0, Linear);
        its code's `power-2`, `power-3`. Its `float-point` is another table than ours.
    """
    own = float_bits(map, signed=signed)
    if map not in MAPS and own is None:
        raise ValueError(f"map {map!r} is unknown; allowed: {', '.join(MAPS)}, E<1-5>M<0-6>")
    if not 2 <= bits <= 8:
        raise ValueError(f"bits must be 2 to 8, got {bits}")
    if own is not None:
        if own != bits:
            sign = "signed" if signed else "unsigned"
            raise ValueError(f"map {map!r} has {own} bits {sign}: allowed with bits={own} only")
        return _small_float(map, signed)
    if map == "DE-0" and signed:
        raise ValueError("map 'DE-0' has no sign: allowed with signed=False only")
    if map in ("DE", "DE-0"):
        values = _dynamic_exponent(bits, signed)
        return values if map == "DE" else (values[1], *values[1:])
    return _power(1 if map == "Linear" else int(map[-1]), bits, signed)


def _power(exponent: int, bits: int, signed: bool) -> tuple[float, ...]:
    size = 2**bits
    if not signed:
        return tuple(((k + 1) / size) ** exponent for k in range(size))
    even = [2 * k / (size - 1) - 1 for k in range(size)]
    return tuple(x * abs(x) ** (exponent - 1) for x in even)


def _dynamic_exponent(bits: int, signed: bool) -> tuple[float, ...]:
    exponents = bits - 1
    values = [0.0, 1.0]
    for i in range(exponents):
        cells = 2 ** (i + (not signed))
        for k in range(cells):
            # the middle of cell k of [0.1, 1], in units that keep the decimals short
            middle = (2 * cells + 9 * (2 * k + 1)) / (20 * cells)
            values.append(middle / 10 ** (exponents - 1 - i))
    if signed:
        values += [-v for v in values if 0 < v < 1]
    return tuple(sorted(values))


def _small_float(map: str, signed: bool) -> tuple[float, ...]:
    exponent, mantissa = map[1:].split("M")
    steps = 2 ** int(mantissa)
    # Exponent 0 is subnormal, k / steps; the others are 1 + k / steps, doubled each time.
    octaves = range(2 ** int(exponent) - 1)
    values = [k / steps for k in range(steps)]
    values += [(1 + k / steps) * 2.0**e for e in octaves for k in range(steps)]
    values = [v / values[-1] for v in values]
    if signed:
        values += [-1.0, *(-v for v in values if v > 0)]
    return tuple(sorted(values))


@cache
def qmap(map: str, bits: int, signed: bool, device: torch.device) -> Tensor:
    """The code book as float32 [2**bits] on a device; made once."""
    return torch.tensor(codebook(map, bits=bits, signed=signed), device=device)


@cache
def midpoints(map: str, bits: int, signed: bool, device: torch.device) -> Tensor:
    """The bounds between neighbouring values, float32 [2**bits - 1], on a device; made once."""
    values = codebook(map, bits=bits, signed=signed)
    middle = [(a + b) / 2 for a, b in pairwise(values)]
    return torch.tensor(middle, device=device)


@cache
def table(map: str, signed: bool, device: torch.device) -> Tensor:
    """What the 4-bit kernels read: float32 [32], the 16 values, then the 15 midpoints and +Inf."""
    end = torch.tensor([float("inf")], device=device)
    return torch.cat([qmap(map, 4, signed, device), midpoints(map, 4, signed, device), end])


def count_above(x: Tensor, bounds: Tensor) -> Tensor:
    """How many of the ascending `bounds` are below each x: the nearest code, ties to the lower.

    Args:
        x: float32, [n, m].
        bounds: float32, [k] or [n, k]. NaN in `x` or `bounds` gives 0.

    Returns:
        int64, [n, m].
    """
    codes = torch.searchsorted(bounds, x.contiguous())
    nan = x.isnan() | bounds.isnan().any(-1, keepdim=True)
    return codes.masked_fill(nan, 0)
