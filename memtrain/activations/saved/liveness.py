"""Which of a forward's saves the graph still holds when the forward has ended.

A result that nothing uses takes its part of the graph with it. In Pegasus-X the last layer's global
tokens go so: their payloads are made, and are gone before the backward.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from memtrain.activations.saved.site import Record

DROPPED = "dropped with its graph when the forward ends: nothing that it returns needs it"


class Watched:
    """A record, and weak references that tell whether its bytes are still held.

    Args:
        record: Of a save.
        handle: What the graph holds in the tensor's place; None where it holds the tensor.
        storage: Of the tensor.
    """

    def __init__(self, record: Record, handle: Any, storage: StorageWeakRef | None) -> None:
        self.record = record
        self._handle = None if handle is None else weakref.ref(handle)
        entry = getattr(handle, "entry", None)  # of a payload, which other saves may share
        self._entry = None if entry is None else weakref.ref(entry)
        self._storage = storage

    def is_held(self) -> bool:
        """Whether the graph still holds the save."""
        if self._handle is not None:
            return self._handle() is not None
        return self._storage is None or not self._storage.expired()

    def nbytes(self) -> int:
        """Bytes that are held in the tensor's place now."""
        if self._entry is None:
            return self.record.planned if self.is_held() else 0
        entry = self._entry()
        kept = entry is None or entry.tensor is not None  # by a later save
        return 0 if kept else self.record.planned


def still_held(saves: Iterable[Watched]) -> list[Record]:
    """Return the records with the bytes that are still held.

    Args:
        saves: Of a forward that has ended.

    Returns:
        Records. Where the save is gone, the baseline's bytes are 0 too, unless another save has the
        same storage.
    """
    saves = list(saves)
    living = {
        each.record.storage
        for each in saves
        if (each.record.shape or each.record.nbytes) and each.is_held()
    }
    found = []
    for each in saves:
        record = each.record
        plain = record.nbytes if record.storage in living else 0
        planned = each.nbytes()
        if (plain, planned) != (record.nbytes, record.planned):
            reason = record.reason or ("" if each.is_held() else DROPPED)
            record = record._replace(nbytes=plain, planned=planned, reason=reason)
        found.append(record)
    return found
