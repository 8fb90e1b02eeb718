"""Records of what a forward saves: which tensors its graph still holds when the forward ends.

A result that nothing uses takes its part of the graph with it. In Pegasus-X the last layer's global
tokens go so: their payloads are made, and are gone before the backward.
"""

import weakref
from collections.abc import Callable, Set
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from memtrain.activations.saved.origin import storage_id
from memtrain.activations.saved.site import Record, Site

DROPPED = "dropped with its graph when the forward ends: nothing that it returns needs it"


class _Saved(NamedTuple):
    record: Record
    storage: StorageWeakRef | None  # of the saved tensor
    handle: weakref.ref[Any] | None  # what the graph holds in the tensor's place

    def is_alive(self) -> bool:
        if self.handle is not None:
            return self.handle() is not None
        return self.storage is None or not self.storage.expired()

    def planned(self) -> int:
        """Bytes that are held in the tensor's place now; a later save may have kept the tensor."""
        kept = self.handle is not None and getattr(self.handle(), "tensor", None) is not None
        return self.record.planned if self.is_alive() and not kept else 0


class Records:
    """The records of one forward.

    The user's own `inputs` of the model stay alive anyway.
    """

    def __init__(self, inputs: Set[int]) -> None:
        self._inputs = inputs
        self._parts: list[list[_Saved]] = [[]]
        self._saved = self._parts[-1]  # where records are added
        self._numbers: dict[int, tuple[int, StorageWeakRef]] = {}

    def note(self, site: Site, reason: str, x: Tensor | None = None) -> None:
        """Record a save whose bytes are not counted."""
        dtype = "" if x is None else _name(x)
        self._saved.append(_Saved(Record(site, (), dtype, 0, 0, "", reason), None, None))

    def add(
        self,
        x: Tensor,
        site: Site,
        planned: int,
        compressor: str,
        reason: str = "",
        handle: Any = None,
        source: str = "",
    ) -> None:
        """Record a save.

        `planned` are the bytes of what is kept in its place, and `handle` is what the graph holds
        in its place: None for the tensor itself. `source` is the op that a derived output is
        recomputed from.
        """
        number = storage_id(x)
        first = number not in self._numbers and number not in self._inputs
        nbytes = x.untyped_storage().nbytes() if first else 0
        known = len(self._numbers), StorageWeakRef(x.untyped_storage())
        index, storage = self._numbers.setdefault(number, known)
        record = Record(
            site, tuple(x.shape), _name(x), nbytes, planned, compressor, reason, index, source
        )
        # Of a payload, which other saves may share, the entry.
        reference = None if handle is None else weakref.ref(getattr(handle, "entry", handle))
        self._saved.append(_Saved(record, storage, reference))

    def here(self, save: Callable[[bool], None]) -> Callable[[bool], None]:
        """Return a function that runs a later save, whose records take their place here."""
        place: list[_Saved] = []
        self._parts += [place, []]
        self._saved = self._parts[-1]

        def run(compress: bool) -> None:
            outer, self._saved = self._saved, place
            save(compress)
            self._saved = outer

        return run

    def end(self) -> list[Record]:
        """Return the records with the bytes that the graph still holds.

        Where the save is gone, the baseline's bytes are 0 too, unless another save has the same
        storage.
        """
        saves = [each for part in self._parts for each in part]
        living = {
            each.record.storage
            for each in saves
            if (each.record.shape or each.record.nbytes) and each.is_alive()
        }
        found = []
        for each in saves:
            record, planned = each.record, each.planned()
            plain = record.nbytes if record.storage in living else 0
            if (plain, planned) != (record.nbytes, record.planned):
                reason = record.reason or ("" if each.is_alive() else DROPPED)
                record = record._replace(nbytes=plain, planned=planned, reason=reason)
            found.append(record)
        return found


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
