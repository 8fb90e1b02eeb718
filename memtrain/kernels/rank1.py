"""Rank-1 normalisation: an element's scale is the least of the maxima of its dimensions."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from memtrain.kernels import bits as bitpack
from memtrain.kernels import codebook, cpu
from memtrain.kernels.dispatch import choose, register

BLOCK = 128  # of the nibble layout; rank-1 has no scale per block
_TINY = torch.finfo(torch.float32).tiny


def maxima(x: Tensor) -> Tensor:
    """The largest magnitude at each index of each dimension, over all other dimensions.

    Args:
        x: At least 1 dimension, any float type. NaN counts as the largest value.

    Returns:
        float32, [sum(x.shape)]: those of dimension 0, then of dimension 1, and so on.

    Example:
        >>> maxima(torch.tensor([[1.0, -2.0], [3.0, 0.0]]))
        tensor([2., 3., 3., 2.])
    """
    x = x.float().abs()
    if not x.numel():
        return x.new_zeros(sum(x.shape))
    dims = range(x.dim())
    return torch.cat([x.amax([k for k in dims if k != d]) if x.dim() > 1 else x for d in dims])


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 where that says nothing: scale 0, subnormal, Inf or NaN."""
    usable = (scale >= _TINY) & scale.isfinite()
    return torch.where(usable, 1 / scale, 0.0)


def columns(scale: Tensor, shape: Sequence[int], *, inverted: bool = False) -> Tensor:
    """The maxima of dimensions 1 and up, spread over the flattened `shape[1:]`.

    Args:
        scale: float32, [sum(shape)], as `maxima` gives.
        shape: The tensor's shape, at least 2 dimensions.
        inverted: Give the largest reciprocal instead of the least maximum.

    Returns:
        float32, [prod(shape[1:])]: the least over the dimensions; NaN only where all are NaN.

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


def quantize(x: Tensor, *, map: str, bits: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantise `x` by a code book, each element scaled by the least maximum of its dimensions.

    The scale is `min over d of maxima_d`; the normalised value is `x * max over d of 1/maxima_d`
    (a maximum that is 0, subnormal or not finite counts as reciprocal 0), and its code is the
    number of midpoints below it: nearest, ties to the lower index. An element all of whose
    dimensions hold a NaN or Inf decodes to NaN or Inf; every other element is scaled by a finite
    maximum and stays within its usual error.

    Args:
        x: At least 2 dimensions, any float type, any device.
        map: A name of `codebook.MAPS`.
        bits: 2 to 8.
        signed: Which form of the map.

    Returns:
        codes: uint8, [n_blocks, 128 * bits / 8], `x` flattened into blocks as `bits.pack` says.
        scale: float32, [sum(x.shape)], see `maxima`.

    Raises:
        ValueError: If `x` has fewer than 2 dimensions.

    Memory:
        bits / 8 + 4 * sum(shape) / numel bytes per element (0.002 of scales at 4096 x 4096).

    Example:
        >>> codes, scale = quantize(torch.ones(2, 3), map="Linear", bits=4, signed=False)
        >>> codes.shape, scale
        (torch.Size([1, 64]), tensor([1., 1., 1., 1., 1.]))

    Reference:
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507, section 4.2
        and appendix G.
    """
    if x.dim() < 2:
        raise ValueError(f"rank-1 needs at least 2 dimensions, got shape {tuple(x.shape)}")
    return _QUANTIZE(x, map, bits, signed)


def dequantize(
    codes: Tensor, scale: Tensor, *, map: str, bits: int, signed: bool, shape: Sequence[int]
) -> Tensor:
    """The inverse of `quantize`: `value[code] * min over d of maxima_d`.

    Args:
        codes: uint8, [n_blocks, 128 * bits / 8].
        scale: float32, [sum(shape)].
        map: As in `quantize`.
        bits: As in `quantize`.
        signed: As in `quantize`.
        shape: The tensor's shape.

    Returns:
        float32 of that shape.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
        >>> codes, scale = quantize(x, map="Linear", bits=4, signed=False)
        >>> dequantize(codes, scale, map="Linear", bits=4, signed=False, shape=(2, 2))
        tensor([[1., 2.],
                [2., 4.]])
    """
    return _DEQUANTIZE(codes, scale, map, bits, signed, list(shape))


