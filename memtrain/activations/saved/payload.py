"""Compress a saved tensor, or reuse the payload of an earlier save."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain.activations.saved.flatten import Layout, Memory, flatten, memory_of, steps_of
from memtrain.activations.saved.node_tensors import flows_into
from memtrain.activations.saved.store import Entry, Handle, Storage, tensor_of
from memtrain.compressors import Compressor, Key, Packed
from memtrain.kernels.dispatch import is_ordinary

MAX_SPECIALIZED = 2**13
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
    x: Tensor, layout: Layout, memory: Memory | None, compressor: Compressor, key: Callable[[], Key]
) -> tuple[Packed, Compressor, int]:
    """Return the payload, the compressor that reads it, and its bytes on the tensor's device."""
    special = None
    compressor = compressor.for_saved(x.shape) if compressor.whole_rows else compressor
    if not compressor.shaped and is_ordinary():
        special = specialized(x, layout, memory, compressor)
    if special is not None:
        compressor, compress, nbytes, stored = special
        tensors = dict(zip(compressor.parts, compress(x, key().bits()), strict=True))
        return Packed(tensors, stored, x.dtype), compressor, nbytes
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


Specialized = tuple[Compressor, Callable[[Tensor, int], tuple[Tensor, ...]], int, torch.Size]
"""A compressor with groups for one shape, memory order, dtype and device; its kernel, which returns
the payload's tensors in the order of `parts`; the bytes of a payload; the shape in memory order."""


def specialized(
    x: Tensor, layout: Layout, memory: Memory | None, compressor: Compressor
) -> Specialized | None:
    """Return the kernel for tensors of this signature, cached; None where there is none."""
    if not compressor.reads_rows:
        return None
    signature = (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, compressor)
    found = _SPECIALIZED.get(signature, _UNKNOWN)
    if found is _UNKNOWN:
        if len(_SPECIALIZED) >= MAX_SPECIALIZED:  # shapes that vary would collect without end
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
    return None if found is None else (compressor, *found, steps_of(layout)[0])


# -- payloads of memtrain's own autograd Functions -------------------------------------------------

Payload = tuple[Packed, Layout | None]
"""A compressed tensor, and its layout where it was flattened."""


def compress(x: Tensor, compressor: Compressor, key: Key) -> Payload:
    """Return the payload of a tensor, flattened unless the compressor is `shaped`."""
    flat, layout = (x, None) if compressor.shaped else flatten(x)
    return compressor.compress(flat, key=key), layout


def save_payloads(
    ctx: Any, payloads: Sequence[Payload], compressor: Compressor, *others: Tensor | None
) -> None:
    """Save payloads, and other tensors as they are, through `ctx.save_for_backward`."""
    parts: list[Tensor] = []
    ctx.compressor, ctx.payloads = compressor, []
    for (tensors, shape, dtype), layout in payloads:  # a comprehension is a function more to call
        parts += tensors.values()
        ctx.payloads.append((tuple(tensors), shape, dtype, layout))
    ctx.save_for_backward(*parts, *others)


def saved_payloads(ctx: Any) -> tuple[list[tuple[Packed, Any]], list[Any]]:
    """Return the payloads that `save_payloads` saved, and the other tensors."""
    saved = iter(ctx.saved_tensors)
    payloads: list[tuple[Packed, Any]] = []
    for names, shape, dtype, layout in ctx.payloads:
        tensors = dict(zip(names, saved, strict=False))  # the first of those that are left
        payloads.append((Packed(tensors, shape, dtype), layout))
    return payloads, list(saved)


def save_compressed(
    ctx: Any, x: Tensor, compressor: Compressor, key: Key, *others: Tensor | None
) -> None:
    """Save the payload of `x`, and other tensors as they are, through `ctx.save_for_backward`."""
    save_payloads(ctx, [compress(x, compressor, key)], compressor, *others)


def saved_compressed(ctx: Any) -> tuple[Tensor, list[Any]]:
    """Return the tensor that `save_compressed` saved, and the other tensors."""
    (payload,), others = saved_payloads(ctx)
    return decompress(payload, ctx.compressor), others


def decompress(payload: Payload, compressor: Compressor) -> Tensor:
    """Return the tensor of a payload, in its shape and memory order."""
    packed, layout = payload
    return tensor_of(packed, compressor, layout)
