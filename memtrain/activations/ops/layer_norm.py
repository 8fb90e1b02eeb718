"""Layer and RMS norms that save a compressed normalised input (see `ops.batch_norm`).

Arguments are torch's, the `compressor` of `x_hat` (in the dtype of `x`) and the `key` of its random
bits. Where x_hat is quantised in the same pass by a kernel, values are torch's up to the rounding
of sums; else they are torch's own.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, is_autocast_enabled

from memtrain.activations.ops.autograd import autograd_function
from memtrain.activations.ops.batch_norm import standard
from memtrain.activations.ops.call import as_autocast
from memtrain.activations.saved.flatten import layout_of
from memtrain.activations.saved.known_ops import LAYER_NORM, RMS_NORM
from memtrain.activations.saved.payload import (
    decompress,
    save_compressed,
    save_payloads,
    saved_payloads,
)
from memtrain.compressors import Compressor, Key, Packed
from memtrain.kernels.dispatch import is_for_cuda
from memtrain.kernels.norm import norm
from memtrain.kernels.norm.norm import Codes


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

    Reference:
        Ba et al., Layer Normalization, arXiv:1607.06450.
    """
    size = list(shape)
    if is_autocast_enabled(x.device.type):
        norm_of = partial(torch.layer_norm, normalized_shape=size)
        x, weight, bias = as_autocast(norm_of, (0, *size), x, weight, bias)
    return _layer_norm(x, weight, bias, size, eps, compressor, key)


def rms_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    variant: str = "torch",
    *,
    compressor: Compressor,
    key: Key = Key(),  # noqa: B008 (a frozen value)
) -> Tensor:
    """`F.rms_norm`, or a form of it that a model writes out, saving a compressed `x_hat`.

    The gradient is computed in float32 (float64 for float64) and then rounded:
    `dx = rstd * (g - x_hat * mean(g * x_hat))`, with g = dy * weight.

    `eps` is added to the mean square; None stands for the epsilon of the dtype of the arithmetic.
    `variant`, a name in `VARIANTS`, sets dtypes and the use of the weight; all but "torch" need a
    weight.

    Reference:
        Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant={variant!r}; allowed: {', '.join(VARIANTS)}")
    if weight is None and variant != "torch":
        raise ValueError(f"weight=None; allowed with variant='torch' only, not with {variant!r}")
    if variant == "gemma" and weight is not None:
        variant, weight = "cast_last", 1.0 + weight.float()
    size = list(shape)
    if variant == "torch":
        x, weight = as_autocast(lambda t: torch.rms_norm(t, size), (0, *size), x, weight)
    return _rms_norm(x, weight, size, eps, variant, compressor, key)


VARIANTS = ("torch", "llama", "cast_last", "gemma", "t5")
"""Forms of an RMS norm: torch's own function, and those that models write out."""


