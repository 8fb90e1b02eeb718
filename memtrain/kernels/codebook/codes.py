"""Codes of a code book at 2 to 8 bits, nearest or stochastic: what `codebook` and `rank1` share."""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from memtrain.kernels import cpu
from memtrain.kernels.codebook.codebooks import count_above, midpoints, qmap
from memtrain.kernels.packing import bits as bitpack
from memtrain.kernels.random.philox import uniform_blocks

MAX_TRITON_BLOCK = 16384  # a program holds a whole block


class Book(NamedTuple):
    """What codes mean: a map's name, bits per code, and whether there are negative values."""

    map: str
    bits: int
    signed: bool

    def values(self, device: torch.device) -> Tensor:
        """float32 [2**bits], ascending."""
        return qmap(self.map, self.bits, self.signed, device)


class Sides(NamedTuple):
    """A tensor seen as [rows, cols]: a number for each row and one for each column, float32."""

    row: Tensor
    col: Tensor


def encode(x: Tensor, scale: Tensor, book: Book, seed: int | None = None) -> Tensor:
    """The codes of `x / scale`, before they are packed.

    To the nearest: the number of midpoints with `x > midpoint * scale`, ties to the lower index.
    Stochastic: with `lo` and `hi` the neighbouring values, `hi` with probability
    `(x / scale - lo) / (hi - lo)`, to 2**-16; below the lowest value and above the highest one,
    that value. NaN gives code 0, as do all elements whose scale is Inf or NaN (or 0, where the
    rounding is stochastic).

    Args:
        x: float32, [n_blocks, block_size].
        scale: float32, [n_blocks, 1], or [1, 1] for all.
        book: What codes mean.
        seed: 64 bits for stochastic rounding; None rounds to the nearest.

    Returns:
        int64, [n_blocks, block_size].

    Example:
        >>> x = torch.tensor([[0.25, 0.5, 0.9, 1.0]])
        >>> encode(x, torch.ones(1, 1), Book("Linear", 2, False))
        tensor([[0, 1, 3, 3]])

    Reference:
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507, appendix E.3.
    """
    if seed is None:
        defined = scale + (scale - scale)  # NaN in place of Inf: no bound is passed
        bounds = midpoints(book.map, book.bits, book.signed, x.device) * defined
        return count_above(x, bounds[0] if scale.numel() == 1 else bounds)
    values = book.values(x.device)
    usable = (scale > 0) & scale.isfinite()
    inner = (values[1:-1] * torch.where(usable, scale, 1.0)).expand(x.shape[0], -1)
    low = torch.searchsorted(inner.contiguous(), x.contiguous(), right=True)
    u = uniform_blocks(x.shape[0], x.shape[1], seed, x.device)
    bound = (values[low] + u * (values[low + 1] - values[low])) * scale
    return (low + (x > bound)).masked_fill(x.isnan() | ~usable, 0)


class Buckets(NamedTuple):
    """How the C++ kernel finds a code: see `cpu/codebook/codes.cpp`."""

    bounds: Tensor
    base: Tensor
    shift: int
    lowest: int
    count: int


@cache
def buckets(book: Book, stochastic: bool) -> Buckets:
    """Bounds between codes (of stochastic ones: the values but the ends), found by first bits.

    A bucket is all numbers that share a sign, an exponent and the first bits of the mantissa:
    fine enough that at most one bound lies in it, with room for the rounding of a division.

    Args:
        book: What codes mean.
        stochastic: Which bounds.

    Returns:
        bounds float32 [count + 1] with +Inf at the end; base int32 [2 * number of buckets], the
        bounds below each bucket, those of negative numbers last; and where buckets begin.
    """
    device = torch.device("cpu")
    middle = midpoints(book.map, book.bits, book.signed, device)
    bounds = book.values(device)[1:-1] if stochastic else middle
    least = bounds.abs()[bounds != 0].min().item()
    exponent = math.floor(math.log2(least)) - 1
    for mantissa in range(2, 12):
        shift = 23 - mantissa
        lowest = ((127 + exponent) << mantissa) - 1
        n = (127 << mantissa) - lowest + 1
        keys = (torch.arange(n + 1) + lowest) << shift
        edges = keys.to(torch.int32).view(torch.float32).double()
        edges[0], edges[-1] = 0.0, math.inf
        lo, hi = edges[:-1] * (1 - 2.0**-18), edges[1:] * (1 + 2.0**-18)
        lo, hi = torch.cat([lo, -hi]), torch.cat([hi, -lo])
        base = torch.searchsorted(bounds.double(), lo)
        if (torch.searchsorted(bounds.double(), hi, right=True) - base).max() <= 1:
            break
    ended = torch.cat([bounds, torch.tensor([math.inf])])
    return Buckets(ended, base.int(), shift, lowest, len(bounds))


def quantize(
    x: Tensor, book: Book, seed: int | None, backend: str, codes: Tensor, by: Tensor | Sides
) -> None:
    """`encode` and `bits.pack` by a kernel, into `codes`.

    Args:
        x: Contiguous, any float type.
        book: What codes mean.
        seed: As in `encode`.
        backend: `"cpu"` or `"triton"`.
        codes: uint8, [n_blocks, block_size * bits / 8].
        by: float32 [n_blocks], the blocks' abs-max scales, which are written; or what rows and
            columns are multiplied by (the larger of the two) before they are encoded.
    """
    n, block = x.numel(), codes.shape[1] * 8 // book.bits
    sides = by if isinstance(by, Sides) else None
    scale = None if isinstance(by, Sides) else by
    if backend == "cpu":
        found = buckets(book, seed is not None)
        row, col = sides or (None, None)
        cpu.call(
            "mt_book_quantize",
            x.float(),
            row,
            col,
            found.bounds,
            book.values(x.device) if seed is not None else None,
            *(found.base, found.shift, found.lowest, len(found.base) // 2, found.count),
            *(codes, scale, n, len(col) if col is not None else 1, block, book.bits, seed or 0),
        )
        return
    from memtrain.kernels.codebook import codes_triton

    codes_triton.quantize(x, book, seed, codes, scale, sides)


def dequantize(codes: Tensor, book: Book, backend: str, out: Tensor, by: Tensor | Sides) -> None:
    """`value[code] * scale` by a kernel, into `out`.

    Args:
        codes: uint8, [n_blocks, block_size * bits / 8], contiguous.
        book: What codes mean.
        backend: `"cpu"` or `"triton"`.
        out: float32, contiguous.
        by: float32 [n_blocks], the blocks' scales; or the numbers of rows and columns, of which
            an element's scale is the lesser.
    """
    block = codes.shape[1] * 8 // book.bits
    sides = by if isinstance(by, Sides) else None
    scale = None if isinstance(by, Sides) else by
    values = book.values(codes.device)
    if backend == "cpu":
        row, col = sides or (None, None)
        cols = len(col) if col is not None else 1
        arguments = (codes, scale, row, col, values, out, out.numel(), cols, block, book.bits)
        cpu.call("mt_book_dequantize", *arguments)
        return
    from memtrain.kernels.codebook import codes_triton

    codes_triton.dequantize(codes, book, out, scale, sides)


def pack(x: Tensor, scale: Tensor, book: Book, seed: int | None) -> Tensor:
    """`encode`, packed: uint8 [n_blocks, block_size * bits / 8]."""
    return bitpack.pack(encode(x, scale, book, seed), book.bits)
