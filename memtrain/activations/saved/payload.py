"""Compress a saved tensor, or reuse the payload of an earlier save."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memtrain.activations.saved.flatten import Layout, Memory, flatten, memory_of, steps_of
from memtrain.activations.saved.node_tensors import flows_into
from memtrain.activations.saved.store import Entry, Handle, Storage, tensor_of
from memtrain.compressors import Compressor, Key, Packed
from memtrain.kernels.dispatch import is_ordinary

FORMS = 2**13
"""Signatures of tensors at most whose kernels are cached."""
_SPECIALIZED: dict[tuple[Any, ...], Any] = {}
_UNKNOWN: Any = object()


def make_handle(
    storage: Storage, x: Tensor, compressor: Compressor, key: Callable[[], Key], node: Any = None
) -> tuple[Handle | None, bool]:
    """Return the handle of a saved tensor, and whether its payload is new.

    There is no handle where a payload would be no smaller than the tensor's storage.
    """
    source, x = x.grad_fn, x.detach()
    layout, memory = memory_of(x)
    shaped = compressor.shaped
    geometry = (x.shape, x.stride(), x.storage_offset())
    signature = (memory, x.dtype, compressor, geometry if shaped else None)
    entry = storage.find(signature, x._version)
    is_new = entry is None or (node is not None and flows_into(node, source, entry.savers))
    if entry is None or is_new:
        packed, made_by, nbytes = _compress(x, layout, memory, compressor, key)
        if nbytes >= x.untyped_storage().nbytes():
            return None, False
        entry = Entry(x, storage.epoch, packed, made_by, nbytes)
        storage.add(signature, entry)
    if node is not None:
        entry.savers.add(node._sequence_nr())
    return Handle(entry, None if shaped else layout, geometry), is_new


def roundtrip(x: Tensor, compressor: Compressor, key: Key) -> Tensor:
    """Compress a saved tensor, and return it decompressed."""
    layout, memory = memory_of(x)
    packed, made_by, _ = _compress(x, layout, memory, compressor, lambda: key)
    return tensor_of(packed, made_by, None if compressor.shaped else layout)


def _compress(
    x: Tensor,
    layout: Layout,
    memory: Memory | None,
    compressor: Compressor,
    key: Callable[[], Key],
) -> tuple[Packed, Compressor, int]:
    """Return the payload, the compressor that reads it, and its bytes on the tensor's device."""
    special = None
    compressor = compressor.for_saved(x.shape) if compressor.whole_rows else compressor
    if not compressor.shaped and is_ordinary():
        special = specialized(x, layout, memory, compressor)
    if special is not None:
        parts = special.compress(x, key().bits())
        tensors = dict(zip(special.compressor.parts, parts, strict=True))
        return Packed(tensors, special.stored, x.dtype), special.compressor, special.nbytes
    flat = x
    if not compressor.shaped and not (compressor.reads_rows and x.is_contiguous()):
        flat = flatten(x, layout, rows=memory if compressor.reads_rows else None)[0]
    packed = compressor.compress(flat, key=key())
    offloaded = getattr(packed.tensors, "offloaded", ())
    nbytes = sum(
        part.nbytes
        for name, part in packed.tensors.items()
        if name not in offloaded and part.device == x.device
    )
    return packed, compressor, nbytes


class Specialized(NamedTuple):
    """A kernel that compresses tensors of one shape, memory order, dtype and device."""

    compressor: Compressor
    """With groups for this shape."""
    compress: Callable[[Tensor, int], tuple[Tensor, ...]]
    """The payload's tensors, in the order of the compressor's `parts`."""
    nbytes: int
    """Of a payload."""
    stored: torch.Size
    """The shape in memory order."""


def specialized(
    x: Tensor, layout: Layout, memory: Memory | None, compressor: Compressor
) -> Specialized | None:
    """Return the kernel for tensors of this signature, cached; None where there is none."""
    if not compressor.reads_rows:
        return None
    signature = (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, compressor)
    found = _SPECIALIZED.get(signature, _UNKNOWN)
    if found is _UNKNOWN:
        if len(_SPECIALIZED) >= FORMS:  # shapes that vary would collect without end
            _SPECIALIZED.clear()
        found = _SPECIALIZED[signature] = _specialize(x, layout, memory, compressor)
    return found


def _specialize(
    x: Tensor, layout: Layout, memory: Memory | None, compressor: Compressor
) -> Specialized | None:
    if any(layout.expanded):
        return None
    flat, compressor = flatten(x, layout, rows=memory)[0], compressor.for_saved(x.shape)
    if flat.data_ptr() != x.data_ptr():  # neither dense nor rows: it was copied
        return None
    found = compressor.kernel(flat)
    return None if found is None else Specialized(compressor, *found, steps_of(layout)[0])
