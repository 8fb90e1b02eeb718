"""Compression of saves of one form: what the form tells is found once, not at each save.

A small tensor's kernel takes less time than the functions that lead to it, each of which asks what
the one before has asked.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from memtrain.activations.saved.flatten import Layout, Memory, flatten, steps_of
from memtrain.compressors import Compressor
from memtrain.kernels.dispatch import is_ordinary

if TYPE_CHECKING:
    from memtrain.activations.saved.handles import Shared


class Bound(NamedTuple):
    """A compressor of plain tensors of one shape, dtype, memory order and device."""

    compressor: Compressor
    """With groups for this shape."""
    compress: Callable[[Tensor, int], tuple[Tensor, ...]]
    """The payload's tensors, in the order of the compressor's `parts`."""
    decompress: Callable[..., Tensor]
    nbytes: int
    """Of a payload."""
    stored: torch.Size
    """The shape in memory order."""
    inverse: list[int] | None
    """The permutation back, if there is one."""

    @classmethod
    def of(
        cls, x: Tensor, layout: Layout, key: Memory | None, compressor: Compressor
    ) -> "Bound | None":
        """Bind a compressor to saves like `x`; None where it or the tensor is not of the kind.

        Args:
            x: The save, detached.
            layout: Its own.
            key: Of `memory_of`.
            compressor: Of its site.
        """
        if not compressor.reads_rows or any(layout.expanded):
            return None
        flat, compressor = flatten(x, layout, rows=key)[0], compressor.for_saved(x.shape)
        if flat.data_ptr() != x.data_ptr():  # neither dense nor rows: it was copied
            return None
        stored, inverse, _ = steps_of(layout)
        kernels = compressor.kernels(flat, stored)
        return None if kernels is None else cls(compressor, *kernels, stored, inverse)

    def read(self, shared: "Shared") -> Tensor:
        """The tensor of a payload of the same elements, in this shape and memory order."""
        packed, made_by = shared.packed, shared.compressor
        own = made_by is self.compressor or made_by == self.compressor
        if own and is_ordinary():  # as `decompressed`, without a call more
            x = self.decompress(*packed.tensors.values())
        else:
            x = made_by.decompress(packed._replace(shape=self.stored))
        return x if self.inverse is None else x.permute(self.inverse)

    def decompressed(self, parts: Iterable[Tensor]) -> Tensor:
        """The tensor of the parts of a payload that `compress` made, while calls are ordinary."""
        x = self.decompress(*parts)
        return x if self.inverse is None else x.permute(self.inverse)
