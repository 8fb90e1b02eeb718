"""What a Function of ours keeps for its backward: a compressor's payload among plain tensors."""

from typing import Any

from torch import Tensor

from memtrain.activations.layout import flatten, restore
from memtrain.compressors import Compressor, Key, Packed


def keep(ctx: Any, x: Tensor, compressor: Compressor, key: Key, *others: Tensor | None) -> None:
    """Save the payload of `x`, and `others` as they are, through `ctx.save_for_backward`.

    Args:
        ctx: The Function's context.
        x: What is compressed, flattened in memory order.
        compressor: Of the site's rule.
        key: Feeds its random bits.
        *others: Parameters and statistics.
    """
    flat, ctx.layout = flatten(x)
    packed = compressor.compress(flat, key=key)
    ctx.save_for_backward(*packed.tensors.values(), *others)
    ctx.payload = packed._replace(tensors=dict.fromkeys(packed.tensors))
    ctx.compressor = compressor


def packed_of(ctx: Any) -> tuple[Packed, list[Tensor | None]]:
    """The payload that `keep` saved, and the others."""
    saved, names = list(ctx.saved_tensors), list(ctx.payload.tensors)
    tensors = dict(zip(names, saved, strict=False))
    return ctx.payload._replace(tensors=tensors), saved[len(names) :]


def kept(ctx: Any) -> tuple[Tensor, list[Tensor | None]]:
    """What `keep` saved: `x` decompressed, of its shape and order in memory, and the others."""
    packed, others = packed_of(ctx)
    return restore(ctx.compressor.decompress(packed), ctx.layout), others