def _value(variant: str, x_hat: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the value of a form that a model writes out; x has this `dtype`."""
    if variant == "cast_last":
        return (x_hat * weight.float()).to(dtype)
    narrow = dtype
    if variant == "t5":
        half = weight.dtype in (torch.float16, torch.bfloat16)
        narrow = weight.dtype if half else x_hat.dtype
    return weight * x_hat.to(narrow)


def _layer_norm_forward(  # noqa: PLR0913 (the norm's own, and the site's)
    ctx: Any,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: list[int],
    eps: float,
    compressor: Compressor,
    key: Key,
) -> Tensor:
    ctx.normalized, ctx.output = shape, _layer_norm_output
    codes = compressor.group_codes(key)
    if codes is not None:
        y = _fused(ctx, x, shape, weight, bias, eps, compressor, codes, centred=True)
        if y is not None:
            return y
    y, _, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
    # x_hat by the same op with other weights: the rounding of these must not enter. Ones and
    # zeros, since torch's CPU kernel takes 1.7 times as long without any.
    like = weight if weight is not None else bias
    x_hat = y
    if like is not None:
        ones, zeros = torch.ones_like(like), torch.zeros_like(like)
        x_hat = torch.native_layer_norm(x, shape, ones, zeros, eps)[0]
    save_compressed(ctx, x_hat, compressor, key, rstd, weight, bias)
    return y


_NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward.default


def _layer_norm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (payload,), (rstd, weight, bias) = saved_payloads(ctx)
    x_hat = decompress(payload, ctx.compressor)
    like = weight if weight is not None else bias
    # CPU kernels want the statistics in the tensors' dtype where all have one.
    mixed = is_for_cuda(grad) or (like is not None and like.dtype != x_hat.dtype)
    statistics = standard(rstd, torch.float32 if mixed else x_hat.dtype)
    dx, dw, db = _NORM_BACKWARD(
        grad, x_hat, ctx.normalized, *statistics, weight, bias, ctx.needs_input_grad[:3]
    )
    return None if dx is None else dx.mul_(rstd), dw, db


_layer_norm = autograd_function(
    _layer_norm_forward, _layer_norm_backward, tensors=3, like=LAYER_NORM
)


def _layer_norm_output(
    x_hat: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    if weight is not None and bias is not None:
        return torch.addcmul(bias, x_hat, weight).to(x_hat.dtype)  # one pass
    y = x_hat if weight is None else x_hat * weight
    return (y if bias is None else y + bias).to(x_hat.dtype)


def _rms_norm_forward(  # noqa: PLR0913 (the norm's own, and the site's)
    ctx: Any,
    x: Tensor,
    weight: Tensor | None,
    shape: list[int],
    eps: float | None,
    variant: str,
    compressor: Compressor,
    key: Key,
) -> Tensor:
    double = variant == "torch" and x.dtype == torch.float64
    arithmetic = torch.float64 if double else torch.float32
    added = torch.finfo(arithmetic).eps if eps is None else eps
    ctx.dims = list(range(-len(shape), 0))
    codes = compressor.group_codes(key)
    # One pass gives a value of the dtype of x.
    same = weight is None or variant == "cast_last" or weight.dtype == x.dtype
    if codes is not None and same:
        ctx.output = partial(_rms_norm_output, variant, x.dtype, x.dtype)
        narrow, site = variant in ("llama", "t5"), (added, compressor, codes)
        y = _fused(ctx, x, shape, weight, None, *site, centred=False, narrow=narrow)
        if y is not None:
            return y
    wide = x.to(arithmetic)
    rstd = torch.rsqrt(wide.pow(2).mean(ctx.dims, keepdim=True) + added)
    x_hat = wide * rstd
    if variant == "torch" or weight is None:  # others than torch's form have a weight
        y = torch.rms_norm(x, shape, weight, eps)
    else:
        y = _value(variant, x_hat, weight, x.dtype)
    save_compressed(ctx, x_hat.to(x.dtype), compressor, key, rstd, weight)
    ctx.output = partial(_rms_norm_output, variant, x.dtype, y.dtype)
    return y


def _rms_norm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (payload,), (rstd, weight) = saved_payloads(ctx)
    x_hat = decompress(payload, ctx.compressor)
    dtype, grad, x_hat = x_hat.dtype, _wide(grad), _wide(x_hat)
    dx = dw = None
    if weight is not None and ctx.needs_input_grad[1]:
        dw = (grad * x_hat).sum_to_size(weight.shape).to(weight.dtype)
    if ctx.needs_input_grad[0]:
        g = grad if weight is None else grad * _wide(weight)
        projection = (g * x_hat).mean(ctx.dims, keepdim=True)
        dx = torch.addcmul(g, x_hat, projection, value=-1).mul_(rstd).to(dtype)
    return dx, dw


_rms_norm = autograd_function(_rms_norm_forward, _rms_norm_backward, tensors=2, like=RMS_NORM)


def _rms_norm_output(
    variant: str,
    dtype: torch.dtype,
    result: torch.dtype,
    x_hat: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
) -> Tensor:
    x_hat = _wide(x_hat)
    if weight is None or variant == "torch":
        return (x_hat if weight is None else x_hat * weight).to(result)
    return _value(variant, x_hat, weight, dtype)


def _wide(x: Tensor) -> Tensor:
    """In the arithmetic's dtype: float32, or float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()


def _fused(  # noqa: PLR0913 (the norm's own, and the site's)
    ctx: Any,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    compressor: Compressor,
    codes: Codes,
    *,
    centred: bool,
    narrow: bool = False,
) -> Tensor | None:
    """The norm's value, its payload saved by `ctx`; None where the norm runs in several passes.

    One pass serves groups that lie within a row, of a contiguous float32 or 16-bit tensor
    (`norm.fits`). The value then is torch's up to its rounding: sums are added in another order.
    A norm that is not `centred` is an RMS norm, which may make x_hat `narrow` before it multiplies
    by the weight: round it to the dtype of `x`.
    """
    size = math.prod(shape)
    if not norm.fits(x, size, codes[1]):
        return None
    if not all(_usual(x, shape, p) for p in (weight, bias)):
        return None  # torch's to refuse
    y, rstd, *payload = norm.norm_quantize(
        x.detach(), size, weight, bias, eps, centred=centred, narrow=narrow, codes=codes
    )
    packed = Packed(
        dict(zip(("codes", "bounds"), payload, strict=True)), torch.Size([x.numel()]), x.dtype
    )
    rstd = rstd.view(*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
    others = (rstd, weight, bias) if centred else (rstd, weight)
    save_payloads(ctx, [(packed, layout_of(x))], compressor, *others)
    return y


def _usual(x: Tensor, shape: Sequence[int], parameter: Tensor | None) -> bool:
    normalized = x.shape[-len(shape) :]
    if parameter is None:
        return normalized == torch.Size(shape)
    same = normalized == parameter.shape == torch.Size(shape) and parameter.device == x.device
    return same and parameter.dtype in (x.dtype, torch.float32)
