"""Codes of a matrix whose rows and columns have scales: what rank-1 and its kin are made of."""

import torch
from torch import Tensor

from memtrain.kernels import cpu
from memtrain.kernels.codebook import codes as books
from memtrain.kernels.codebook.codebooks import table
from memtrain.kernels.codebook.codes import Book, Sides
from memtrain.kernels.dispatch import choose, register
from memtrain.kernels.packing import bits as bitpack

BLOCK = 128  # of the layout of codes; there is no scale per block
_TINY = torch.finfo(torch.float32).tiny


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 where that says nothing: scale 0, subnormal, Inf or NaN."""
    usable = (scale >= _TINY) & (scale < torch.inf)
    return (1 / scale).masked_fill(~usable, 0.0)


def quantize(x: Tensor, sides: Sides, book: Book, seed: int | None = None) -> Tensor:
    """The codes of `x[i, j] * max(row[i], col[j])`.

    Args:
        x: Any float type; `len(row) * len(col)` elements in row-major order, of any shape.
        sides: The reciprocals of the scales (`inverse`), 0 where a side has none.
        book: What codes mean.
        seed: 64 bits for stochastic rounding (see `book.encode`); None rounds to the nearest,
            ties to the lower index.

    Returns:
        uint8, [n_blocks, 128 * bits / 8], `x` flattened into blocks as `bits.pack` says; what is
        missing in the last one has the code of 0.

    Memory:
        bits / 8 bytes per element.

    Example:
        >>> sides = Sides(torch.tensor([1.0, 0.5]), torch.zeros(3))
        >>> quantize(torch.ones(2, 3), sides, Book("Linear", 8, False))[0, :6].tolist()
        [255, 255, 255, 127, 127, 127]
    """
    return _QUANTIZE(x, *sides, *book, seed)


def dequantize(codes: Tensor, sides: Sides, book: Book) -> Tensor:
    """The values of codes, times the lesser of their row's and their column's scale.

    Args:
        codes: uint8, [n_blocks, 128 * bits / 8].
        sides: Scales of rows and columns, Inf where a side has none; an element of two scales of
            which one is NaN or Inf takes the other.
        book: What codes mean.

    Returns:
        float32, [rows, cols].

    Example:
        >>> codes = torch.full((1, 128), 255, dtype=torch.uint8)
        >>> sides = Sides(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 3.0]))
        >>> dequantize(codes, sides, Book("Linear", 8, False))
        tensor([[1., 1.],
                [2., 3.]])
    """
    return _DEQUANTIZE(codes, *sides, *book)


def quantize_reference(x: Tensor, sides: Sides, book: Book, seed: int | None = None) -> Tensor:
    """`quantize` in pure torch."""
    scaled = x.float().reshape(len(sides.row), len(sides.col))
    scaled = scaled * torch.maximum(sides.row.unsqueeze(1), sides.col)
    return books.pack(bitpack.blocks(scaled, BLOCK), x.new_ones(1, 1).float(), book, seed)


def dequantize_reference(codes: Tensor, sides: Sides, book: Book) -> Tensor:
    """`dequantize` in pure torch."""
    least = torch.fmin(sides.row.unsqueeze(1), sides.col)
    values = book.values(codes.device)[bitpack.unpack(codes, book.bits)]
    return values.view(-1)[: least.numel()].view(least.shape) * least


def _quantize(
    x: Tensor, row: Tensor, col: Tensor, map: str, bits: int, signed: bool, seed: int | None
) -> Tensor:
    backend, book, sides = choose(x), Book(map, bits, signed), Sides(row, col)
    if backend == "reference":
        return quantize_reference(x, sides, book, seed)
    codes = _new_codes(x, bits)
    x, sides = x.contiguous(), Sides(row.contiguous(), col.contiguous())
    if bits != 4 or seed is not None:
        books.quantize(x, book, seed, backend, codes, sides)
        return codes
    tables = table(map, signed, x.device)
    if backend == "cpu":
        arguments = (*sides, tables, codes, len(row), len(col))
        cpu.call("mt_rank1_quantize", x.float(), *arguments)
    else:
        from memtrain.kernels.codebook import rank1_triton

        rank1_triton.quantize(x, *sides, tables, codes)
    return codes


def _dequantize(
    codes: Tensor, row: Tensor, col: Tensor, map: str, bits: int, signed: bool
) -> Tensor:
    backend, book, sides = choose(codes), Book(map, bits, signed), Sides(row, col)
    if backend == "reference":
        return dequantize_reference(codes, sides, book)
    out = torch.empty(len(row), len(col), device=codes.device)
    codes, sides = codes.contiguous(), Sides(row.contiguous(), col.contiguous())
    if bits != 4:
        books.dequantize(codes, book, backend, out, sides)
        return out
    tables = table(map, signed, codes.device)
    if backend == "cpu":
        cpu.call("mt_rank1_dequantize", codes, *sides, tables, out, len(row), len(col))
    else:
        from memtrain.kernels.codebook import rank1_triton

        rank1_triton.dequantize(codes, *sides, tables, out)
    return out


def _new_codes(x: Tensor, bits: int) -> Tensor:
    n_blocks = (x.numel() + BLOCK - 1) // BLOCK
    return x.new_empty(n_blocks, BLOCK * bits // 8, dtype=torch.uint8)


def _quantize_fake(
    x: Tensor, row: Tensor, col: Tensor, map: str, bits: int, signed: bool, seed: int | None
) -> Tensor:
    return _new_codes(x, bits)


def _dequantize_fake(
    codes: Tensor, row: Tensor, col: Tensor, map: str, bits: int, signed: bool
) -> Tensor:
    return row.new_empty(row.shape[0], col.shape[0])


_QUANTIZE = register(
    "sides_quantize(Tensor x, Tensor row, Tensor col, str map, int bits, bool signed, "
    "int? seed) -> Tensor",
    _quantize,
    _quantize_fake,
)
_DEQUANTIZE = register(
    "sides_dequantize(Tensor codes, Tensor row, Tensor col, str map, int bits, bool signed) "
    "-> Tensor",
    _dequantize,
    _dequantize_fake,
)
