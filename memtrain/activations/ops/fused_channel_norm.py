"""Norms over channels around the kernels that know x_hat as codes only, where these serve."""

import math
from typing import Any

import torch
from torch import Tensor

from memtrain.activations.ops.context import keep_packed, packed_of
from memtrain.activations.saved.flatten import layout_of, restore
from memtrain.compressors import Compressor, Key, Packed
from memtrain.kernels.norm import channel_norm
from memtrain.kernels.norm.channel_norm_reference import Channels


def keep_normalised(  # noqa: PLR0913 (a norm's results, and the site's)
    ctx: Any,
    x: Tensor,
    statistics: tuple[Tensor, Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    compressor: Compressor,
    key: Key,
    *,
    groups: int = 0,
) -> bool:
    """Keep the payload of x_hat, the reciprocal deviations and the weight; False where it cannot.

    It can with groups of whole eights of a tensor that is dense in memory, with statistics and
    parameters in float32 (`channel_norm.fits`).

    Args:
        ctx: The Function's context; `gradients` reads it.
        x: The norm's input, [N, C, ...].
        statistics: Means and reciprocal deviations.
        weight: [C], or None.
        bias: [C], or None: only looked at.
        compressor: For x_hat.
        key: Feeds its random bits.
        groups: Of channels, in each sample; 0: each channel over all samples.
    """
    ctx.where = where = channels_of(x, groups)
    exact = all(t is None or t.dtype == torch.float32 for t in (weight, bias))
    if where is None or not exact or not _keep(ctx, x, statistics, where, compressor, key, weight):
        ctx.where = None
    return ctx.where is not None


def keep_rows(
    ctx: Any,
    x: Tensor,
    statistics: tuple[Tensor, Tensor],
    compressor: Compressor,
    key: Key,
    *others: Tensor | None,
) -> bool:
    """As `keep_normalised`, of a layer norm's rows, of any length: for `kept` to give back.

    Args:
        ctx: The Function's context.
        x: The norm's input.
        statistics: Means and reciprocal deviations of its rows.
        compressor: For x_hat.
        key: Feeds its random bits.
        *others: Kept beside the reciprocal deviations.
    """
    rows = statistics[1].numel()
    if not rows or not x.is_contiguous():
        return False
    where = Channels(1, 1, rows, x.numel() // rows)
    return _keep(ctx, x, statistics, where, compressor, key, *others)


def _keep(
    ctx: Any,
    x: Tensor,
    statistics: tuple[Tensor, Tensor],
    where: Channels,
    compressor: Compressor,
    key: Key,
    *others: Tensor | None,
) -> bool:
    exact = all(t.dtype == torch.float32 for t in statistics)
    codes = compressor.group_codes(key) if exact else None
    if codes is None or not channel_norm.fits(x, where, codes.group_size):
        return False
    layout = layout_of(x)
    flat = x.detach().permute(layout.order).view(-1)
    payload = channel_norm.channel_norm_quantize(flat, *statistics, where, codes)
    packed = Packed(dict(zip(("codes", "bounds"), payload, strict=True)), flat.shape, x.dtype)
    keep_packed(ctx, packed, layout, compressor, statistics[1], *others)
    return True


def gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of input, weight and bias, of what `keep_normalised` kept: those asked for.

    Args:
        ctx: The Function's context.
        dy: Of the norm's output.
    """
    packed, (rstd, weight) = packed_of(ctx)
    flat = dy.permute(ctx.layout.order).reshape(-1)
    wanted = ctx.needs_input_grad[:3]
    dx, dw, db = channel_norm.channel_norm_backward(
        flat,
        packed.tensors["codes"],
        packed.tensors["bounds"],
        rstd,
        weight,
        ctx.where,
        ctx.compressor.bits,
        ctx.compressor.group_size,
        needs_dx=wanted[0],
    )
    full = restore(dx, ctx.layout) if wanted[0] else None
    return full, dw if wanted[1] else None, db if wanted[2] else None


def channels_of(x: Tensor, groups: int = 0) -> Channels | None:
    """Where the channels of a dense tensor lie in memory; None for an empty one or one with holes.

    Args:
        x: [N, C, ...].
        groups: Of channels, normalised in each sample; 0: each channel over all samples.

    Example:
        >>> x = torch.ones(2, 6, 4, 4)
        >>> channels_of(x), channels_of(x.contiguous(memory_format=torch.channels_last), 3)[:4]
        (Channels(outer=1, middle=2, channels=6, inner=16, together=1), (2, 16, 6, 1))
    """
    order = layout_of(x).order
    if (
        x.numel() == 0
        or not x.permute(order).is_contiguous()
        or (groups and len(x) > 1 and order[0] != 0)
    ):
        return None
    n, c = x.shape[:2]
    inner = math.prod(x.shape[dim] for dim in order[order.index(1) + 1 :])
    if groups:
        return Channels(n, x[0, 0].numel() // inner, c, inner, c // groups)
    return Channels(1, x.numel() // (c * inner), c, inner)
