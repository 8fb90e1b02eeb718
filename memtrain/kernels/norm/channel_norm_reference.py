"""Norms over channels by codes in plain torch: the definition of `kernels.norm.channel_norm`."""

from typing import NamedTuple

import torch
from torch import Tensor

from memtrain.kernels.group import group
from memtrain.kernels.norm.norm import Codes


class Channels(NamedTuple):
    """Where the channels lie in memory: [outer, middle, channels, inner], each of any size.

    A statistic serves `together` neighbouring channels of one of the `outer` parts, so that there
    are `outer * channels / together` of them. A batch norm of [N, C, H, W] has (1, N, C, H * W),
    (1, N * H * W, C, 1) where channels are last; a group norm (N, 1, C, H * W, C / groups).
    """

    outer: int
    middle: int
    channels: int
    inner: int
    together: int = 1


def quantize_reference(
    x: Tensor, mean: Tensor, rstd: Tensor, where: Channels, codes: Codes
) -> tuple[Tensor, Tensor]:
    """`channel_norm_quantize` in plain torch: the definition."""
    x_hat = (_spread(x.float(), where) - _of_channels(mean, where)) * _of_channels(rstd, where)
    return group.quantize_reference(
        x_hat, codes.bits, codes.group_size, codes.seed, codes.stochastic, codes.wide
    )


def backward_reference(
    dy: Tensor, x_hat: Tensor, rstd: Tensor, weight: Tensor | None, where: Channels
) -> tuple[Tensor, Tensor, Tensor]:
    """`channel_norm_backward` in plain torch, from the decoded `x_hat`: the definition."""
    dy, x_hat = _spread(dy.float(), where), _spread(x_hat, where)
    sums = torch.stack([dy.double().sum((1, 3)), (dy * x_hat).double().sum((1, 3))])
    scale, slope, shift = (t[:, None, :, None] for t in lines_of(sums, rstd, weight, where))
    dbias, dweight = sums.sum(1).float()
    return (scale * dy + (slope * x_hat + shift)).view(-1), dweight, dbias


def lines_of(
    sums: Tensor, rstd: Tensor, weight: Tensor | None, where: Channels
) -> tuple[Tensor, Tensor, Tensor]:
    """`dx = scale * dy + (slope * x_hat + shift)`, float32, [outer, channels] each.

    Args:
        sums: Of dy and of dy * x_hat, float64, [2, outer, channels].
        rstd: [statistics].
        weight: [channels], or None.
        where: The channels.
    """
    each = rstd.reshape(where.outer, -1)
    g = sums if weight is None else sums * weight
    count = where.middle * where.inner * where.together
    shared = g.unflatten(2, (-1, where.together)).sum(3)
    shift, slope = (-each * shared / count).float().repeat_interleave(where.together, 2)
    scale = each.repeat_interleave(where.together, 1)
    return scale if weight is None else scale * weight, slope, shift


def _spread(x: Tensor, where: Channels) -> Tensor:
    return x.view(where[:4])


def _of_channels(statistic: Tensor, where: Channels) -> Tensor:
    """One number for each channel of each outer part: [outer, 1, channels, 1]."""
    each = statistic.reshape(where.outer, -1).repeat_interleave(where.together, 1)
    return each[:, None, :, None]
