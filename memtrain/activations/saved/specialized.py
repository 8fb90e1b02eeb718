"""Kernels for saved tensors of one shape, memory order, dtype and device, chosen once."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from memtrain.activations.saved.flatten import Layout, Memory, flatten, steps_of
from memtrain.compressors import Compressor


class Specialized(NamedTuple):
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
    ) -> "Specialized | None":
        """Choose the kernels for saved tensors like `x`; None where there are none.

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

    def decompressed(self, parts: Iterable[Tensor]) -> Tensor:
        """Return the tensor of the parts of a payload that `compress` made."""
        x = self.decompress(*parts)
        return x if self.inverse is None else x.permute(self.inverse)
