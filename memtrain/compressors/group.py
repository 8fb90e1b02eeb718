"""Min/max groups at 1 to 8 bits, for activations."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from memtrain.compressors.base import Compressor, Key, Packed
from memtrain.kernels.group import group
from memtrain.kernels.norm.norm import Codes

_BELOW = -120.0
"""Decoded value of elements at the floor: its exp() is 0 in float32."""
SHORTEST_ROW = 32
"""Bounds of shorter groups take more than a quarter of the bytes of 4-bit codes."""


@dataclass(frozen=True, kw_only=True)
class Group(Compressor):
    """Codes between each group's minimum and maximum, in `2**bits - 1` equal steps.

    Stochastic rounding is unbiased: the mean over keys is the tensor, within 2**-16 of a step. The
    error of an element is below one step (nearest: half a step). float64 is rounded to float32
    first. A NaN or an Inf changes no other element and decodes to a bound of its group. See
    `kernels.group.group.group_quantize`.

    Args:
        bits: Bits per element, 1 to 8.
        group_size: Elements per group, a multiple of 8, from 8 to 16384.
        rounding: `"stochastic"` (the key gives the seed) or `"nearest"` (the key is unused).
        whole_rows: Whether groups of a saved activation end at rows (the last dimension), so that
            rows of zeros stay zeros. Groups then have the largest multiple of 8 elements, from 32
            to `group_size`, that divides a row, or else `group_size`. A norm's codes have
            `group_size`.
        floor: Elements up to this number decode to -120, whose exp() is 0; None for no limit. An
            outlier makes the steps of its group wide; a backward that reads only exp() needs no
            value below -20.

    Raises:
        ValueError: If a field is out of range.

    Memory:
        bits / 8 + 4 / group_size bytes per element, in whole groups: 0.516 at the defaults.

    Example:
        >>> packed = Group(bits=2, group_size=8).compress(torch.arange(8.0), key=Key(seed=1))
        >>> packed.nbytes, Group(bits=2, group_size=8).decompress(packed).shape
        (6, torch.Size([8]))

    Reference:
        Chen et al., ActNN, ICML 2021, arXiv:2104.14129. Here bounds are rounded before their use,
        which makes the rounding unbiased.
    """

    parts = ("codes", "bounds")
    reads_rows = True

    bits: int = 4
    group_size: int = 256
    rounding: str = "stochastic"
    # Not compared: ops that save the same tensor share a payload.
    whole_rows: bool = field(default=False, compare=False)
    floor: float | None = None

    def __post_init__(self) -> None:
        for name in ("bits", "group_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name}={value!r}; allowed: integers")
        group.check(self.bits, self.group_size)
        if self.rounding not in ("stochastic", "nearest"):
            raise ValueError(f"rounding={self.rounding!r}; allowed: 'stochastic', 'nearest'")
        if not isinstance(self.whole_rows, bool):
            raise ValueError(f"whole_rows={self.whole_rows!r}; allowed: true, false")

    def group_codes(self, key: Key) -> Codes:
        """Return the options of kernels for these codes."""
        return self.bits, self.group_size, key.bits(), self.rounding == "stochastic"

    def for_saved(self, shape: torch.Size) -> "Group":
        """Return groups that divide rows of this shape, with `whole_rows`.

        Example:
            >>> groups = Group(group_size=128, whole_rows=True)
            >>> [groups.for_saved(torch.Size((4, n))).group_size for n in (768, 320, 96, 7)]
            [128, 80, 96, 128]
        """
        if not self.whole_rows or not shape:
            return self
        sizes = range(self.group_size // 8 * 8, SHORTEST_ROW - 1, -8)
        fitting = next((size for size in sizes if shape[-1] % size == 0), self.group_size)
        return replace(self, group_size=fitting, whole_rows=False)

    def kernel(self, x: Tensor) -> tuple[Callable[[Tensor, int], tuple[Tensor, ...]], int] | None:
        """Return the function from `kernels.group.group.kernel_of`, which has no floor."""
        if self.floor is not None:
            return None
        return group.kernel_of(x, self.bits, self.group_size, self.rounding == "stochastic")

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Quantise a float tensor in logical order.

        Returns:
            Tensors `codes`, uint8 [n_groups, group_size / 8 * bits], and `bounds`, bfloat16
            [n_groups, 2].
        """
        x = x.detach() if x.requires_grad else x
        x = x if self.floor is None else x.clamp(min=self.floor)
        codes, bounds = group.group_quantize(x, *self.group_codes(key))
        return Packed({"codes": codes, "bounds": bounds}, x.shape, x.dtype)

    def decompress(self, packed: Packed) -> Tensor:
        """Return the tensor, contiguous, with the payload's shape and dtype."""
        tensors, shape, dtype = packed
        payload = tensors["codes"], tensors["bounds"], self.bits, self.group_size
        x = group.group_dequantize(*payload, shape, dtype)
        return x if self.floor is None else torch.threshold_(x, self.floor, _BELOW)
