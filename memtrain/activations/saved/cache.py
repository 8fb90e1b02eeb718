"""Payloads of one forward, and which of its saves share one."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from memtrain.activations.saved.flatten import Layout, Memory, flatten, memory_of
from memtrain.activations.saved.handles import Compressed, Shared
from memtrain.activations.saved.origin import storage_id
from memtrain.activations.saved.site import Site
from memtrain.compressors import Compressor, Key

SHARED = "shared with an earlier save"

Source = Callable[[], Tensor]
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


class PayloadCache:
    """Makes one payload per memory, version and compressor; dropped when the forward ends.

    Each entry has a weak reference to the storage: while it is held, no new storage can take the
    same id. An entry of another version than the tensor's is stale.
    """

    def __init__(self) -> None:
        self._payloads: dict[_Memory, _Payload] = {}
        self._latest: dict[_Memory, _Payload] = {}  # whatever the compressor
        self._outputs: dict[_Memory, tuple[StorageWeakRef, int, Source, str]] = {}
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
        x, version = save.tensor, save.tensor._version
        memory = (save.storage, save.key, x.dtype)
        if derive and memory in self._outputs:
            _, then, source, op = self._outputs[memory]
            if then == version:
                return derived(save, source), 0, f"computed again from what {op} keeps", op
        shaped = compressor.shaped
        flat, layout = (x, None) if shaped else flatten(x, save.layout)
        form = (x.shape, x.stride(), x.storage_offset()) if shaped else save.key
        where = (save.storage, form, x.dtype, compressor)
        _, then, known = self._payloads.get(where, _NO_PAYLOAD)
        shared, planned, note = known() if then == version else None, 0, SHARED
        if shared is None:
            with torch.no_grad():
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

    def derive_weight(self, x: Tensor, source: Source) -> None:
        """Let saves of `x`, a rounded weight, hold the rounding of its parameter."""
        storage = StorageWeakRef(x.untyped_storage())
        self.weights[storage_id(x)] = (storage, x._version, source, x.numel())


def derived(save: Save, source: Source) -> Compressed:
    """The handle of a save that `source` computes again, in the memory order that it had."""
    content = partial(_flat, source)
    return Compressed(None, content, save.layout, save.witness, save.witness._version)


_NO_PAYLOAD: tuple[None, int, Callable[[], None]] = (None, -1, lambda: None)


def _flat(source: Source) -> Tensor:
    return flatten(source())[0]
