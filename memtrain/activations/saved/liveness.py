"""Which of a forward's saves the graph still holds when the forward has ended.

A result that nothing uses takes its part of the graph with it. In Pegasus-X the last layer's global
tokens go so: their payloads are made, and are gone before the backward.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from memtrain.activations.saved.handles import Compressed, KeptTensor
from memtrain.activations.saved.site import Record

DROPPED = "dropped with its graph when the forward ends: nothing that it returns needs it"
Held = tuple[Record, Callable[[], Any], Callable[[], Any]]
"""A record, a reference to its save, and a function that is true once its bytes are freed."""


def watched(record: Record, saved: KeptTensor | Compressed) -> Held:
    """A record with weak references to what autograd was given for it."""
    # Tuples take no weak reference; these tensors were made for this save alone.
    own = weakref.ref(saved.tensor if isinstance(saved, KeptTensor) else saved.witness)
    if not record.planned:
        return record, own, _never
    if isinstance(saved, KeptTensor):
        return record, own, StorageWeakRef(saved.tensor.untyped_storage()).expired
    if saved.shared is None:
        return record, own, _never
    shared = weakref.ref(saved.shared)
    return record, own, lambda: shared() is None


def still_held(saves: Iterable[Held]) -> list[Record]:
    """The records with the bytes that are still held.

    Returns:
        Where the save is gone, plain PyTorch's bytes are 0 (unless another save has the same
        storage); where the payload is gone, the planned ones.
    """
    saves = list(saves)
    living = {
        record.storage
        for record, own, _ in saves
        if (record.shape or record.nbytes) and own() is not None
    }
    found = []
    for record, _, gone in saves:
        plain = record.nbytes if record.storage in living else 0
        planned = 0 if gone() else record.planned
        if (plain, planned) != (record.nbytes, record.planned):
            reason = record.reason or DROPPED
            record = record._replace(nbytes=plain, planned=planned, reason=reason)
        found.append(record)
    return found


def _never() -> bool:
    return False
