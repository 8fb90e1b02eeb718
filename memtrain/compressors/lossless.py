"""Lossless compressors: masks and integers in fewer bytes."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memtrain.compressors.base import Compressor, Key, Packed
from memtrain.kernels.packing import pack

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_NARROW = (torch.uint8, torch.int16, torch.int32)
_PACKED = 128  # values that 7 bits can represent


@dataclass(frozen=True, kw_only=True)
class Mask(Compressor):
    """A boolean tensor at one bit per element, exact.

    Memory:
        1 / 8 byte per element, in whole blocks of 32 bytes.

    Example:
        >>> x = torch.tensor([True, False, True])
        >>> Mask().decompress(Mask().compress(x, key=Key()))
        tensor([ True, False,  True])
    """

    parts = ("bits",)
    roles = frozenset()  # memtrain itself chooses it for tensors of bools
    lossless = True

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Pack `x`.

        Args:
            x: Any shape, bool.
            key: Not used.

        Returns:
            Tensor `bits`, uint8 [ceil(numel / 256) * 32].

        Raises:
            TypeError: If `x` is not bool.
        """
        if x.dtype != torch.bool:
            raise TypeError(f"dtype {x.dtype}; allowed: torch.bool")
        return Packed({"bits": pack.pack_mask(x)}, x.shape, x.dtype)

    def decompress(self, packed: Packed) -> Tensor:
        """Return the same tensor, contiguous."""
        numel = packed.shape.numel()
        return pack.unpack_mask(packed.tensors["bits"], numel).view(packed.shape)


@dataclass(frozen=True, kw_only=True)
class Integers(Compressor):
    """An integer tensor in the narrowest of uint8, int16 and int32 that holds its values, exact.

    The width depends on the values, so `compress` reads the minimum and the maximum, which
    synchronizes with a GPU. A fake or meta tensor has no values: its width stays, and its bytes
    are an upper bound. With a `limit` the width follows from the limit alone, and one-byte tensors
    are packed to the bit.

    Args:
        limit: All values are known to lie from 0 to below it, as indices do; None: they are read.

    Raises:
        ValueError: If the limit is below 1.

    Memory:
        1, 2, 4 or 8 bytes per element, never more than before. Of uint8 and int8 with a limit of
        128 or less, ceil(log2(limit)) / 8 bytes, in whole blocks of 256 elements.

    Example:
        >>> x = torch.tensor([3, 250])
        >>> packed = Integers().compress(x, key=Key())
        >>> packed.nbytes, Integers().decompress(packed)
        (2, tensor([  3, 250]))
    """

    parts = ("values",)
    roles = frozenset()  # memtrain itself chooses it for tensors of integers
    lossless = True

    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit}; allowed: 1 or more, or None")

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Narrow `x`; a tensor that cannot be narrower is its own payload.

        Args:
            x: Any shape, uint8, int8, int16, int32 or int64.
            key: Not used.

        Returns:
            Tensor `values`, of `x`'s shape; packed ones are flat.

        Raises:
            TypeError: If `x` is of another dtype.
        """
        if x.dtype not in _INTEGERS:
            raise TypeError(f"dtype {x.dtype}; allowed: {', '.join(map(str, _INTEGERS))}")
        bits = self._bits(x.dtype)
        if bits:
            values = pack.pack_codes(x.view(torch.uint8), bits)
        else:
            values = x.to(_narrowest(x, self.limit))
        return Packed({"values": values}, x.shape, x.dtype)

    def decompress(self, packed: Packed) -> Tensor:
        """Return the same tensor."""
        values, bits = packed.tensors["values"], self._bits(packed.dtype)
        if bits:
            codes = pack.unpack_codes(values, bits, packed.shape.numel())
            return codes.view(packed.dtype).view(packed.shape)
        return values.to(packed.dtype)

    def _bits(self, dtype: torch.dtype) -> int:
        """Return the bits per packed value; 0 if values are stored in whole bytes.

        Wider dtypes hold indices, which are few beside what they index, and are cast in one op.
        """
        if dtype.itemsize > 1 or self.limit is None or self.limit > _PACKED:
            return 0
        return max(1, (self.limit - 1).bit_length())


def _narrowest(x: Tensor, limit: int | None) -> torch.dtype:
    """Return the narrowest dtype that can represent the values of `x`, else its own dtype."""
    narrower = [dtype for dtype in _NARROW if dtype.itemsize < x.dtype.itemsize]
    if limit is not None:
        fitting = (dtype for dtype in narrower if limit - 1 <= torch.iinfo(dtype).max)
        return next(fitting, x.dtype)
    if not narrower or isinstance(x, FakeTensor) or x.is_meta:
        return x.dtype
    if x.numel() == 0:
        return narrower[0]
    low, high = (int(bound) for bound in torch.aminmax(x))
    for dtype in narrower:
        if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            return dtype
    return x.dtype
