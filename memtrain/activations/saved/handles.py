"""What autograd holds in place of a saved tensor, and how the tensor comes back of it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from memtrain.activations.saved.flatten import Layout, flatten, restore
from memtrain.activations.saved.site import Op
from memtrain.compressors import Compressor, Packed


class Kept(NamedTuple):
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
        check_version(self.tensor if self.witness is None else self.witness, self.version)
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
    witness: Tensor  # of changes in place
    version: int

    def unpack(self) -> Tensor:
        """The tensor for the backward, decompressed.

        Raises:
            RuntimeError: If the tensor has since been changed in place. The payload would give the
                old values, but plain PyTorch refuses, and so do we.
        """
        check_version(self.witness, self.version)
        with torch.no_grad():
            x = self.shared.content()
        return x if self.layout is None else restore(x, self.layout)


class Derived(NamedTuple):
    """No payload: an op's output, computed again from the payload of the op's input."""

    source: Callable[[], Tensor]  # gives the output in the memory order that it had
    layout: Layout  # of the save, which may be a view of the output
    witness: Tensor  # of changes in place
    version: int

    def unpack(self) -> Tensor:
        """The tensor for the backward, computed again.

        Raises:
            RuntimeError: If the tensor has since been changed in place, as plain PyTorch does.
        """
        check_version(self.witness, self.version)
        with torch.no_grad():
            flat, _ = flatten(self.source())
        return restore(flat, self.layout)


class Waiting:
    """A result that its op saves: what is held is decided once the op has run."""

    __slots__ = ("saved", "what")

    def __init__(self, tensor: Tensor, op: Op) -> None:
        self.what: tuple[Tensor, Op] | None = (tensor, op)
        self.saved: Saved | None = None

    def settle(self, pack: Callable[[Tensor, Op], "Saved"]) -> None:
        """Hold what `pack` gives, and no more the tensor, nor what the op read."""
        if self.what is not None:
            self.saved, self.what = pack(*self.what), None

    def unpack(self) -> Tensor:
        """The tensor for the backward."""
        if self.saved is None:
            raise RuntimeError("an op whose result is saved was not run to its end")
        return self.saved.unpack()


Saved = Kept | Compressed | Derived | Waiting


def unpack(saved: Saved) -> Tensor:
    """The unpack function of saved-tensor hooks."""
    return saved.unpack()


def witness_of(x: Tensor) -> Tensor:
    """A tensor that has no elements and no memory of `x`, but its version counter.

    Example:
        >>> x = torch.ones(3)
        >>> witness = witness_of(x)
        >>> witness.numel(), witness._version, x.mul_(2)._version, witness._version
        (0, 0, 1, 1)
    """
    witness = x.detach()  # shares the counter; what `data` is set to does not change that
    witness.data = x.new_empty(0)
    return witness


def check_version(x: Tensor, version: int) -> None:
    """Raise as autograd does if `x` has been changed in place since it was at `version`."""
    if x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: it is at version {x._version}; expected version {version}"
        )
