"""Norms that save a compressed normalised input, and never the input itself.

With `x_hat = (x - mean) * rstd` every one of them has `dx = rstd * (g - mean(g) - x_hat *
mean(g * x_hat))`, where `g = dy * weight` (an RMS norm without the term `mean(g)`). So `x_hat` and
one `rstd` per row or channel are enough, whatever the mean was. Compressing `x` instead, by hooks,
loses a large mean's worth of precision: the bounds of a group are rounded to bfloat16.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from memtrain.activations.ops.call import as_autocast
from memtrain.activations.ops.context import keep, kept, order_of
from memtrain.activations.ops.fused_channel_norm import gradients, keep_normalised, keep_rows
from memtrain.activations.ops.fused_norm import fused
from memtrain.activations.ops.once import once_differentiable
from memtrain.compressors import Compressor, Key


def layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    compressor: Compressor,
    key: Key = Key(),  # noqa: B008 (a frozen value)
) -> Tensor:
    """`F.layer_norm`, saving a compressed `x_hat` in place of `x`.

    The value is torch's own; where x_hat is quantised in the same pass (`ops.fused_norm`), up to
    the rounding of its sums. Under autocast the arithmetic has the dtype that torch gives it.

    Args:
        x: Float, any shape that ends in `shape`.
        shape: The dimensions that are normalised together.
        weight: Of `shape`, or None.
        bias: Of `shape`, or None.
        eps: Added to the variance.
        compressor: For `x_hat`, which has mean 0 and variance 1 per row.
        key: Feeds the compressor's random bits.

    Returns:
        Shape of `x`.

    Memory:
        Kept for backward: the payload of x's elements, and one number per row.

    Example:
        >>> from memtrain.compressors import Group
        >>> x = torch.randn(4, 256, requires_grad=True)
        >>> layer_norm(x, (256,), compressor=Group(bits=4)).shape
        torch.Size([4, 256])

    Reference:
        Ba et al., Layer Normalization, arXiv:1607.06450.
    """
    size = list(shape)
    x, weight, bias = as_autocast(lambda t: torch.layer_norm(t, size), (0, *size), x, weight, bias)
    return _LayerNorm.apply(x, weight, bias, size, eps, compressor, key)  # type: ignore[return-value]


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    compressor: Compressor,
    key: Key = Key(),  # noqa: B008 (a frozen value)
) -> Tensor:
    """`F.group_norm`, saving a compressed `x_hat` in place of `x`; the value is torch's own.

    Args:
        x: Float, [N, C, ...].
        groups: How many groups of channels are normalised, each by itself.
        weight: [C], or None.
        bias: [C], or None.
        eps: Added to the variance.
        compressor: For `x_hat`.
        key: Feeds the compressor's random bits.

    Returns:
        Shape of `x`.

    Memory:
        Kept for backward: the payload of x's elements, and one number per sample and group.

    Reference:
        Wu and He, Group Normalization, arXiv:1803.08494.
    """
    x, weight, bias = as_autocast(
        lambda t: torch.group_norm(t, groups), (0, *x.shape[1:]), x, weight, bias
    )
    return _GroupNorm.apply(x, weight, bias, groups, eps, compressor, key)  # type: ignore[return-value]


class _LayerNorm(Function):
    @staticmethod
    def forward(  # noqa: PLR0913 (the norm's own, and the site's)
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: list[int],
        eps: float,
        compressor: Compressor,
        key: Key,
    ) -> Tensor:
        ctx.normalized, ctx.output = shape, _scaled
        y = fused(ctx, x, shape, weight, bias, eps, compressor, key, centred=True)
        if y is not None:
            return y
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        if keep_rows(ctx, x, (mean, rstd), compressor, key, weight, bias):
            return y
        # x_hat by the same op with other weights: the rounding of these must not enter. Ones and
        # zeros, since torch's CPU kernel takes 1.7 times as long without any.
        like = weight if weight is not None else bias
        x_hat = y
        if like is not None:
            ones, zeros = torch.ones_like(like), torch.zeros_like(like)
            x_hat = torch.native_layer_norm(x, shape, ones, zeros, eps)[0]
        keep(ctx, x_hat, compressor, key, rstd, weight, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x_hat, (rstd, weight, bias) = kept(ctx)
        like = weight if weight is not None else bias
        # CPU kernels want the statistics in the tensors' dtype where all have one.
        mixed = x_hat.is_cuda or (like is not None and like.dtype != x_hat.dtype)
        statistics = standard(rstd.to(torch.float32 if mixed else x_hat.dtype))
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(
            grads[0], x_hat, ctx.normalized, *statistics, weight, bias, wanted(ctx)
        )
        return times(dx, rstd), dw, db, None, None, None, None


class _GroupNorm(Function):
    @staticmethod
    def forward(  # noqa: PLR0913 (the norm's own, and the site's)
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        groups: int,
        eps: float,
        compressor: Compressor,
        key: Key,
    ) -> Tensor:
        n, c = x.shape[:2]
        ctx.sizes = (n, c, x[0, 0].numel() if n and c else 0, groups)
        # As torch does it: CPU kernels know channels-last, CUDA's do not.
        on_cpu = x.device.type == "cpu"
        x = x.contiguous(memory_format=order_of(x) if on_cpu else torch.contiguous_format)
        y, mean, rstd = torch.native_group_norm(x, weight, bias, *ctx.sizes, eps)
        statistics = (mean, rstd)
        if keep_normalised(ctx, x, statistics, weight, bias, compressor, key, groups=groups):
            return y
        x_hat = y
        if weight is not None or bias is not None:
            x_hat = None
            if x.is_contiguous() and x.numel():  # a batch of one sample, whose channels are groups
                rows = x.view(1, n * groups, -1)
                x_hat = normalised(rows, mean.view(-1), rstd.view(-1))
            if x_hat is None:
                x_hat = torch.native_group_norm(x, None, None, *ctx.sizes, eps)[0]
            x_hat = x_hat.view(x.shape)
        keep(ctx, x_hat, compressor, key, rstd, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.where is not None:
            return *gradients(ctx, grads[0]), *[None] * 4
        x_hat, (rstd, weight) = kept(ctx)
        dx, dw, db = torch.ops.aten.native_group_norm_backward(
            grads[0].contiguous(memory_format=order_of(x_hat)),
            x_hat,
            *standard(rstd),
            weight,
            *ctx.sizes,
            wanted(ctx),
        )
        per_channel = rstd.repeat_interleave(ctx.sizes[1] // ctx.sizes[3], 1)
        return times(dx, spread(per_channel, x_hat)), dw, db, None, None, None, None


def _scaled(x_hat: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """A layer norm's output from its normalised input."""
    if weight is not None and bias is not None:
        return torch.addcmul(bias, x_hat, weight).to(x_hat.dtype)  # one pass
    y = x_hat if weight is None else x_hat * weight
    return (y if bias is None else y + bias).to(x_hat.dtype)


def normalised(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor | None:
    """`(x - mean) * rstd` per channel in one pass: nothing is summed again.

    Args:
        x: [N, C, ...].
        mean: [C].
        rstd: [C].

    Returns:
        Shape of `x`; None where the statistics are coarser than float32.
    """
    if rstd.dtype in (torch.float16, torch.bfloat16):
        return None
    var = rstd.reciprocal().square()
    return torch.batch_norm(x, None, None, mean, var, False, 0.0, 0.0, False)


def standard(rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Mean 0 and reciprocal deviation 1, as many as there are statistics."""
    return torch.zeros_like(rstd), torch.ones_like(rstd)


def wanted(ctx: Any) -> list[bool]:
    """Which of the gradients of the input, weight and bias are asked for."""
    return list(ctx.needs_input_grad[:3])


def times(dx: Tensor | None, rstd: Tensor) -> Tensor | None:
    """`dx * rstd`, written over `dx`, where there is one."""
    return None if dx is None else dx.mul_(rstd)


def spread(statistic: Tensor, like: Tensor) -> Tensor:
    """One number per channel (of a sample), with a dimension of 1 for each spatial one."""
    return statistic.view(*statistic.shape, *[1] * (like.dim() - 2))
