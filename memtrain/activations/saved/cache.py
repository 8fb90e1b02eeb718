"""Payloads of one forward, and which of its saves share one."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from memtrain.activations.saved.flatten import Layout, Memory, flatten, memory_of, restore
from memtrain.activations.saved.handles import Compressed, Shared
from memtrain.activations.saved.origin import storage_id
from memtrain.activations.saved.site import Site
from memtrain.compressors import Compressor, Key

SHARED = "shared with an earlier save"

Source = Callable[[], Tensor]
Again = Callable[[Tensor], Tensor]
_Memory = tuple[object, ...]  # equal for the same elements in the same memory order
_Payload = tuple[StorageWeakRef, int, Callable[[], Shared | None]]


class Save(NamedTuple):
    """A tensor that autograd saves, described once."""

    tensor: Tensor  # detached
    storage: int  # its storage's id
    layout: Layout
    key: Memory | None  # see `memory_of`
    site: Site
    witness: Tensor  # no elements and no memory of the tensor, but its version counter
    form: tuple[object, ...] | None = None  # equal for saves that are chosen for alike


class Copy(NamedTuple):
    """Source of a saved tensor that was cast, or copied in another memory order."""

    find: Callable[[], Tensor | None]  # None once it is gone: its payload may be there still
    storage: int
    layout: Layout
    key: Memory | None
    witness: Tensor  # of changes to the source, and of its dtype
    version: int
    again: Again  # of the source: the copy, in the memory order that it had

    @classmethod
    def of(cls, x: Tensor, again: Again) -> "Copy":
        """A copy that `again` just made of `x` alone; `x` is referred to weakly."""
        witness = x.detach()
        witness.data = x.new_empty(0)
        return cls(weakref.ref(x), storage_id(x), *memory_of(x), witness, x._version, again)


class PayloadCache:
    """Makes one payload per memory, version and compressor; dropped when the forward ends.

    Each entry has a weak reference to the storage: while it is held, no new storage can take the
    same id. An entry of another version than the tensor's is stale.
    """

    def __init__(self) -> None:
        self._payloads: dict[_Memory, _Payload] = {}
        self._latest: dict[_Memory, _Payload] = {}  # whatever the compressor
        self._outputs: dict[_Memory, tuple[StorageWeakRef, int, Source, str]] = {}
        # with the storage and the version of the copy
        self._copies: dict[_Memory, tuple[StorageWeakRef, int, Copy]] = {}
        self.weights: dict[int, tuple[StorageWeakRef, int, Source, int]] = {}
        """Rounded ones, by storage."""

    def share(
        self,
        save: Save,
        compressor: Compressor,
        key: Callable[[Site], Key],
        *,
        derive: bool,
        copy: Copy | None = None,
    ) -> tuple[Compressed | None, int, str, str]:
        """The handle of a save that is compressed.

        Args:
            save: The save.
            compressor: Of its site.
            key: Gives the random bits of a new payload.
            derive: Whether an op's output may be computed again from the payload of its input.
            copy: Its source, where it is a copy that `copied` was not told of.

        Returns:
            handle: None where a payload would be no smaller than the tensor's storage.
            planned: Bytes of a new payload, on the tensor's device.
            note: How the handle gives the tensor where it has no new payload.
            source: The op that a derived output is computed again from.
        """
        x, version = save.tensor, save.tensor._version
        memory = (save.storage, save.key, x.dtype)
        if derive and memory in self._outputs:
            _, then, source, op = self._outputs[memory]
            if then == version:
                return derived(save, source), 0, f"computed again from what {op} keeps", op
        shaped = compressor.shaped
        _, then, told = self._copies.get(memory, _NO_COPY)
        copy = told if copy is None and then == version else copy
        if copy is not None and not shaped and self._serves(copy, save, compressor, derive=derive):
            return self._share_source(save, copy, compressor, key, derive=derive)
        form = (x.shape, x.stride(), x.storage_offset()) if shaped else save.key
        where = (save.storage, form, x.dtype, compressor)
        _, then, known = self._payloads.get(where, _NO_PAYLOAD)
        shared, planned, note = known() if then == version else None, 0, SHARED
        layout = None if shaped else save.layout
        if shared is None:
            rows = save.key if compressor.reads_rows else None
            flat = x if layout is None else flatten(x, layout, rows=rows)[0]
            packed = compressor.compress(flat, key=key(save.site))
            # What is swapped out to another device is not held.
            parts = packed.tensors.values()
            planned, note = sum([t.nbytes for t in parts if t.device == x.device]), ""
            if planned >= x.untyped_storage().nbytes():
                return None, 0, "its payload would be no smaller", ""
            shared = Shared(packed, compressor, layout)
            entry = (StorageWeakRef(x.untyped_storage()), version, weakref.ref(shared))
            self._payloads[where] = self._latest[memory] = entry
        handle = Compressed(shared, shared.content, layout, save.witness, save.witness._version)
        return handle, planned, note, ""

    def _serves(self, copy: Copy, save: Save, compressor: Compressor, *, derive: bool) -> bool:
        """Whether the source's payload, or a new one, is no larger than the copy's own."""
        dtype = copy.witness.dtype
        if copy.witness._version != copy.version or copy.key is None:
            return False
        if copy.find() is not None and dtype.itemsize <= save.tensor.dtype.itemsize:
            return True
        output = self._outputs.get((copy.storage, copy.key, dtype)) if derive else None
        where = (copy.storage, copy.key, dtype, compressor)
        _, then, known = self._payloads.get(where, _NO_PAYLOAD)
        made = known() is not None and then == copy.version
        return made or (output is not None and output[1] == copy.version)

    def _share_source(
        self,
        save: Save,
        copy: Copy,
        compressor: Compressor,
        key: Callable[[Site], Key],
        *,
        derive: bool,
    ) -> tuple[Compressed | None, int, str, str]:
        """As `share`, by the payload of the copy's source."""
        x = copy.find()
        x = copy.witness if x is None else x.detach()
        source = Save(x, copy.storage, copy.layout, copy.key, save.site, copy.witness)
        handle, planned, note, op = self.share(source, compressor, key, derive=derive)
        if handle is not None:
            content = partial(_copied, copy.again, handle.content, handle.layout)
            handle = Compressed(
                handle.shared, content, save.layout, save.witness, save.witness._version
            )
        return handle, planned, note, op

    def source_of(self, x: Tensor) -> Source | None:
        """Gives the elements of `x` as they are now from a payload, if there is one."""
        memory = (storage_id(x), memory_of(x)[1], x.dtype)
        _, then, known = self._latest.get(memory, _NO_PAYLOAD)
        shared = known() if then == x._version else None
        if shared is not None:
            return shared.tensor
        _, then, source, _ = self._outputs.get(memory, (None, -1, None, ""))
        return source if then == x._version else None

    def derive(self, y: Tensor, source: Source, op: str) -> None:
        """Let saves of an op's output hold `source` in place of a payload of their own.

        Args:
            y: The output, just made; its elements do not overlap.
            source: Computes it again, in the same memory order, from payloads that are kept.
            op: The op's name, for the records.
        """
        storage = StorageWeakRef(y.untyped_storage())
        memory = (storage_id(y), memory_of(y)[1], y.dtype)
        self._outputs[memory] = (storage, y._version, source, op)

    def copied(self, y: Tensor, copy: Copy) -> None:
        """Let saves of `y`, just made, hold what its source comes from."""
        memory = (storage_id(y), memory_of(y)[1], y.dtype)
        self._copies[memory] = (StorageWeakRef(y.untyped_storage()), y._version, copy)

    def derive_weight(self, x: Tensor, source: Source) -> None:
        """Let saves of `x`, a rounded weight, hold the rounding of its parameter."""
        storage = StorageWeakRef(x.untyped_storage())
        self.weights[storage_id(x)] = (storage, x._version, source, x.numel())


def derived(save: Save, source: Source) -> Compressed:
    """The handle of a save that `source` computes again, in the memory order that it had."""
    content = partial(_flat, source)
    return Compressed(None, content, save.layout, save.witness, save.witness._version)


_NO_PAYLOAD: tuple[None, int, Callable[[], None]] = (None, -1, lambda: None)
_NO_COPY: tuple[None, int, None] = (None, -1, None)


def _copied(again: Again, content: Callable[[], Tensor], layout: Layout | None) -> Tensor:
    """The copy's elements, flat, of its source's."""
    x = content()
    return flatten(again(x if layout is None else restore(x, layout)))[0]


def _flat(source: Source) -> Tensor:
    return flatten(source())[0]
