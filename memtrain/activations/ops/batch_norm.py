"""Batch and instance norm that save a compressed normalised input (see `ops.norm`)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from memtrain.activations.ops.context import keep, kept
from memtrain.activations.ops.fused_channel_norm import gradients, keep_normalised
from memtrain.activations.ops.norm import normalised, spread, standard, times, wanted
from memtrain.activations.ops.once import once_differentiable
from memtrain.compressors import Compressor, Key


def batch_norm(  # noqa: PLR0913 (torch's own, and the site's)
    x: Tensor,
    running: tuple[Tensor | None, Tensor | None] = (None, None),
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    compressor: Compressor,
    key: Key = Key(),  # noqa: B008 (a frozen value)
) -> Tensor:
    """`F.batch_norm` in training, saving a compressed `x_hat` in place of `x`.

    The value is torch's own, and so are the running statistics, which are updated.

    Args:
        x: Float, [N, C, ...].
        running: Mean and variance, [C] each, or None.
        weight: [C], or None.
        bias: [C], or None.
        momentum: The share of this batch in the running statistics.
        eps: Added to the variance.
        compressor: For `x_hat`.
        key: Feeds the compressor's random bits.

    Returns:
        Shape of `x`.

    Memory:
        Kept for backward: the payload of x's elements, and one number per channel.

    Reference:
        Ioffe and Szegedy, Batch Normalization, arXiv:1502.03167; ActNN (arXiv:2104.14129) keeps x
        itself quantised.
    """
    options = (*running, momentum, eps, compressor, key)
    return _BatchNorm.apply(x, weight, bias, *options)  # type: ignore[return-value]


def instance_norm(  # noqa: PLR0913 (torch's own, and the site's)
    x: Tensor,
    running: tuple[Tensor | None, Tensor | None] = (None, None),
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    compressor: Compressor,
    key: Key = Key(),  # noqa: B008 (a frozen value)
) -> Tensor:
    """`F.instance_norm` with the input's own statistics, saving a compressed `x_hat`.

    As in torch, it is a batch norm of one sample with N * C channels.

    Args:
        x: Float, [N, C, ...].
        running: Mean and variance, [C] each, or None; updated with the mean over the samples.
        weight: [C], or None.
        bias: [C], or None.
        momentum: The share of this batch in the running statistics.
        eps: Added to the variance.
        compressor: For `x_hat`.
        key: Feeds the compressor's random bits.

    Returns:
        Shape of `x`.

    Memory:
        Kept for backward: the payload of x's elements, and one number per sample and channel.

    Reference:
        Ulyanov et al., Instance Normalization, arXiv:1607.08022.
    """
    n, c = x.shape[:2]
    repeated = [None if t is None else t.repeat(n) for t in (*running, weight, bias)]
    y = batch_norm(
        x.contiguous().view(1, n * c, *x.shape[2:]),
        (repeated[0], repeated[1]),
        repeated[2],
        repeated[3],
        momentum,
        eps,
        compressor=compressor,
        key=key,
    )
    for own, new in zip(running, repeated[:2], strict=True):
        if own is not None and new is not None:
            own.detach().copy_(new.view(n, c).mean(0))
    return y.view(x.shape)


class _BatchNorm(Function):
    @staticmethod
    def forward(  # noqa: PLR0913 (the norm's own, and the site's)
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
        momentum: float,
        eps: float,
        compressor: Compressor,
        key: Key,
    ) -> Tensor:
        norm, cudnn = torch._batch_norm_impl_index, torch.backends.cudnn.enabled
        y, own_mean, rstd, *_ = norm(x, weight, bias, mean, var, True, momentum, eps, cudnn)
        if keep_normalised(ctx, x, (own_mean, rstd), weight, bias, compressor, key):
            return y
        x_hat = y
        if weight is not None or bias is not None:
            x_hat = normalised(x, own_mean, rstd)
            if x_hat is None:
                x_hat = norm(x, None, None, None, None, True, 0.0, eps, cudnn)[0]
        keep(ctx, x_hat, compressor, key, rstd, weight)
        ctx.eps = eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.where is not None:
            return *gradients(ctx, grads[0]), *[None] * 6
        x_hat, (rstd, weight) = kept(ctx)
        dx, dw, db = torch.ops.aten.native_batch_norm_backward(
            grads[0], x_hat, weight, None, None, *standard(rstd), True, ctx.eps, wanted(ctx)
        )
        return times(dx, spread(rstd, x_hat)), dw, db, *[None] * 6
