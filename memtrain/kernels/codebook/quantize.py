"""Quantisation by a codebook of 2**bits values in [-1, 1]: contract, reference, dispatch.

An element's scale is its block's element of largest magnitude (`quantize_blocks`), or 1 for values
that are scaled already (`quantize_scaled`, for rank-1). Codes are packed in blocks (layout:
`packing.bits`).

Reference:
    Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507.
"""

from functools import cache

import torch
from torch import Tensor

from memtrain.kernels import cpu
from memtrain.kernels.codebook.values import Codebook
from memtrain.kernels.dispatch import choose, contiguous_nbytes, copies, readable, register
from memtrain.kernels.packing import bits as bitpack
from memtrain.kernels.random.philox import signed, uniform_blocks

SCALED_BLOCK = 128  # block of packed codes without a scale
MAX_TRITON_BLOCK = 16384  # a program keeps a whole block
_TINY = torch.finfo(torch.float32).tiny


def quantize_blocks(
    x: Tensor, book: Codebook, *, block_size: int, seed: int | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise `x` to the values of a codebook, with one scale per block.

    `x` is flattened and padded with zeros to whole blocks. With a signed codebook, a block's scale
    is its first element of largest magnitude, including the sign: this element is exact, and the
    codes of `-x` decode to the negative of those of `x`. With an unsigned codebook, the scale is
    the magnitude. A code is the number of midpoints with `x / scale > midpoint`: nearest, ties to
    the lower index. With a seed, codes are those of one of the two neighbouring values, unbiased.
    Codes are packed as by `bits.pack`, and scales are float32.

    A block of zeros has scale 0 and codes 0, and decodes to 0. With a NaN or Inf, the block's scale
    is NaN or Inf and its codes are 0: the block decodes to NaN, or to the codebook's lowest value
    times Inf. Other blocks do not change.

    Example:
        >>> codes, scale = quantize_blocks(torch.ones(256), Codebook("DE"), block_size=128)
        >>> codes.shape, scale
        (torch.Size([2, 64]), tensor([1., 1.]))

    Reference:
        Section 2.2 (without signed scales: a negative largest element decodes to 0.8875 of it).
    """
    return _quantize_op(x, *book, block_size, None if seed is None else signed(seed))


def dequantize_blocks(codes: Tensor, scale: Tensor | None, book: Codebook, *, numel: int) -> Tensor:
    """Invert `quantize_blocks` for `numel` elements: `value[code] * scale`, float32 [numel].

    Without scales, return the values of the codes: the inverse of `quantize_scaled`.
    """
    return _dequantize_op(codes, scale, *book, numel)


def quantize_scaled(x: Tensor, book: Codebook, seed: int | None = None) -> Tensor:
    """Return the codes of values that are divided by their scales already, in blocks of 128.

    The last block is padded with the code of 0.
    """
    return _quantize_op(x, *book, None, None if seed is None else signed(seed))[0]


def inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale, and 0 for scales that are 0, subnormal, Inf or NaN."""
    usable = (scale >= _TINY) & (scale < torch.inf)
    return (1 / scale).masked_fill(~usable, 0.0)


def encode(x: Tensor, scale: Tensor, book: Codebook, seed: int | None = None) -> Tensor:
    """Return the codes of `x / scale`, int64, before packing.

    Nearest: the number of midpoints with `x > midpoint * scale`, ties to the lower index.
    Stochastic: with the neighbouring values `lo` and `hi`, `hi` with probability `(x / scale - lo)
    / (hi - lo)`, within 2**-16; beyond the lowest and highest value, that value. NaN has code 0, as
    have elements whose scale is Inf or NaN (stochastic: or 0). If the scale is negative, `x` and
    the scale are negated first. `x` is [n_blocks, block_size] and `scale` [n_blocks, 1] or [1, 1],
    both float32.

    Example:
        >>> x = torch.tensor([[0.25, 0.5, 0.9, 1.0]])
        >>> encode(x, torch.ones(1, 1), Codebook("Linear", 2, False))
        tensor([[0, 1, 3, 3]])

    Reference:
        Appendix E.3.
    """
    x, scale = torch.where(scale < 0, -x, x), scale.abs()
    if seed is None:
        defined = scale + (scale - scale)  # NaN in place of Inf: no midpoint is below
        bounds = book.midpoints(x.device) * defined
        bounds = bounds[0] if scale.numel() == 1 else bounds
        nan = x.isnan() | bounds.isnan().any(-1, keepdim=True)
        return torch.searchsorted(bounds, x.contiguous()).masked_fill(nan, 0)
    values = book.values(x.device)
    usable = (scale > 0) & scale.isfinite()
    inner = (values[1:-1] * torch.where(usable, scale, 1.0)).expand(x.shape[0], -1)
    low = torch.searchsorted(inner.contiguous(), x.contiguous(), right=True)
    u = uniform_blocks(x.shape[0], x.shape[1], seed, x.device)
    bound = (values[low] + u * (values[low + 1] - values[low])) * scale
    return (low + (x > bound)).masked_fill(x.isnan() | ~usable, 0)


def encode_drawn(x: Tensor, scale: Tensor, book: Codebook, u: Tensor) -> Tensor:
    """Return the codes of `x / scale`, rounded up or down by comparison with `u` in (0, 1).

    An element is rounded up if its distance from the lower neighbouring value exceeds the fraction
    `u` of the gap. NaN and elements without a usable scale have code 0. Shapes are those of
    `encode`.

    Example:
        >>> x, u = torch.tensor([[0.3, 0.3]]), torch.tensor([[0.1, 0.9]])
        >>> encode_drawn(x, torch.ones(1, 1), Codebook("Linear", 2, False), u)
        tensor([[1, 0]])
    """
    x, scale = torch.where(scale < 0, -x, x), scale.abs()
    values = book.values(x.device)
    low = torch.searchsorted(values[1:-1] * (scale + (scale - scale)), x.contiguous())
    low = low.masked_fill(x.isnan() | ~scale.isfinite(), 0)
    bound = (values[low] + u * (values[low + 1] - values[low])) * scale
    return low + (x > bound)


def largest(blocks: Tensor, *, signed: bool) -> Tensor:
    """Return each block's first element of largest magnitude, with its sign or without, [n_blocks].

    The result is +0 for a block of zeros, and NaN if the block contains NaN.
    """
    if not blocks.numel():
        return blocks.new_zeros(blocks.shape[0])
    top, at = blocks.abs().max(1)
    if not signed:
        return top
    return torch.where(blocks.gather(1, at.unsqueeze(1)).squeeze(1) < 0, -top, top)


def quantize_blocks_reference(
    x: Tensor, book: Codebook, block_size: int, seed: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `quantize_blocks` in plain torch: the definition."""
    blocks = bitpack.blocks(x.float(), block_size)
    scale = largest(blocks, signed=book.signed)
    return bitpack.pack(encode(blocks, scale.unsqueeze(1), book, seed), book.bits), scale


def dequantize_blocks_reference(
    codes: Tensor, scale: Tensor | None, book: Codebook, numel: int
) -> Tensor:
    """Compute `dequantize_blocks` in plain torch: the definition."""
    values = book.values(codes.device)[bitpack.unpack(codes, book.bits)]
    return (values if scale is None else values * scale.unsqueeze(1)).view(-1)[:numel]


def quantize_scaled_reference(x: Tensor, book: Codebook, seed: int | None = None) -> Tensor:
    """Compute `quantize_scaled` in plain torch: the definition."""
    blocks = bitpack.blocks(x.float(), SCALED_BLOCK)
    return bitpack.pack(encode(blocks, blocks.new_ones(1, 1), book, seed), book.bits)


@cache
def inner_bounds(book: Codebook, device: torch.device, *, stochastic: bool) -> Tensor:
    """Return the table that kernels compare with, float32 [2**bits - 1].

    To nearest: the midpoints. Stochastic: the inner values, and a NaN that no element exceeds.
    """
    if not stochastic:
        return book.midpoints(device)
    values = book.values(torch.device("cpu"))
    end = values.new_tensor([torch.nan])
    return torch.cat([values[1:-1], end]).to(device)  # one copy: other streams read it, too


def _backend(x: Tensor, block_size: int) -> str:
    chosen = choose(x)
    too_long = chosen == "triton" and block_size > MAX_TRITON_BLOCK
    return "reference" if too_long else chosen


def _empty(
    x: Tensor, name: str, bits: int, signed: bool, block_size: int | None, seed: int | None
) -> tuple[Tensor, Tensor]:
    block = SCALED_BLOCK if block_size is None else block_size
    n_blocks = (x.numel() + block - 1) // block
    codes = x.new_empty(n_blocks, block * bits // 8, dtype=torch.uint8)
    return codes, x.new_empty(0 if block_size is None else n_blocks, dtype=torch.float32)


def _quantize(
    x: Tensor, name: str, bits: int, signed: bool, block_size: int | None, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Return codes and the scales of blocks; without a block size no scales, which are 1."""
    book, block = Codebook(name, bits, signed), SCALED_BLOCK if block_size is None else block_size
    chosen = _backend(x, block)
    if chosen == "reference" and block_size is not None:
        return quantize_blocks_reference(x, book, block_size, seed)
    codes, scale = _empty(x, *book, block_size, seed)
    if chosen == "reference":
        return quantize_scaled_reference(x, book, seed), scale
    scale_out = None if block_size is None else scale
    if chosen == "triton":
        from memtrain.kernels.codebook import quantize_triton

        quantize_triton.quantize(x.contiguous(), book, seed, codes, scale_out)
        return codes, scale
    tables = inner_bounds(book, x.device, stochastic=seed is not None), book.values(x.device)
    sizes = (x.numel(), block, bits, signed, int(seed is not None), seed or 0)
    cpu.call("mt_codebook_quantize", readable(x, torch.float32), *tables, codes, scale_out, *sizes)
    return codes, scale


def _dequantize(
    codes: Tensor, scale: Tensor | None, name: str, bits: int, signed: bool, numel: int
) -> Tensor:
    book, block_size = Codebook(name, bits, signed), codes.shape[1] * 8 // bits
    chosen = _backend(codes, block_size)
    if chosen == "reference":
        return dequantize_blocks_reference(codes, scale, book, numel)
    out = codes.new_empty(numel, dtype=torch.float32)
    codes, scale = codes.contiguous(), None if scale is None else scale.contiguous()
    if chosen == "triton":
        from memtrain.kernels.codebook import quantize_triton

        quantize_triton.dequantize(codes, book, out, scale)
    else:
        values = book.values(codes.device)
        sizes = (numel, block_size, bits, 0, 0, 0)
        cpu.call("mt_codebook_dequantize", out, None, values, codes, scale, *sizes)
    return out


_quantize_op = register(
    "codebook_quantize(Tensor x, str name, int bits, bool signed, SymInt? block_size, int? seed)"
    " -> (Tensor, Tensor)",
    _quantize,
    _empty,
    inside=lambda x, *options: copies(x, torch.float32),
    inside_cuda=lambda x, *options: contiguous_nbytes(x),
)
_dequantize_op = register(
    "codebook_dequantize(Tensor codes, Tensor? scale, str name, int bits, bool signed, "
    "SymInt numel) -> Tensor",
    _dequantize,
    lambda codes, scale, name, bits, signed, numel: codes.new_empty(numel, dtype=torch.float32),
)
