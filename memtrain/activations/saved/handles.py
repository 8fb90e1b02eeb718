"""Handles that autograd holds in place of saved tensors, and how a tensor comes back of one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from memtrain.activations.saved.flatten import Layout, restore, steps_of
from memtrain.activations.saved.site import Op
from memtrain.compressors import Compressor, Packed


class KeptTensor(NamedTuple):
    """A saved tensor kept as it is, and its version then."""

    tensor: Tensor
    version: int
    witness: Tensor | None = None  # of changes in place, where the tensor is a copy

    def unpack(self) -> Tensor:
        """The tensor itself.

        Raises:
            RuntimeError: If it has since been changed in place: the check that autograd makes by
                itself where no hooks are.
        """
        witness = self.tensor if self.witness is None else self.witness
        if witness._version != self.version:
            check_version(witness, self.version)
        return self.tensor


@dataclass(eq=False, slots=True, weakref_slot=True)
class Shared:
    """One payload, held by every save of the same memory."""

    packed: Packed
    compressor: Compressor
    layout: Layout | None

    def content(self) -> Tensor:
        """The tensor that the compressor was handed, as far as it was kept."""
        return self.compressor.decompress(self.packed)

    def tensor(self) -> Tensor:
        """The tensor that was saved first, in its shape and memory order."""
        return tensor_of(self.packed, self.compressor, self.layout)

    def seen_as(self, layout: Layout) -> Tensor:
        """The tensor as one that was saved with another layout, of the same elements."""
        return tensor_of(self.packed, self.compressor, layout)


def tensor_of(packed: Packed, compressor: Compressor, layout: Layout | None) -> Tensor:
    """The tensor of a payload, in its shape and memory order.

    Args:
        packed: The payload.
        compressor: What made it.
        layout: Where the tensor was flattened: what the flat one is to be seen as.
    """
    if layout is None:
        return compressor.decompress(packed)
    if not compressor.reads_rows:
        return restore(compressor.decompress(packed), layout)
    # Asked for in the order that it has in memory, it needs no view: each takes as long as a block.
    stored, inverse, expanded = steps_of(layout)
    x = compressor.decompress(Packed(packed.tensors, stored, packed.dtype))
    x = x if inverse is None else x.permute(inverse)
    return x.expand(layout.shape) if expanded else x


class Compressed(NamedTuple):
    """A payload, and how to see it again as the tensor that was saved.

    An op's output that is computed again from the payload of the op's input has none of its own.
    """

    shared: Shared | None
    content: Callable[[], Tensor]  # in the shape and memory order that the tensor had
    witness: Tensor  # of changes in place
    version: int

    def unpack(self) -> Tensor:
        """The tensor for the backward, decompressed or computed again.

        Raises:
            RuntimeError: If the tensor has since been changed in place. The payload would give the
                old values, but plain PyTorch refuses, and so do we.
        """
        if self.witness._version != self.version:
            check_version(self.witness, self.version)
        if torch.is_grad_enabled():  # a backward that is differentiated again
            with torch.no_grad():
                return self.content()
        return self.content()


class Waiting:
    """A result that its op saves and that is rounded: packed once the op has run."""

    __slots__ = ("handle", "save")

    def __init__(self, tensor: Tensor, op: Op, requires_grad: bool) -> None:
        self.save: tuple[Tensor, Op, bool] | None = (tensor, op, requires_grad)
        self.handle: Saved | None = None

    def pack(self, pack: Callable[[Tensor, Op, bool], "Saved"]) -> None:
        """Hold the handle that `pack` gives, and no more the tensor, nor what the op read."""
        if self.save is not None:
            self.handle, self.save = pack(*self.save), None

    def unpack(self) -> Tensor:
        """The tensor for the backward."""
        if self.handle is None:
            raise RuntimeError("an op whose result is saved was not run to its end")
        return self.handle.unpack()


Saved = KeptTensor | Compressed | Waiting


def check_version(x: Tensor, version: int) -> None:
    """Raise as autograd does if `x` has been changed in place since it was at `version`."""
    if x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: a tensor of shape {tuple(x.shape)} is at version {x._version}; "
            f"expected version {version}. (Weights change in optimizer.step(), and with "
            "gradients=release in backward(): call that once for each forward, of the sum of its "
            "losses.)"
        )
