"""Codebooks: the values in [-1, 1] of codes, before scaling."""

import re
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

CODEBOOKS = ("DE", "DE-0", "Linear", "Power-1.5", "Power-2", "Power-3")
_FLOAT = re.compile(r"E([1-5])M([0-6])")


class Codebook(NamedTuple):
    """A codebook: its name, the bits per code, and whether values are signed.

    Example:
        >>> Codebook("Linear", 2, signed=False).values(torch.device("cpu"))
        tensor([0.2500, 0.5000, 0.7500, 1.0000])
    """

    name: str
    bits: int = 4
    signed: bool = True

    def values(self, device: torch.device) -> Tensor:
        """Return the ascending values, float32 [2**bits], cached per device."""
        return _table(self, device, midpoints=False)

    def midpoints(self, device: torch.device) -> Tensor:
        """Return the midpoints of neighbouring values, float32 [2**bits - 1], cached per device."""
        return _table(self, device, midpoints=True)


def float_bits(name: str, *, signed: bool) -> int | None:
    """Return the bits of a small-float codebook, or None for other codebooks."""
    match = _FLOAT.fullmatch(name)
    return int(match[1]) + int(match[2]) + signed if match else None


@cache
def codebook(name: str, bits: int = 4, signed: bool = True) -> tuple[float, ...]:
    """Return the 2**bits ascending values of codes (2 to 8 bits), before scaling.

    - `"DE"` (dynamic exponent): each decade below 1 has twice the values of the next lower decade.
      Signed DE has +1 and no -1.
    - `"DE-0"`: unsigned DE with the smallest value in place of zero.
    - `"Linear"`: unsigned k / 2**bits from k = 1; signed even on [-1, 1].
    - `"Power-1.5"`, `"Power-2"` and `"Power-3"`: powers of Linear's magnitudes. Signed Power-1.5
      has 0 and +1, and no -1: (k / 2**(bits - 1))**1.5 with the sign of k.
    - A small float such as `"E2M1"`: exponent and mantissa bits, with subnormals, without Inf and
      NaN, divided by its largest value. It has its own bits only. The code of -0 repeats -1.

    Example:
        >>> codebook("DE", signed=True)[:3]
        (-0.8875, -0.6625, -0.4375)

    Reference:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861 (DE);
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507 (DE-0, Linear);
        its code's `power-2`, `power-3`. Its `float-point` is a different codebook.
    """
    known = float_bits(name, signed=signed)
    if name not in CODEBOOKS and known is None:
        allowed = ", ".join(CODEBOOKS)
        raise ValueError(f"map {name!r} is unknown; allowed: {allowed}, E<1-5>M<0-6>")
    if not 2 <= bits <= 8:
        raise ValueError(f"bits must be 2 to 8, got {bits}")
    if known is not None:
        if known != bits:
            sign = "signed" if signed else "unsigned"
            raise ValueError(f"map {name!r} has {known} bits {sign}: allowed: bits={known}")
        return _small_float(name, signed)
    if name == "DE-0" and signed:
        raise ValueError("map 'DE-0' has no sign: allowed with signed=False only")
    if name in ("DE", "DE-0"):
        values = _dynamic_exponent(bits, signed)
        return values if name == "DE" else (values[1], *values[1:])
    return _power(1.0 if name == "Linear" else float(name.removeprefix("Power-")), bits, signed)


def _power(exponent: float, bits: int, signed: bool) -> tuple[float, ...]:
    size = 2**bits
    if not signed:
        return tuple(((k + 1) / size) ** exponent for k in range(size))
    if exponent == 1.5:
        even = [2 * (k + 1) / size - 1 for k in range(size)]
    else:
        even = [2 * k / (size - 1) - 1 for k in range(size)]
    return tuple(x * abs(x) ** (exponent - 1) for x in even)


def _dynamic_exponent(bits: int, signed: bool) -> tuple[float, ...]:
    exponents = bits - 1
    values = [0.0, 1.0]
    for i in range(exponents):
        cells = 2 ** (i + (not signed))
        for k in range(cells):
            # The middle of cell k of [0.1, 1], in units with short decimals.
            middle = (2 * cells + 9 * (2 * k + 1)) / (20 * cells)
            values.append(middle / 10 ** (exponents - 1 - i))
    if signed:
        values += [-v for v in values if 0 < v < 1]
    return tuple(sorted(values))


def _small_float(name: str, signed: bool) -> tuple[float, ...]:
    exponent, mantissa = name[1:].split("M")
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
def _table(book: Codebook, device: torch.device, midpoints: bool) -> Tensor:
    values = codebook(book.name, bits=book.bits, signed=book.signed)
    table = [(a + b) / 2 for a, b in pairwise(values)] if midpoints else values
    with unset_fake_temporarily():  # real steps use the cached tensor, too
        return torch.tensor(table, dtype=torch.float32, device=device)
