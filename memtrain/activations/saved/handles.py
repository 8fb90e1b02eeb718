"""What takes the place of a saved tensor in the graph, besides a payload."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from memtrain.activations.saved.store import check_version, without_elements
from memtrain.compressors import Integers, Key

BITS = Integers(limit=2)
"""The compressor for masks."""


class Kept:
    """Handle of a saved tensor that is kept, or whose shape alone is read.

    `kept` is the tensor, detached, or a copy of a small view of a large storage. If it is None, a
    tensor of this shape without values comes back.
    """

    __slots__ = ("__weakref__", "_counter", "_geometry", "_version", "kept")

    def __init__(self, x: Tensor, kept: Tensor | None) -> None:
        self.kept, self._geometry = kept, (x.shape, x.stride())
        self._counter = None if x.is_inference() else without_elements(x)
        self._version = 0 if x.is_inference() else x._version

    def unpack(self) -> Tensor:
        """Return the kept tensor."""
        if self._counter is not None:
            check_version(self._counter, self._version)
        if self.kept is not None:
            return self.kept
        counter: Any = self._counter  # None only for inference tensors, which are kept
        return counter.new_empty_strided(*self._geometry)


class MaskBias:
    """Takes the place of what attention makes of a mask of bools: 0 and one other number.

    A dropout's mask holds 0 and 1 / (1 - p). A bias is 0 where a key is attended to, and one low
    number elsewhere: -inf, or for cuDNN -65504. CUDA's memory-efficient kernel pads its rows and
    expands it to all scores, and reads the ends of the rows, so that the bias comes back with the
    memory that it had.

    Memory:
        1/8 byte per element that memory holds, and one number.
    """

    __slots__ = ("__weakref__", "_geometry", "_hidden", "_low", "_numel", "nbytes")

    def __init__(self, x: Tensor) -> None:
        x = x.detach()
        stored = _stored(x)
        self._hidden = BITS.compress((stored != 0).contiguous(), key=Key())
        low, high = stored.aminmax()
        self._low = torch.where(low < 0, low, high)
        self._geometry = x.shape, x.stride(), x.storage_offset()
        self._numel = x.untyped_storage().nbytes() // x.itemsize
        self.nbytes = self._hidden.nbytes + self._low.nbytes

    def equals(self, x: Tensor) -> bool:
        """Return whether `unpack` returns `x`: its elements are 0 and one other number.

        Fake tensors have no elements: True, after the same allocations.
        """
        stored = _stored(x.detach())
        counts = torch.count_nonzero(stored), torch.count_nonzero(stored == self._low)
        if type(x) is FakeTensor:
            return True
        nonzero, low = map(int, counts)
        return nonzero in (0, low)

    def unpack(self) -> Tensor:
        """Return the bias."""
        bias = self._low.new_zeros(self._numel).as_strided(*self._geometry)
        _stored(bias).masked_fill_(BITS.decompress(self._hidden), self._low)
        return bias


def _stored(x: Tensor) -> Tensor:
    """Return the elements of `x` that memory holds: those of a stride of 0 once."""
    for dim, step in enumerate(x.stride()):
        if step == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x
