"""Blocks of codes: one abs-max scale a block, and a code book of 2**bits values in [-1, 1]."""

import torch
from torch import Tensor

from memtrain.kernels import cpu
from memtrain.kernels.codebook import codes as books
from memtrain.kernels.codebook.codebooks import MAPS, codebook, count_above, midpoints, qmap, table
from memtrain.kernels.codebook.codes import MAX_TRITON_BLOCK, Book
from memtrain.kernels.dispatch import choose, register
from memtrain.kernels.packing import bits as bitpack

__all__ = ["MAPS", "codebook", "count_above", "midpoints", "qmap", "table"]


def quantize(
    x: Tensor, *, map: str, bits: int, signed: bool, block_size: int, seed: int | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise `x` to the values of a code book, with one abs-max scale per block.

    `x` is flattened and padded with zeros to whole blocks. An element's code is the number of
    midpoints with `x > midpoint * scale`: nearest, ties to the lower index; with a seed it is one
    of the two neighbouring values', unbiased. A block of zeros gets scale 0 and codes 0, which
    decode to 0. NaN or Inf makes its block's scale NaN or Inf and all codes of that block 0: it
    decodes to NaN, or to the map's lowest value times Inf (-Inf where it is negative, NaN where it
    is 0, else Inf). No other block notices.

    Args:
        x: Any shape and device; float32, or any float type (converted).
        map: A name of `maps.codebook`.
        bits: 2 to 8.
        signed: Which form of the map.
        block_size: Elements per scale, a multiple of 8.
        seed: 64 bits for stochastic rounding, see `book.encode`; None rounds to the nearest.

    Returns:
        codes: uint8, [n_blocks, block_size * bits / 8], packed as `bits.pack` says.
        scale: float32, [n_blocks].

    Memory:
        bits / 8 + 4 / block_size bytes per element, plus the padding of the last block.

    Example:
        >>> codes, scale = quantize(
        ...     torch.ones(256), map="DE", bits=4, signed=True, block_size=128)
        >>> codes.shape, scale
        (torch.Size([2, 64]), tensor([1., 1.]))

    Reference:
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507, section 2.2.
    """
    return _QUANTIZE(x, map, bits, signed, block_size, seed)


def dequantize(
    codes: Tensor, scale: Tensor, *, map: str, bits: int, signed: bool, numel: int
) -> Tensor:
    """The inverse of `quantize`: `value[code] * scale`.

    Args:
        codes: uint8, [n_blocks, block_size * bits / 8].
        scale: float32, [n_blocks].
        map: As in `quantize`.
        bits: As in `quantize`.
        signed: As in `quantize`.
        numel: Elements without the padding.

    Returns:
        float32, [numel].

    Example:
        >>> codes, scale = quantize(
        ...     torch.tensor([0.5, 2.0]), map="Linear", bits=4, signed=False, block_size=128)
        >>> dequantize(codes, scale, map="Linear", bits=4, signed=False, numel=2)
        tensor([0.5000, 2.0000])
    """
    return _DEQUANTIZE(codes, scale, map, bits, signed, numel)


def quantize_reference(
    x: Tensor, map: str, bits: int, signed: bool, block_size: int, seed: int | None = None
) -> tuple[Tensor, Tensor]:
    """`quantize` in pure torch."""
    blocks = bitpack.blocks(x.float(), block_size)
    scale = blocks.abs().amax(1) if blocks.numel() else blocks.new_zeros(blocks.shape[0])
    return books.pack(blocks, scale.unsqueeze(1), Book(map, bits, signed), seed), scale


def dequantize_reference(
    codes: Tensor, scale: Tensor, map: str, bits: int, signed: bool, numel: int
) -> Tensor:
    """`dequantize` in pure torch."""
    values = qmap(map, bits, signed, codes.device)[bitpack.unpack(codes, bits)]
    return (values * scale.unsqueeze(1)).view(-1)[:numel]


def _quantize(
    x: Tensor, map: str, bits: int, signed: bool, block_size: int, seed: int | None = None
) -> tuple[Tensor, Tensor]:
    backend = choose(x)
    if backend == "reference" or (backend == "triton" and block_size > MAX_TRITON_BLOCK):
        return quantize_reference(x, map, bits, signed, block_size, seed)
    n_blocks = -(-x.numel() // block_size)
    codes = torch.empty(n_blocks, block_size * bits // 8, dtype=torch.uint8, device=x.device)
    scale = torch.empty(n_blocks, device=x.device)
    x = x.contiguous()
    if seed is not None or not _has_fast_kernel(backend, bits, block_size):
        books.quantize(x, Book(map, bits, signed), seed, backend, codes, scale)
        return codes, scale
    tables = table(map, signed, x.device)
    if backend == "cpu":
        cpu.call("mt_codebook_quantize", x.float(), tables, codes, scale, x.numel(), block_size)
    else:
        from memtrain.kernels.codebook import block_triton

        block_triton.quantize(x, tables, codes, scale)
    return codes, scale


def _dequantize(
    codes: Tensor, scale: Tensor, map: str, bits: int, signed: bool, numel: int
) -> Tensor:
    backend = choose(codes)
    block_size = codes.shape[1] * 8 // bits
    if backend == "reference" or (backend == "triton" and block_size > MAX_TRITON_BLOCK):
        return dequantize_reference(codes, scale, map, bits, signed, numel)
    out = torch.empty(numel, device=codes.device)
    codes, scale = codes.contiguous(), scale.contiguous()
    if not _has_fast_kernel(backend, bits, block_size):
        books.dequantize(codes, Book(map, bits, signed), backend, out, scale)
        return out
    tables = table(map, signed, codes.device)
    if backend == "cpu":
        cpu.call("mt_codebook_dequantize", codes, scale, tables, out, numel, block_size)
    else:
        from memtrain.kernels.codebook import block_triton

        block_triton.dequantize(codes, scale, tables, out)
    return out


def _has_fast_kernel(backend: str, bits: int, block_size: int) -> bool:
    """Whether the kernels that know only 16 values serve these blocks."""
    fits = block_size % 32 == 0 if backend == "cpu" else block_size & (block_size - 1) == 0
    return bits == 4 and fits


def _quantize_fake(
    x: Tensor, map: str, bits: int, signed: bool, block_size: int, seed: int | None = None
) -> tuple[Tensor, Tensor]:
    n_blocks = (x.numel() + block_size - 1) // block_size
    codes = x.new_empty(n_blocks, block_size * bits // 8, dtype=torch.uint8)
    return codes, x.new_empty(n_blocks, dtype=torch.float32)


def _dequantize_fake(
    codes: Tensor, scale: Tensor, map: str, bits: int, signed: bool, numel: int
) -> Tensor:
    return scale.new_empty(numel)


_QUANTIZE = register(
    "codebook_quantize(Tensor x, str map, int bits, bool signed, SymInt block_size, "
    "int? seed=None) -> (Tensor, Tensor)",
    _quantize,
    _quantize_fake,
)
_DEQUANTIZE = register(
    "codebook_dequantize(Tensor codes, Tensor scale, str map, int bits, bool signed, "
    "SymInt numel) -> Tensor",
    _dequantize,
    _dequantize_fake,
)
