"""The store of one forward: which payload, or which kept tensor, stands for which memory."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from memtrain.activations.saved.flatten import Layout, restore, steps_of
from memtrain.compressors import Compressor, Packed

Geometry = tuple[torch.Size, tuple[int, ...], int | torch.SymInt]
"""Size, stride and storage offset of a saved tensor."""


class Entry:
    """A cached payload of a storage region at one version, or the kept tensor."""

    __slots__ = (
        "__weakref__",
        "compressor",
        "counter",
        "dtype",
        "epoch",
        "nbytes",
        "packed",
        "savers",
        "tensor",
        "version",
    )

    def __init__(
        self, x: Tensor, epoch: int, packed: Packed, compressor: Compressor, nbytes: int
    ) -> None:
        self.counter, self.version, self.epoch = without_elements(x), x._version, epoch
        self.dtype, self.nbytes = x.dtype, nbytes
        self.packed: Packed | None = packed
        self.compressor = compressor
        self.tensor: Tensor | None = None
        """Takes the payload's place where the memory is kept anyway."""
        self.savers: set[int] = set()
        """Numbers of the nodes that hold the payload."""

    @property
    def is_current(self) -> bool:
        """Return whether the memory has not been written to since, as far as the version shows."""
        return self.counter._version == self.version

    def keep(self, x: Tensor) -> None:
        """Give back the memory of `x`, which is kept anyway, and drop the payload."""
        self.tensor, self.packed, self.nbytes = x, None, 0

    def check(self) -> None:
        """Raise RuntimeError, as autograd does, if the tensor was modified in place."""
        if self.counter._version != self.version:
            check_version(self.counter, self.version)

    def read(self, layout: Layout | None, geometry: Geometry) -> Tensor:
        """Return the saved tensor."""
        if self.packed is None:
            kept: Any = self.tensor  # `keep` has set the tensor
            return kept.as_strided(*geometry)
        return tensor_of(self.packed, self.compressor, layout)


class Handle:
    """Packed object of a saved tensor: a store entry, and the shape and strides to restore."""

    __slots__ = ("__weakref__", "entry", "geometry", "layout")

    def __init__(self, entry: Entry, layout: Layout | None, geometry: Geometry) -> None:
        self.entry, self.layout, self.geometry = entry, layout, geometry

    def unpack(self) -> Tensor:
        """Return the tensor for the backward.

        It raises if the tensor was modified in place: the payload would give the old values, but
        PyTorch refuses, and so does memtrain.
        """
        self.entry.check()
        if torch.is_grad_enabled():  # a backward that is differentiated again
            with torch.no_grad():
                return self.entry.read(self.layout, self.geometry)
        return self.entry.read(self.layout, self.geometry)


class Storage:
    """Cached entries of one `UntypedStorage`; a weak reference prevents reuse of its address."""

    __slots__ = ("_entries", "epoch", "is_kept", "reference")

    def __init__(self, x: Tensor) -> None:
        self.reference = StorageWeakRef(x.untyped_storage())
        self.epoch = 0
        """Number of possible writes that bypassed the version counter."""
        self.is_kept = False
        """Whether the storage stays alive as it is, so that compressing would only add bytes."""
        self._entries: dict[tuple[Any, ...], weakref.ref[Entry]] = {}

    def find(self, key: tuple[Any, ...], version: int) -> Entry | None:
        """Return the entry for a place of memory and a compressor, if it still holds."""
        reference = self._entries.get(key)
        entry = None if reference is None else reference()
        if entry is None or entry.version != version or entry.epoch != self.epoch:
            return None
        return entry if entry.is_current else None

    def add(self, key: tuple[Any, ...], entry: Entry) -> None:
        """Let `find` return the entry as long as a graph holds it."""
        self._entries[key] = weakref.ref(entry)

    def keep(self, x: Tensor) -> None:
        """Note that `x`, detached and on this storage, is kept: payloads of it are dropped."""
        self.is_kept = True
        for entry in self.current():
            if entry.dtype == x.dtype:
                entry.keep(x)
        self._entries.clear()

    def memory(self) -> Any:
        """Return the `UntypedStorage`, or None if it was freed."""
        storages: Any = torch.UntypedStorage
        return storages._new_with_weak_ptr(self.reference.cdata)

    def current(self) -> Iterator[Entry]:
        """Yield the entries that still equal the memory."""
        for reference in self._entries.values():
            entry = reference()
            if entry is not None and entry.epoch == self.epoch and entry.is_current:
                yield entry


def storage_of(store: dict[int, Storage], x: Tensor, number: int) -> Storage:
    """Return the `Storage` of a tensor, by its number (`storage_id`); create it if needed."""
    known = store.get(number)
    if known is None:
        known = store[number] = Storage(x)
    return known


def tensor_of(packed: Packed, compressor: Compressor, layout: Layout | None) -> Tensor:
    """Return the tensor of a payload, in its shape and memory order."""
    if layout is None:
        return compressor.decompress(packed)
    if not compressor.reads_rows:
        return restore(compressor.decompress(packed), layout)
    # Asked for in its order in memory, the tensor needs no view, which costs as much as a block.
    stored, inverse, expanded = steps_of(layout)
    x = compressor.decompress(Packed(packed.tensors, stored, packed.dtype))
    x = x if inverse is None else x.permute(inverse)
    return x.expand(layout.shape) if expanded else x


_EMPTY: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def without_elements(x: Tensor) -> Tensor:
    """Return a tensor with the version counter of `x`, and none of its memory."""
    counter = x.detach()  # shares the counter; what `data` is set to does not change that
    kind = x.dtype, x.device
    if type(x) is FakeTensor:
        counter.data = x.new_empty(0)
        return counter
    if kind not in _EMPTY:
        _EMPTY[kind] = torch.empty(0, dtype=x.dtype, device=x.device)
    counter.data = _EMPTY[kind]
    return counter


def mark_unwritten(x: Tensor) -> bool:
    """Mark the storage of a tensor until something may write to it: see `is_unwritten`.

    The mark is torch's own for copy-on-write: a lazy clone, which is freed here, so that no bytes
    are ever copied. All access in C++ that may write removes the mark, in any thread, whether or
    not a version counts it.

    Example:
        >>> x = torch.ones(2)
        >>> mark_unwritten(x), is_unwritten(x)
        (True, True)
        >>> _ = x.data.zero_()
        >>> is_unwritten(x)
        False
    """
    try:
        if type(x) is not FakeTensor:
            torch._lazy_clone(x.detach())
    except RuntimeError:  # its memory is NumPy's, or shared between processes
        return False
    return True


def is_unwritten(x: Tensor) -> bool:
    """Return whether the storage of a tensor has the mark of `mark_unwritten`, or is fake."""
    marked: bool = torch._C._is_cow_tensor(x)  # pyright: ignore[reportAttributeAccessIssue]
    return marked or type(x) is FakeTensor


def check_version(x: Tensor, version: int) -> None:
    """Raise as autograd does if `x` was modified in place since it was at `version`."""
    if x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: a tensor of shape {tuple(x.shape)} is at version {x._version}; "
            f"expected version {version}. (Weights change in optimizer.step(), and with "
            "gradients=release in backward(): call backward() once per forward, on the sum of its "
            "losses.)"
        )
