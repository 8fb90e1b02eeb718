"""Layer and RMS norms whose value and payload are made in one pass, where a kernel can."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain.activations.ops.context import keep_packed
from memtrain.activations.saved.flatten import layout_of
from memtrain.compressors import Compressor, Key, Packed
from memtrain.kernels.norm import norm


def fused(  # noqa: PLR0913 (the norm's own, and the site's)
    ctx: Any,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    compressor: Compressor,
    key: Key,
    *,
    centred: bool,
    scale: Tensor | None = None,
    narrow: bool = False,
) -> Tensor | None:
    """The norm's value, its payload kept in `ctx`; None where the norm runs in several passes.

    One pass serves groups that lie within a row, of a contiguous float32 or 16-bit tensor
    (`norm.fits`). The value then is torch's up to its rounding: sums are added in another
    order.

    Args:
        ctx: The Function's context; `kept` gives x_hat, and (rstd, weight[, bias]).
        x: The norm's input.
        shape: The dimensions that are normalised together.
        weight: Kept for the backward.
        bias: Kept for the backward, where `centred`.
        eps: Added to the mean square.
        compressor: For x_hat.
        key: Feeds its random bits.
        centred: Layer norm; else RMS norm.
        scale: What x_hat is multiplied by, where it is not the weight.
        narrow: Round x_hat to the dtype of `x` first.
    """
    size = math.prod(shape)
    codes = compressor.group_codes(key)
    if codes is None or not norm.fits(x, size, codes.group_size):
        return None
    if not all(_usual(x, shape, p) for p in (weight, bias)):
        return None  # torch's to refuse
    by = weight if scale is None else scale
    y, rstd, *payload = norm.norm_quantize(
        x.detach(), size, by, bias, eps, centred=centred, narrow=narrow, codes=codes
    )
    packed = Packed(
        dict(zip(("codes", "bounds"), payload, strict=True)), torch.Size([x.numel()]), x.dtype
    )
    rstd = rstd.view(*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
    others = (rstd, weight, bias) if centred else (rstd, weight)
    keep_packed(ctx, packed, layout_of(x), compressor, *others)
    return y


def _usual(x: Tensor, shape: Sequence[int], parameter: Tensor | None) -> bool:
    own = x.shape[-len(shape) :]
    if parameter is None:
        return own == torch.Size(shape)
    same = own == parameter.shape == torch.Size(shape) and parameter.device == x.device
    return same and parameter.dtype in (x.dtype, torch.float32)
