"""Codes of a float format, exact for numbers of the format."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from memtrain.compressors.base import Compressor, Key, Packed
from memtrain.kernels.floats.formats import FloatFormat, named_format
from memtrain.kernels.floats.rounding import limits


@dataclass(frozen=True, kw_only=True)
class Float(Compressor):
    """Codes of a float format, without a scale.

    Numbers of the format are restored bit for bit; others are rounded as by `FloatFormat.round`.
    Formats without special codes (`fp8_forward`, `fp8_backward`, `fp16`) decode -0 to 0, and
    numbers that `round` converts to Inf to NaN.

    Args:
        format: A name for `memtrain.precision.named_format`, or a `FloatFormat`.

    Raises:
        ValueError: If the name is unknown.
        TypeError: If the format has another type.

    Memory:
        1 byte per element for formats of at most 8 bits, else 2.

    Example:
        >>> import torch
        >>> fp8 = Float(format="fp8_forward")
        >>> packed = fp8.compress(torch.tensor([1.125, 1.0625, -100.0]), key=Key())
        >>> packed.nbytes, fp8.decompress(packed)
        (3, tensor([  1.1250,   1.1250, -30.0000]))

    Reference:
        Lee et al., Training with Mixed-Precision Floating-Point Assignments, arXiv:2301.13464.
    """

    parts = ("codes",)

    format: Any = "fp8_forward"

    def __post_init__(self) -> None:
        if not isinstance(self.format, str | FloatFormat):
            raise TypeError(f"format={self.format!r}; allowed: a name or a FloatFormat")
        self.parsed  # noqa: B018 (raises for an unknown name)

    @property
    def parsed(self) -> FloatFormat:
        """The format."""
        return named_format(self.format) if isinstance(self.format, str) else self.format

    @property
    def second_moment(self) -> bool:
        """Whether the format has numbers below the square of Adam's `eps`, without a scale."""
        return self.parsed.min_subnormal <= 2.0**-54

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Return `codes`, uint8 or int16, with the shape of `x`."""
        parsed, seed, rounded = self.parsed, key.bits(), x.contiguous()
        if x.dtype.itemsize == 2 and limits(parsed.layout, x.dtype)[0] < parsed.layout.limit:
            rounded = parsed.round(rounded, seed=seed)  # to numbers that the dtype of x represents
        codes = parsed.encode(rounded, seed=seed)
        return Packed({"codes": codes}, x.shape, x.dtype)

    def decompress(self, packed: Packed) -> Tensor:
        """Return a contiguous tensor of the original shape and dtype."""
        return self.parsed.decode(packed.tensors["codes"], packed.dtype)
