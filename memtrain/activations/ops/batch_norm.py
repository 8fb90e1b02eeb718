"""Batch, instance and group norms that save a compressed normalised input.

With `x_hat = (x - mean) * rstd` every norm has `dx = rstd * (g - mean(g) - x_hat * mean(g *
x_hat))`, where `g = dy * weight` (an RMS norm without the term `mean(g)`). So `x_hat` and one
`rstd` per row or channel are enough, whatever the mean was. Compressing `x` instead, by hooks,
loses a large mean's worth of precision: the bounds of a group are rounded to bfloat16. The mean of
what a payload gives back is taken off again: it is 0 of x_hat, and noise of the payload.

Values are torch's own, and so are arguments, but for `running` (the running mean and variance, or
None each), the `compressor` of `x_hat`, and the `key` of its random bits. The backward needs the
payload of x's elements, and one number per row, per channel, or per sample and group.
"""

from typing import Any

import torch
from torch import Tensor

from memtrain.activations.ops.autograd import autograd_function
from memtrain.activations.ops.call import as_autocast
from memtrain.activations.saved.flatten import memory_format_of
from memtrain.activations.saved.known_ops import LAYER_NORM
from memtrain.activations.saved.payload import (
    save_compressed,
    saved_compressed,
)
from memtrain.compressors import Compressor, Key
from memtrain.kernels.dispatch import is_for_cuda


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

    Reference:
        Ioffe and Szegedy, Batch Normalization, arXiv:1502.03167; ActNN (arXiv:2104.14129) keeps x
        itself quantised.
    """
    return _batch_norm(x, weight, bias, *running, momentum, eps, compressor, key)


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

    Reference:
        Ulyanov et al., Instance Normalization, arXiv:1607.08022.
    """
    n, c = x.shape[:2]
    args = [None if t is None else t.repeat(n) for t in (weight, bias, *running)]
    flat = x.contiguous().view(1, n * c, *x.shape[2:])
    y = _batch_norm(flat, *args, momentum, eps, compressor, key)
    for old, new in zip(running, args[2:], strict=True):
        if old is not None and new is not None:
            old.detach().copy_(new.view(n, c).mean(0))
    return y.view(x.shape)


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
    """`F.group_norm`, saving a compressed `x_hat` in place of `x`.

    Reference:
        Wu and He, Group Normalization, arXiv:1803.08494.
    """
    x, weight, bias = as_autocast(
        lambda t: torch.group_norm(t, groups), (0, *x.shape[1:]), x, weight, bias
    )
    return _group_norm(x, weight, bias, groups, eps, compressor, key)


def _batch_norm_forward(  # noqa: PLR0913 (the norm's own, and the site's)
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
    y, batch_mean, rstd, *_ = norm(x, weight, bias, mean, var, True, momentum, eps, cudnn)
    x_hat = y
    if weight is not None or bias is not None:
        x_hat = _normalised(x, batch_mean, rstd)
        if x_hat is None:
            x_hat = norm(x, None, None, None, None, True, 0.0, eps, cudnn)[0]
    save_compressed(ctx, x_hat, compressor, key, rstd, weight)
    ctx.eps = eps
    return y


def _batch_norm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x_hat, (rstd, weight) = saved_compressed(ctx)
    wanted = list(ctx.needs_input_grad[:3])
    mean, one = standard(rstd)
    if not ctx.compressor.is_identity:
        mean = x_hat.mean([d for d in range(x_hat.dim()) if d != 1], dtype=rstd.dtype)
    dx, dw, db = torch.ops.aten.native_batch_norm_backward(
        grad, x_hat, weight, None, None, mean, one, True, ctx.eps, wanted
    )
    return _scaled(dx, rstd, x_hat), dw, db, None, None


def _group_norm_forward(  # noqa: PLR0913 (the norm's own, and the site's)
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
    on_cpu = x.is_cpu and not is_for_cuda(x)
    x = x.contiguous(memory_format=memory_format_of(x) if on_cpu else torch.contiguous_format)
    y, mean, rstd = torch.native_group_norm(x, weight, bias, *ctx.sizes, eps)
    x_hat = y
    if weight is not None or bias is not None:
        x_hat = None
        if x.is_contiguous() and x.numel():  # a batch of one sample, whose channels are groups
            rows = x.view(1, n * groups, -1)
            x_hat = _normalised(rows, mean.view(-1), rstd.view(-1))
        if x_hat is None:
            x_hat = torch.native_group_norm(x, None, None, *ctx.sizes, eps)[0]
        x_hat = x_hat.view(x.shape)
    save_compressed(ctx, x_hat, compressor, key, rstd, weight)
    return y


def _group_norm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x_hat, (rstd, weight) = saved_compressed(ctx)
    mean, one = standard(rstd)
    if not ctx.compressor.is_identity:
        groups = x_hat.unflatten(1, (ctx.sizes[3], -1))
        mean = groups.mean(list(range(2, groups.dim())), dtype=rstd.dtype)
    dx, dw, db = torch.ops.aten.native_group_norm_backward(
        grad.contiguous(memory_format=memory_format_of(x_hat)),
        x_hat,
        mean,
        one,
        weight,
        *ctx.sizes,
        list(ctx.needs_input_grad[:3]),
    )
    return _scaled(dx, rstd.repeat_interleave(ctx.sizes[1] // ctx.sizes[3], 1), x_hat), dw, db


_batch_norm = autograd_function(
    _batch_norm_forward, _batch_norm_backward, tensors=5, like=LAYER_NORM
)
_group_norm = autograd_function(
    _group_norm_forward, _group_norm_backward, tensors=3, like=LAYER_NORM
)


def _normalised(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor | None:
    """`(x - mean) * rstd` per channel in one pass; None of statistics coarser than float32."""
    if rstd.dtype in (torch.float16, torch.bfloat16):
        return None
    var = rstd.reciprocal().square()
    return torch.batch_norm(x, None, None, mean, var, False, 0.0, 0.0, False)


def _scaled(dx: Tensor | None, rstd: Tensor, like: Tensor) -> Tensor | None:
    """`dx * rstd`, one number per channel (of a sample), in place; None where there is no `dx`."""
    return None if dx is None else dx.mul_(rstd.view(*rstd.shape, *[1] * (like.dim() - 2)))


def standard(rstd: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Mean 0 and reciprocal deviation 1, as many as there are statistics."""
    return torch.zeros_like(rstd, dtype=dtype), torch.ones_like(rstd, dtype=dtype)
