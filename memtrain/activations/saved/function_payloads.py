"""Payloads that memtrain's own autograd Functions save for their backward."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from memtrain.activations.saved.flatten import Layout, flatten
from memtrain.activations.saved.store import tensor_of
from memtrain.compressors import Compressor, Key, Packed

Payload = tuple[Packed, Layout | None]
"""A compressed tensor, and its layout where it was flattened."""


def compress(x: Tensor, compressor: Compressor, key: Key) -> Payload:
    """The payload of `x`, flattened in memory order unless the compressor is `shaped`."""
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
    """The payloads that `save_payloads` saved, and the other tensors."""
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
    """Tensors of `save_compressed`: `x` decompressed, in its shape and memory order, and others."""
    (payload,), others = saved_payloads(ctx)
    return decompress(payload, ctx.compressor), others


def decompress(payload: Payload, compressor: Compressor) -> Tensor:
    """The tensor of a payload, in its shape and memory order."""
    packed, layout = payload
    return tensor_of(packed, compressor, layout)
