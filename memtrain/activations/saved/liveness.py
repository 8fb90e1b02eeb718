"""Which of a forward's saves the graph still holds when the forward has ended."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from memtrain.activations.saved.handles import Compressed, Derived, Kept
from memtrain.activations.saved.site import Record

DROPPED = "dropped with its graph when the forward ends: nothing that it returns needs it"


class Holders:
    """Remembers, without holding it, what each record's save and its bytes are held by.

    A result that nothing uses takes its part of the graph with it. In Pegasus-X the last layer's
    global tokens go so: their payloads are made, and are gone before the backward.
    """

    def __init__(self) -> None:
        self._saves: list[Callable[[], Any]] = []
        self._bytes: list[Callable[[], bool]] = []

    def add(self, saved: Kept | Compressed | Derived, record: Record) -> None:
        """Note what autograd was given for a record.

        Args:
            saved: What it holds.
            record: Made for it.
        """
        # Tuples take no weak reference; these tensors were made for this save alone.
        own = saved.tensor if isinstance(saved, Kept) else saved.witness
        self._saves.append(weakref.ref(own))
        self._bytes.append(_bytes_of(saved) if record.planned else _always)

    def left(self, records: Sequence[Record]) -> list[Record]:
        """The records with the bytes that are still held.

        Args:
            records: One for each `add`, in its order.

        Returns:
            Where the save is gone, plain PyTorch's bytes are 0 (unless another save has the same
            storage); where the payload is gone, the planned ones.
        """
        living = {
            record.storage
            for record, save in zip(records, self._saves, strict=True)
            if (record.shape or record.nbytes) and save() is not None
        }
        found = []
        for record, held in zip(records, self._bytes, strict=True):
            plain = record.nbytes if record.storage in living else 0
            planned = record.planned if held() else 0
            if (plain, planned) != (record.nbytes, record.planned):
                why = record.reason or DROPPED
                record = record._replace(nbytes=plain, planned=planned, reason=why)
            found.append(record)
        return found


def _bytes_of(saved: Kept | Compressed | Derived) -> Callable[[], bool]:
    """Whether what a record counts for a save is still in memory."""
    if isinstance(saved, Kept):
        storage = StorageWeakRef(saved.tensor.untyped_storage())
        return lambda: not storage.expired()
    if isinstance(saved, Compressed):
        shared = weakref.ref(saved.shared)
        return lambda: shared() is not None
    return _always


def _always() -> bool:
    return True
