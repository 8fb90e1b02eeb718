"""What a Function of ours keeps for its backward: a compressor's payload among plain tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memtrain.activations.layout import flatten, layout_of, restore
from memtrain.compressors import Compressor, Key, Packed


def keep(ctx: Any, x: Tensor, compressor: Compressor, key: Key, *others: Tensor | None) -> None:
    """Save the payload of `x`, and `others` as they are, through `ctx.save_for_backward`.

    Args:
        ctx: The Function's context.
        x: What is compressed, flattened in memory order unless the compressor is `shaped`.
        compressor: Of the site's rule.
        key: Feeds its random bits.
        *others: Parameters and statistics.
    """
    flat, ctx.layout = (x, None) if getattr(compressor, "shaped", False) else flatten(x)
    packed = compressor.compress(flat, key=key)
    ctx.save_for_backward(*packed.tensors.values(), *others)
    ctx.payload = packed._replace(tensors=dict.fromkeys(packed.tensors))
    ctx.compressor = compressor


def packed_of(ctx: Any) -> tuple[Packed, list[Any]]:
    """The payload that `keep` saved, and the others."""
    saved, names = list(ctx.saved_tensors), list(ctx.payload.tensors)
    tensors = dict(zip(names, saved, strict=False))
    return ctx.payload._replace(tensors=tensors), saved[len(names) :]


def kept(ctx: Any) -> tuple[Tensor, list[Any]]:
    """What `keep` saved: `x` decompressed, of its shape and order in memory, and the others."""
    packed, others = packed_of(ctx)
    x = ctx.compressor.decompress(packed)
    return x if ctx.layout is None else restore(x, ctx.layout), others


def output_again(y: Tensor) -> Callable[[], Tensor] | None:
    """What computes an op's output again from the payload that the op keeps, or None.

    A Function of ours allows it by setting `ctx.output`, a function of what `kept` returns.

    Args:
        y: The Function's result.
    """
    node: Any = y.grad_fn
    if not hasattr(node, "output") or node.layout != layout_of(y):
        return None
    return partial(_output_again, node)


def _output_again(node: Any) -> Tensor:
    x, others = kept(node)
    return node.output(x, *others)


def order_of(x: Tensor) -> torch.memory_format:
    """The memory format that `x` has, of those that kernels know.

    Example:
        >>> order_of(torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
        torch.channels_last
    """
    for dims, format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dims and x.is_contiguous(memory_format=format) and not x.is_contiguous():
            return format
    return torch.contiguous_format
