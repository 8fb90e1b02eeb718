"""What autograd holds in place of a saved tensor, and how the tensor comes back of it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from memtrain.activations.layout import Layout, flatten, restore
from memtrain.compressors import Compressor, Packed


class Kept(NamedTuple):
    """A saved tensor kept as it is, and its version then."""

    tensor: Tensor
    version: int

    def unpack(self) -> Tensor:
        """The tensor itself.

        Raises:
            RuntimeError: If it has since been changed in place: the check that autograd makes by
                itself where no hooks are.
        """
        check_version(self.tensor, self.version)
        return self.tensor


class Shared:
    """One payload, held by every save of the same memory."""

    __slots__ = ("__weakref__", "compressor", "layout", "packed")

    def __init__(self, packed: Packed, compressor: Compressor, layout: Layout | None) -> None:
        self.packed, self.compressor, self.layout = packed, compressor, layout

    def content(self) -> Tensor:
        """What the compressor was handed, as far as it was kept."""
        return self.compressor.decompress(self.packed)

    def tensor(self) -> Tensor:
        """The tensor that was saved first, in its shape and memory order."""
        return self.content() if self.layout is None else restore(self.content(), self.layout)


class Compressed(NamedTuple):
    """A payload, and how to see it again as the tensor that was saved."""

    shared: Shared
    layout: Layout | None  # None: the compressor kept the tensor's own shape and order
    origin: TensorWeakRef
    version: int

    def unpack(self) -> Tensor:
        """The tensor for the backward, decompressed.

        Raises:
            RuntimeError: If the tensor still lives and has since been changed in place. The
                payload would give the old values, but plain PyTorch refuses, and so do we.
        """
        origin = self.origin()
        if origin is not None:
            check_version(origin, self.version)
        with torch.no_grad():
            x = self.shared.content()
        return x if self.layout is None else restore(x, self.layout)


class Derived(NamedTuple):
    """No payload: an op's output, computed again from the payload of the op's input."""

    source: Callable[[], Tensor]  # gives the output in the memory order that it had
    layout: Layout  # of the save, which may be a view of the output

    def unpack(self) -> Tensor:
        """The tensor for the backward, computed again."""
        with torch.no_grad():
            flat, _ = flatten(self.source())
        return restore(flat, self.layout)


Saved = Kept | Compressed | Derived


def unpack(saved: Saved) -> Tensor:
    """The unpack function of saved-tensor hooks."""
    return saved.unpack()


def check_version(x: Tensor, version: int) -> None:
    """Raise as autograd does if `x` has been changed in place since it was at `version`."""
    if x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: a tensor of shape {list(x.shape)} is at version "
            f"{x._version}; expected version {version}"
        )
