"""Floating-point formats with 3 to 16 bits: names, ranges, and rounding to them."""

import re
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from memtrain.kernels.floats import rounding
from memtrain.kernels.floats.rounding import FormatFields

_WIDTHS = re.compile(r"1-(\d{1,2})-(\d{1,2})(?:\+(\d{1,3}))?")
ROUNDINGS = ("away", "even", "stochastic")
_CHOICES = {
    "overflow": ("saturate", "inf"), "rounding": ROUNDINGS, "specials": ("none", "nan", "ieee")
}  # fmt: skip


@dataclass(frozen=True)
class FloatFormat:
    """A sign bit, an exponent `e` with E bits and a mantissa `f` with M bits.

    A code represents +-1.f * 2**(e - (2**(E-1) - 1) - bias), or, for e = 0, +-0.f * 2**(1 -
    (2**(E-1) - 1) - bias). The format must lie within float32: its smallest normal number is at
    least 2**-126, its largest number below 2**128. Its smallest number is at least 2**-126, too,
    unless the smallest normal number is exactly 2**-126, as for bfloat16.

    Attributes:
        exponent_bits: E, 1 or more; with the sign and the mantissa 3 to 16 bits.
        mantissa_bits: M, 0 or more.
        bias: Added to the usual bias 2**(E-1) - 1, which divides numbers by 2**bias.
        overflow: The result for numbers that round past the largest: `"saturate"`, the largest with
            their sign (for Inf, too), or `"inf"`, Inf (NaN if `specials="nan"`).
        rounding: To nearest with ties `"away"` from zero or to `"even"` codes, or `"stochastic"`,
            up or down with the number as the mean.
        specials: The codes of special values. `"none"`: the sign bit alone (0x80 with 8 bits) is
            NaN, also for Inf, and -0 is encoded as 0. `"nan"`: NaN if all bits of exponent and
            mantissa are set, as in OCP e4m3fn. `"ieee"`: Inf and NaN if all bits of the exponent
            are set; needs a mantissa bit.

    Raises:
        ValueError: If a field is not allowed, or the format exceeds float32.

    Memory:
        1 byte per code of up to 8 bits, else 2.

    Example:
        >>> FP8_FORWARD.max
        30.0
        >>> FP8_FORWARD.round(torch.tensor([1.0625, 100.0]))
        tensor([ 1.1250, 30.0000])

    Reference:
        Lee et al., Training with Mixed-Precision Floating-Point Assignments, arXiv:2301.13464 (ties
        away from zero; no special codes); Sun et al., HFP8 Training, NeurIPS 2019 (1-4-3 with bias
        4, 1-5-2); OCP 8-bit Floating Point Specification, 2023 (e4m3fn, e5m2).
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int = 0
    overflow: str = "saturate"
    rounding: str = "away"
    specials: str = "none"

    def __post_init__(self) -> None:
        for name, least in (("exponent_bits", 1), ("mantissa_bits", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name}={value!r}; allowed: a whole number, {least} or more")
        if not 3 <= self.bits <= 16:
            fields = f"exponent_bits={self.exponent_bits}, mantissa_bits={self.mantissa_bits}"
            raise ValueError(f"{fields}: {self.bits} bits with the sign; allowed: 3 to 16")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        if self.specials == "ieee" and not self.mantissa_bits:
            raise ValueError("specials='ieee' with mantissa_bits=0: no code is left for NaN")
        low, high, widest = self._biases()
        if low > max(high, widest):
            raise ValueError(f"exponent_bits={self.exponent_bits}: a range beyond float32's")
        if type(self.bias) is not int or not (
            low <= self.bias <= high or low <= self.bias == widest
        ):
            raise ValueError(f"bias={self.bias!r}; allowed: {low} to {high}, or {widest}")

    @property
    def bits(self) -> int:
        """Bits per code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def max(self) -> float:
        """The largest finite number."""
        return self.layout.number(self._limit())

    @property
    def min_subnormal(self) -> float:
        """The smallest positive number."""
        return 2.0 ** (self._least() - self.mantissa_bits)

    def round(self, x: Tensor, *, seed: int = 0) -> Tensor:
        """Return the rounded numbers of a float32, bfloat16 or float16 tensor, in its dtype.

        NaN stays NaN and -0 stays -0. The largest number is the largest that both the format and
        the dtype represent. `seed` has 64 bits and is used by stochastic rounding.

        Example:
            >>> FP8_BACKWARD.round(torch.tensor([1.1, 2e5]))
            tensor([1., inf])
        """
        return self.round_count(x, seed=seed)[0]

    def round_count(self, x: Tensor, *, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return `round` and the number of overflows (int64, []), counted in the same pass.

        Example:
            >>> FP8_FORWARD.round_count(torch.tensor([1.0, 30.9, 31.0, -torch.inf]))[1]
            tensor(2)
        """
        return rounding.round_count(x, self.layout, seed)

    def round_count_(self, x: Tensor, *, seed: int = 0) -> Tensor:
        """Round in place; return the number of overflows (int64, []).

        Example:
            >>> x = torch.tensor([1.0625, 31.0])
            >>> FP8_FORWARD.round_count_(x), x
            (tensor(1), tensor([ 1.1250, 30.0000]))
        """
        return rounding.round_count_(x, self.layout, seed)

    def encode(self, x: Tensor, *, seed: int = 0) -> Tensor:
        """Return the codes of the rounded numbers, uint8, or int16 for more than 8 bits.

        Results of `round` are encoded exactly, except -0 (0) and Inf (NaN) for formats without
        special codes. The code of NaN has no sign.

        Example:
            >>> FP8_FORWARD.encode(torch.tensor([1.0, -30.0, torch.nan]))
            tensor([ 88, 255, 128], dtype=torch.uint8)
        """
        return rounding.encode(x, self.layout, seed)

    def decode(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the numbers of codes in float32, or rounded to bfloat16 or float16.

        Example:
            >>> FP8_FORWARD.decode(torch.tensor([88, 255], dtype=torch.uint8))
            tensor([  1., -30.])
        """
        return rounding.decode(codes, self.layout, dtype)

    @cached_property
    def layout(self) -> FormatFields:
        """The format's fields for the kernels."""
        mark, limit = 1 << (self.bits - 1), self._limit()
        top = mark - (1 << self.mantissa_bits) // 2  # IEEE's NaN
        return FormatFields(
            width=self.bits,
            mantissa_bits=self.mantissa_bits,
            least=self._least(),
            limit=limit,
            infinity=limit + 1 if self.specials == "ieee" else -1,
            nan={"none": mark, "nan": mark - 1, "ieee": top}[self.specials],
            saturate=int(self.overflow == "saturate"),
            rounding=ROUNDINGS.index(self.rounding),
        )

    def _limit(self) -> int:
        """Return the code of the largest finite number."""
        taken = {"none": 0, "nan": 1, "ieee": 1 << self.mantissa_bits}[self.specials]
        return (1 << (self.bits - 1)) - 1 - taken

    def _least(self) -> int:
        """Return the exponent of the smallest normal number."""
        return 2 - (1 << (self.exponent_bits - 1)) - self.bias

    def _biases(self) -> tuple[int, int, int]:
        """Return the bias's range with normal float32 numbers only, and that of float32's range."""
        unbiased = 2 - (1 << (self.exponent_bits - 1))
        top = max(self._limit() >> self.mantissa_bits, 1)  # the largest number's exponent
        widest = unbiased + 126
        return unbiased + top - 128, widest - self.mantissa_bits, widest


FP8_FORWARD = FloatFormat(4, 3, bias=4)
"""The paper's 8 bits for activations and weights: up to 30, saturating."""
FP8_BACKWARD = FloatFormat(5, 2, overflow="inf")
"""The paper's 8 bits for gradients: up to 114688, then Inf."""
FP16 = FloatFormat(6, 9)
"""The paper's 16 bits, which are not IEEE's: up to about 8.58e9, saturating."""
IEEE_FP16 = FloatFormat(5, 10, overflow="inf", rounding="even", specials="ieee")
"""torch.float16."""
BF16 = FloatFormat(8, 7, overflow="inf", rounding="even", specials="ieee")
"""torch.bfloat16."""
E4M3FN = FloatFormat(4, 3, rounding="even", specials="nan")
"""torch.float8_e4m3fn: up to 448, saturating; `overflow="inf"` gives NaN past it."""
E5M2 = FloatFormat(5, 2, overflow="inf", rounding="even", specials="ieee")
"""torch.float8_e5m2: up to 57344, then Inf."""

FORMATS = {
    "fp8_forward": FP8_FORWARD,
    "fp8_backward": FP8_BACKWARD,
    "fp16": FP16,
    "ieee_fp16": IEEE_FP16,
    "bf16": BF16,
    "e4m3fn": E4M3FN,
    "e5m2": E5M2,
}
"""Name in a config -> format."""


def named_format(name: str) -> FloatFormat:
    """Return the format with a name.

    A name is in `FORMATS`, or `1-E-M` or `1-E-M+bias` as in papers: E exponent and M mantissa bits,
    without special codes, saturating, ties away from zero. A suffix `:away`, `:even` or
    `:stochastic` changes the rounding.

    Raises:
        ValueError: If the name is unknown, or the widths are not allowed.

    Example:
        >>> named_format("1-4-3+4") == named_format("fp8_forward") == FP8_FORWARD
        True
        >>> named_format("fp8_forward:stochastic").rounding
        'stochastic'
    """
    base, colon, how = name.partition(":")
    if colon:
        if how not in ROUNDINGS:
            raise ValueError(f"format {name!r}: {how!r}; allowed: {', '.join(ROUNDINGS)}")
        return replace(named_format(base), rounding=how)
    if name in FORMATS:
        return FORMATS[name]
    if not (match := _WIDTHS.fullmatch(name)):
        allowed = ", ".join(FORMATS)
        raise ValueError(
            f"format {name!r} is unknown; allowed: {allowed}, 1-E-M, 1-E-M+bias; "
            "with :even or :stochastic"
        )
    exponent_bits, mantissa_bits, bias = (int(number or 0) for number in match.groups())
    return FloatFormat(exponent_bits, mantissa_bits, bias)
