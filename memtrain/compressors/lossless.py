"""Integers and boolean masks in fewer bytes, without loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from memtrain.compressors.base import Compressor, Key, Packed
from memtrain.kernels.packing import pack

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_NARROW = (torch.uint8, torch.int16, torch.int32)
_PACKED = 128  # values that 7 bits can represent


@dataclass(frozen=True, kw_only=True)
class Integers(Compressor):
    """Integers or booleans in the fewest bits or bytes for their values, exact.

    Values are from 0 to `limit`, exclusive: 2 for booleans. The width follows from the limit: no
    value is read. One-byte tensors are packed to the bit, wider ones become uint8, int16 or int32.

    Memory:
        1, 2, 4 or 8 bytes per element, never more than the tensor. One-byte tensors with a limit of
        at most 128 take ceil(log2(limit)) / 8 bytes, in whole blocks of 256 elements.

    Example:
        >>> x = torch.tensor([3, 250])
        >>> packed = Integers(limit=251).compress(x, key=Key())
        >>> packed.nbytes, Integers(limit=251).decompress(packed)
        (2, tensor([  3, 250]))
    """

    parts = ("values",)
    roles = frozenset()  # chosen by memtrain itself
    lossless = True

    limit: int

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ValueError(f"limit={self.limit}; allowed: 1 or more")

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Return `values`, flat if packed, else with the shape of `x`; never wider than `x`."""
        if x.dtype not in _INTEGERS:
            raise TypeError(f"dtype {x.dtype}; allowed: {', '.join(map(str, _INTEGERS))}")
        bits = self._bits(x.dtype)
        if bits:
            values = pack.pack_codes(x.view(torch.uint8), bits)
        else:
            narrower = (kind for kind in _NARROW if kind.itemsize < x.dtype.itemsize)
            fitting = (kind for kind in narrower if self.limit - 1 <= torch.iinfo(kind).max)
            values = x.to(next(fitting, x.dtype))
        return Packed({"values": values}, x.shape, x.dtype)

    def decompress(self, packed: Packed) -> Tensor:
        """Return the same tensor."""
        values, bits = packed.tensors["values"], self._bits(packed.dtype)
        if bits:
            codes = pack.unpack_codes(values, bits, packed.shape.numel())
            return codes.view(packed.dtype).view(packed.shape)
        return values.to(packed.dtype)

    def _bits(self, dtype: torch.dtype) -> int:
        """Return the bits per packed value; 0 for values in whole bytes.

        Wider dtypes contain indices, which are few, and are cast in one op.
        """
        if dtype.itemsize > 1 or self.limit > _PACKED:
            return 0
        return max(1, (self.limit - 1).bit_length())