def quantize_reference(x: Tensor, map: str, bits: int, signed: bool) -> tuple[Tensor, Tensor]:
    """`quantize` in pure torch."""
    scale = maxima(x)
    rows, cols = x.shape[0], math.prod(x.shape[1:])
    inv = torch.maximum(
        inverse(scale[:rows]).unsqueeze(1), columns(scale, x.shape, inverted=True).unsqueeze(0)
    )
    blocks = bitpack.blocks(x.float().reshape(rows, cols) * inv, BLOCK)
    codes = codebook.count_above(blocks, codebook.midpoints(map, bits, signed, x.device))
    return bitpack.pack(codes, bits), scale


def dequantize_reference(
    codes: Tensor, scale: Tensor, map: str, bits: int, signed: bool, shape: Sequence[int]
) -> Tensor:
    """`dequantize` in pure torch."""
    rows, cols = shape[0], math.prod(shape[1:])
    values = codebook.qmap(map, bits, signed, codes.device)[bitpack.unpack(codes, bits)]
    values = values.view(-1)[: rows * cols].view(rows, cols)
    least = torch.fmin(scale[:rows].unsqueeze(1), columns(scale, shape).unsqueeze(0))
    return (values * least).view(tuple(shape))


def _quantize(x: Tensor, map: str, bits: int, signed: bool) -> tuple[Tensor, Tensor]:
    backend = choose(x)
    if bits != 4 or backend == "reference":
        return quantize_reference(x, map, bits, signed)
    scale = maxima(x)
    rows, cols = x.shape[0], math.prod(x.shape[1:])
    row_inv, col_inv = inverse(scale[:rows]), columns(scale, x.shape, inverted=True)
    codes = _new_codes(x, bits)
    tables = codebook.table(map, signed, x.device)
    if backend == "cpu":
        x = x.float().contiguous()
        cpu.call("mt_rank1_quantize", x, row_inv, col_inv, tables, codes, rows, cols)
    else:
        from memtrain.kernels import rank1_triton

        rank1_triton.quantize(x.contiguous(), row_inv, col_inv, tables, codes)
    return codes, scale


def _dequantize(
    codes: Tensor, scale: Tensor, map: str, bits: int, signed: bool, shape: Sequence[int]
) -> Tensor:
    backend = choose(codes)
    if bits != 4 or backend == "reference":
        return dequantize_reference(codes, scale, map, bits, signed, shape)
    out = torch.empty(tuple(shape), device=codes.device)
    rows, cols = shape[0], math.prod(shape[1:])
    row, col = scale[:rows].contiguous(), columns(scale, shape)
    tables = codebook.table(map, signed, codes.device)
    codes = codes.contiguous()
    if backend == "cpu":
        cpu.call("mt_rank1_dequantize", codes, row, col, tables, out, rows, cols)
    else:
        from memtrain.kernels import rank1_triton

        rank1_triton.dequantize(codes, row, col, tables, out)
    return out


def _new_codes(x: Tensor, bits: int) -> Tensor:
    n_blocks = (x.numel() + BLOCK - 1) // BLOCK
    return x.new_empty(n_blocks, BLOCK * bits // 8, dtype=torch.uint8)


def _quantize_fake(x: Tensor, map: str, bits: int, signed: bool) -> tuple[Tensor, Tensor]:
    return _new_codes(x, bits), x.new_empty(sum(x.shape), dtype=torch.float32)


def _dequantize_fake(
    codes: Tensor, scale: Tensor, map: str, bits: int, signed: bool, shape: Sequence[int]
) -> Tensor:
    return scale.new_empty(tuple(shape))


_QUANTIZE = register(
    "rank1_quantize(Tensor x, str map, int bits, bool signed) -> (Tensor, Tensor)",
    _quantize,
    _quantize_fake,
)
_DEQUANTIZE = register(
    "rank1_dequantize(Tensor codes, Tensor scale, str map, int bits, bool signed, "
    "SymInt[] shape) -> Tensor",
    _dequantize,
    _dequantize_fake,
)
