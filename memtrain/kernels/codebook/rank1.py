"""Rank-1 normalisation: an element's scale is the smallest of the maxima of its dimensions.

A tensor is viewed as a matrix of its first dimension and all others.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from memtrain.kernels.codebook.quantize import dequantize_blocks, inverse, quantize_scaled
from memtrain.kernels.codebook.values import Codebook


def maxima(x: Tensor) -> Tensor:
    """Return the largest magnitude at each index of each dimension, over all other dimensions.

    The result has the maxima of dimension 0, then of dimension 1, and so on: float32
    [sum(x.shape)]. NaN counts as the largest value.
    """
    x = x.float().abs()
    if not x.numel():
        return x.new_zeros(sum(x.shape))
    dims = range(x.dim())
    return torch.cat([x.amax([k for k in dims if k != d]) if x.dim() > 1 else x for d in dims])


def columns(scale: Tensor, shape: Sequence[int], *, inverted: bool = False) -> Tensor:
    """Return the maxima of dimensions 1 and up, expanded to the flattened `shape[1:]`.

    Where dimensions differ, the smallest maximum counts (NaN only if all are NaN), or with
    `inverted` the largest reciprocal.

    Example:
        >>> columns(torch.tensor([9.0, 1.0, 3.0, 2.0, 5.0]), (1, 2, 2))
        tensor([1., 1., 2., 3.])
    """
    parts = list(scale.split(list(shape)))[1:]
    out = None
    for d, part in enumerate(parts):
        part = inverse(part) if inverted else part
        part = part.view([-1 if k == d else 1 for k in range(len(parts))])
        out = part if out is None else (torch.maximum if inverted else torch.fmin)(out, part)
    return out.expand(tuple(shape[1:])).reshape(-1) if out is not None else scale[:0]


def quantize(x: Tensor, book: Codebook, *, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantise `x` by a codebook, each element scaled by the smallest maximum of its dimensions.

    The scale is `min over d of maxima_d`, and the normalised value `x * max over d of 1/maxima_d`
    (the reciprocal is 0 for maxima that are 0, subnormal or not finite). The code is the number of
    midpoints below it: nearest, ties to the lower index; with a seed, rounding is stochastic. An
    element decodes to NaN or Inf only if each of its dimensions contains a NaN or Inf. Codes are
    packed in blocks of 128, and the result includes `maxima`.

    Example:
        >>> codes, scale = quantize(torch.ones(2, 3), Codebook("Linear", 4, signed=False))
        >>> codes.shape, scale
        (torch.Size([1, 64]), tensor([1., 1., 1., 1., 1.]))

    Reference:
        Li et al., arXiv:2309.01507, section 4.2 and appendix G.
    """
    if x.dim() < 2:
        raise ValueError(f"rank-1 needs at least 2 dimensions, got shape {tuple(x.shape)}")
    scale = maxima(x)
    return encode(x, scale, book, seed), scale


def encode(x: Tensor, scale: Tensor, book: Codebook, seed: int | None = None) -> Tensor:
    """Return the codes of `quantize` for known maxima, such as those of a whole tensor."""
    rows = inverse(scale[: x.shape[0]]).unsqueeze(1)
    scaled = torch.maximum(rows, columns(scale, x.shape, inverted=True))
    return quantize_scaled(scaled.mul_(x.detach().float().reshape(scaled.shape)), book, seed)


def dequantize(codes: Tensor, scale: Tensor, book: Codebook, *, shape: Sequence[int]) -> Tensor:
    """Invert `quantize` for a tensor's shape: `value[code] * min over d of maxima_d`, float32."""
    least = torch.fmin(scale[: shape[0]].unsqueeze(1), columns(scale, shape))
    values = dequantize_blocks(codes, None, book, numel=least.numel())
    return least.mul_(values.view(least.shape)).view(tuple(shape))
