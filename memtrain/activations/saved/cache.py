"""Payloads of one forward, and which of its saves share one."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
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
# A payload, what gives its elements, in which layout (None: the tensor's own shape), a note, and
# the op that a derived output is computed again from.
_Found = tuple[Shared | None, Callable[[], Tensor], Layout | None, str, str]


class Save(NamedTuple):
    """A tensor that autograd saves, described once."""

    tensor: Tensor  # detached
    storage: int  # its storage's id
    layout: Layout
    key: Memory | None  # see `memory_of`
    site: Site
    witness: Tensor  # no elements and no memory of the tensor, but its version counter


class Place(NamedTuple):
    """Where a tensor's elements lie, and which."""

    storage: int
    key: Memory | None
    dtype: torch.dtype
    form: tuple[object, ...]  # shape, strides, offset
    layout: Layout
    version: int

    @classmethod
    def of(cls, x: Tensor) -> "Place":
        """The place of `x`."""
        layout, key = memory_of(x)
        form = (tuple(x.shape), x.stride(), int(x.storage_offset()))
        return cls(storage_id(x), key, x.dtype, form, layout, x._version)


class Copy(NamedTuple):
    """Source of a saved tensor that is a copy: a tensor of another dtype or memory order."""

    source: Callable[[], Tensor | None]  # None once it is gone: its payload may be there still
    place: Place
    again: Again  # of the source: the copy, in the memory order that it had


class PayloadCache:
    """Makes one payload per memory, version and compressor; dropped when the forward ends.

    Each entry has a weak reference to the storage: while it is held, no new storage can take the
    same id. An entry of another version than the tensor's is stale.
    """

    def __init__(self) -> None:
        self._payloads: dict[_Memory, _Payload] = {}
        self._latest: dict[_Memory, _Payload] = {}  # whatever the compressor
        self._outputs: dict[_Memory, tuple[StorageWeakRef, int, Source, str]] = {}
        # with the copy's storage and version, and a witness of changes to its source
        self._copies: dict[_Memory, tuple[StorageWeakRef, int, Tensor, Copy]] = {}
        self.weights: dict[int, tuple[StorageWeakRef, int, Source, int]] = {}
        """Rounded ones, by storage."""

    def share(
        self, save: Save, compressor: Compressor, key: Callable[[Site], Key], *, derive: bool
    ) -> tuple[Compressed | None, int, str, str]:
        """The handle of a save that is compressed.

        Args:
            save: The save.
            compressor: Of its site.
            key: Gives the random bits of a new payload.
            derive: Whether an op's output may be computed again from the payload of its input.

        Returns:
            handle: None where a payload would be no smaller than the tensor's storage.
            planned: Bytes of a new payload, on the tensor's device.
            note: How the handle gives the tensor where it has no new payload.
            source: The op that a derived output is computed again from.
        """
        x = save.tensor
        place = Place.of(x)
        found, planned = self._known(place, compressor, derive=derive), 0
        if found is None:
            flat, layout = (x, None) if compressor.shaped else flatten(x, save.layout)
            with torch.no_grad():
                packed = compressor.compress(flat, key=key(save.site))
            # What is swapped out to another device is not held.
            parts = packed.tensors.values()
            planned = sum([t.nbytes for t in parts if t.device == x.device])
            if planned >= x.untyped_storage().nbytes():
                return None, 0, "its payload would be no smaller", ""
            shared = Shared(packed, compressor, layout)
            entry = (StorageWeakRef(x.untyped_storage()), place.version, weakref.ref(shared))
            self._payloads[_where(place, compressor)] = entry
            self._latest[place.storage, place.key, place.dtype] = entry
            found = shared, shared.content, layout, "", ""
        shared, content, layout, note, op = found
        handle = Compressed(shared, content, layout, save.witness, save.witness._version)
        return handle, planned, note, op

    def share_copy(
        self,
        save: Save,
        copy: Copy,
        compressor: Compressor,
        key: Callable[[Site], Key],
        *,
        derive: bool,
    ) -> tuple[Compressed | None, int, str, str]:
        """As `share`, of a copy: by its source's payload, unless a new one would be larger."""
        x, planned = copy.source(), 0
        found = self._known(copy.place, compressor, derive=derive)
        narrow = x is not None and x.element_size() <= save.tensor.element_size()
        if found is None and x is not None and narrow and copy.place.key is not None:
            source = Save(x.detach(), *copy.place[:1], copy.place.layout, copy.place.key, *save[4:])
            handle, planned, note, op = self.share(source, compressor, key, derive=derive)
            found = handle and (handle.shared, handle.content, handle.layout, note, op)
        if found is None:
            return self.share(save, compressor, key, derive=derive)
        shared, content, layout, note, op = found
        content = partial(_copied, copy.again, content, layout)
        version = save.witness._version
        return Compressed(shared, content, save.layout, save.witness, version), planned, note, op

    def _known(self, place: Place, compressor: Compressor, *, derive: bool) -> _Found | None:
        """A way to give the elements of a place without a new payload, or None."""
        memory = (place.storage, place.key, place.dtype)
        _, then, source, op = self._outputs.get(memory, (None, -1, None, ""))
        if derive and source is not None and then == place.version:
            note = f"computed again from what {op} keeps"
            return None, partial(_flat, source), place.layout, note, op
        _, then, known = self._payloads.get(_where(place, compressor), _NO_PAYLOAD)
        shared = known() if then == place.version else None
        if shared is None:
            return None
        return shared, shared.content, None if compressor.shaped else place.layout, SHARED, ""

    def source_of(self, x: Tensor) -> Source | None:
        """Function that gives the elements of `x` as they are now from a payload, or None."""
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

    def copied(self, y: Tensor, x: Tensor, again: Again) -> None:
        """Let saves of `y`, which `again` just made of `x` alone, hold what `x` comes from."""
        witness = x.detach()
        witness.data = x.new_empty(0)
        memory = (storage_id(y), memory_of(y)[1], y.dtype)
        copy = Copy(weakref.ref(x), Place.of(x), again)
        self._copies[memory] = (StorageWeakRef(y.untyped_storage()), y._version, witness, copy)

    def copy_of(self, save: Save) -> Copy | None:
        """Source of a saved tensor that is a copy, where both are as they were then."""
        memory = (save.storage, save.key, save.tensor.dtype)
        if memory not in self._copies:
            return None
        _, version, witness, copy = self._copies[memory]
        same = version == save.tensor._version and witness._version == copy.place.version
        return copy if same else None

    def derive_weight(self, x: Tensor, source: Source) -> None:
        """Let saves of `x`, a rounded weight, hold the rounding of its parameter."""
        storage = StorageWeakRef(x.untyped_storage())
        self.weights[storage_id(x)] = (storage, x._version, source, x.numel())


def derived(save: Save, source: Source) -> Compressed:
    """The handle of a save that `source` computes again, in the memory order that it had."""
    content = partial(_flat, source)
    return Compressed(None, content, save.layout, save.witness, save.witness._version)


_NO_PAYLOAD: tuple[None, int, Callable[[], None]] = (None, -1, lambda: None)


def _where(place: Place, compressor: Compressor) -> _Memory:
    form = place.form if compressor.shaped else place.key
    return (place.storage, form, place.dtype, compressor)


def _copied(again: Again, content: Callable[[], Tensor], layout: Layout | None) -> Tensor:
    """The copy's elements, flat, of its source's."""
    x = content()
    return flatten(again(x if layout is None else restore(x, layout)))[0]


def _flat(source: Source) -> Tensor:
    return flatten(source())[0]
