"""What a Function of ours keeps for its backward: a compressor's payload among plain tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memtrain.activations.saved.flatten import Layout, flatten, layout_of
from memtrain.activations.saved.handles import Shared, check_version
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
    keep_packed(ctx, *compressed(x, compressor, key), compressor, *others)


def compressed(x: Tensor, compressor: Compressor, key: Key) -> tuple[Packed, Layout | None]:
    """The payload of `x`, and its layout where it was flattened: what `Shared` takes back.

    Args:
        x: What is compressed, flattened in memory order unless the compressor is `shaped`.
        compressor: Of the site's rule.
        key: Feeds its random bits.
    """
    flat, layout = (x, None) if compressor.shaped else flatten(x)
    return compressor.compress(flat, key=key), layout


def keep_packed(
    ctx: Any, packed: Packed, layout: Layout | None, compressor: Compressor, *others: Tensor | None
) -> None:
    """As `keep`, of a payload that is there already.

    Args:
        ctx: The Function's context.
        packed: Of the elements in memory order, or of the tensor where `layout` is None.
        layout: Of the tensor.
        compressor: What decompresses it.
        *others: Parameters and statistics.
    """
    ctx.save_for_backward(*packed.tensors.values(), *others)
    ctx.payload = packed._replace(tensors=dict.fromkeys(packed.tensors))
    ctx.compressor, ctx.layout = compressor, layout


def packed_of(ctx: Any) -> tuple[Packed, list[Any]]:
    """The payload that `keep` saved, and the others."""
    saved, names = list(ctx.saved_tensors), list(ctx.payload.tensors)
    tensors = dict(zip(names, saved, strict=False))
    return ctx.payload._replace(tensors=tensors), saved[len(names) :]


def kept(ctx: Any) -> tuple[Tensor, list[Any]]:
    """What `keep` saved: `x` decompressed, of its shape and order in memory, and the others."""
    packed, others = packed_of(ctx)
    return _decompress(ctx, packed)(), others


def _decompress(ctx: Any, packed: Packed) -> Callable[[], Tensor]:
    """What gives the tensor of a payload; it does not hold the context."""
    return Shared(packed, ctx.compressor, ctx.layout).tensor


def output_again(y: Tensor) -> Callable[[], Tensor] | None:
    """What computes an op's output again from the payload that the op keeps, or None.

    A Function of ours allows it by setting `ctx.output`, a function of what `kept` returns.

    Args:
        y: The Function's result.
    """
    node: Any = y.grad_fn
    if not hasattr(node, "output") or node.layout != layout_of(y):
        return None
    # Not the node itself: a backward through it frees what it saved, yet who reads the output may
    # belong to another graph (of `y.detach()`), or have its turn later.
    packed, others = packed_of(node)
    versions = [None if t is None else t._version for t in others]
    return partial(_output_again, node.output, _decompress(node, packed), others, versions)


def _output_again(
    output: Callable[..., Tensor],
    content: Callable[[], Tensor],
    others: list[Any],
    versions: list[int | None],
) -> Tensor:
    for t, version in zip(others, versions, strict=True):
        if t is not None and version is not None:
            check_version(t, version)
    return output(content(), *others)


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
