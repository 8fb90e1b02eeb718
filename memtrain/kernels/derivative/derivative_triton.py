"""Triton kernels of `derivative.py`: the codes of an input, and a gradient times levels.

A position's word contains the codes of all lanes of a block (layout: `packing.bits`).
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from memtrain.kernels.device_guard import launch
from memtrain.kernels.packing.bits import lanes

BLOCK_SIZE = 256
POSITIONS = 512  # four per thread, with one element of each lane per position


@triton.jit
def _code(side, table_ptr, BOUNDARIES: tl.constexpr, BITS: tl.constexpr, BAND: tl.constexpr):
    if BAND:
        code = ((side > BOUNDARIES[0]) & (side <= BOUNDARIES[1])).to(tl.uint32)
    elif BITS <= 4:
        code = tl.zeros_like(side).to(tl.uint32)
        # Boundaries ascend, so the last smaller one gives the count.
        for k in tl.static_range((1 << BITS) - 1):
            code = tl.where(side > BOUNDARIES[k], k + 1, code)
    else:
        # A binary search; the table stays in the first cache.
        code = tl.zeros_like(side).to(tl.uint32)
        for k in tl.static_range(BITS):
            boundary = tl.load(table_ptr + code + ((1 << (BITS - 1 - k)) - 1))
            code += tl.where(side > boundary, 1 << (BITS - 1 - k), 0).to(tl.uint32)
    return code


@triton.jit
def _encode_kernel(
    x_ptr, codes_ptr,
    table_ptr,  # the boundaries, read if there are more than 15
    n, n_blocks,
    BOUNDARIES: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr, PARITY: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 256 // LANES
    WORD: tl.constexpr = tl.uint64 if LANES * BITS > 32 else tl.uint32
    first = tl.program_id(0).to(tl.int64) * TILE  # block; offsets in the tile fit 32 bits
    left = tl.minimum(n - first * 256, TILE * 256).to(tl.int32)
    left_blocks = tl.minimum(n_blocks - first, TILE).to(tl.int32)
    row = tl.arange(0, TILE)[:, None]
    position = tl.arange(0, WIDTH)[None, :]
    x_ptr += first * 256
    codes_ptr += first * (32 * BITS)
    word = tl.zeros([TILE, WIDTH], WORD)
    for lane in tl.static_range(LANES):
        at = row * 256 + lane * WIDTH + position
        x = tl.load(x_ptr + at, mask=at < left, other=0.0).to(tl.float32)
        side = tl.abs(x) if PARITY == "even" else x
        code = _code(side, table_ptr, BOUNDARIES, BITS, PARITY == "band")
        word |= code.to(WORD) << (BITS * lane)
    for byte in tl.static_range(LANES * BITS // 8):
        at = row * (32 * BITS) + byte * WIDTH + position
        part = ((word >> (8 * byte)) & 0xFF).to(tl.uint8)
        tl.store(codes_ptr + at, part, mask=row < left_blocks)


@triton.jit
def _pair(code, LEVELS: tl.constexpr, FIRST: tl.constexpr):
    return tl.where((code & 1) != 0, LEVELS[FIRST + 1], LEVELS[FIRST])


@triton.jit
def _quad(code, LEVELS: tl.constexpr, FIRST: tl.constexpr):
    return tl.where((code & 2) != 0, _pair(code, LEVELS, FIRST + 2), _pair(code, LEVELS, FIRST))


@triton.jit
def _octet(code, LEVELS: tl.constexpr, FIRST: tl.constexpr):
    return tl.where((code & 4) != 0, _quad(code, LEVELS, FIRST + 4), _quad(code, LEVELS, FIRST))


@triton.jit
def _level(code, table_ptr, LEVELS: tl.constexpr, BITS: tl.constexpr, GATHER: tl.constexpr):
    """Return the levels: up to 4 bits by selects over the code's bits, else by a gather."""
    if GATHER:
        level = tl.load(table_ptr + (code & ((1 << BITS) - 1)))
    elif BITS == 1:
        level = _pair(code, LEVELS, 0)
    elif BITS == 2:
        level = _quad(code, LEVELS, 0)
    elif BITS == 3:
        level = _octet(code, LEVELS, 0)
    else:
        level = tl.where((code & 8) != 0, _octet(code, LEVELS, 8), _octet(code, LEVELS, 0))
    return level


@triton.jit
def _backward_kernel(
    grad_ptr,  # read if MULTIPLY
    codes_ptr, out_ptr,
    table_ptr,  # the levels, read if GATHER
    n, n_blocks,
    LEVELS: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr, GATHER: tl.constexpr,
    MULTIPLY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 256 // LANES
    WORD: tl.constexpr = tl.uint64 if LANES * BITS > 32 else tl.uint32
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * TILE  # block; offsets in the tile fit 32 bits
    left = tl.minimum(n - first * 256, TILE * 256).to(tl.int32)
    left_blocks = tl.minimum(n_blocks - first, TILE).to(tl.int32)
    row = tl.arange(0, TILE)[:, None]
    position = tl.arange(0, WIDTH)[None, :]
    grad_ptr += first * 256
    out_ptr += first * 256
    codes_ptr += first * (32 * BITS)
    word = tl.zeros([TILE, WIDTH], WORD)
    for byte in tl.static_range(LANES * BITS // 8):
        at = row * (32 * BITS) + byte * WIDTH + position
        part = tl.load(codes_ptr + at, mask=row < left_blocks, other=0)
        word |= part.to(WORD) << (8 * byte)
    for lane in tl.static_range(LANES):
        at = row * 256 + lane * WIDTH + position
        code = (word >> (BITS * lane)).to(tl.uint32)
        level = _level(code, table_ptr, LEVELS, BITS, GATHER)
        if MULTIPLY:
            grad = tl.load(grad_ptr + at, mask=at < left, other=0.0)
            level = grad.to(level.dtype) * level
        out = level.to(DTYPE)
        tl.store(out_ptr + at, out, mask=at < left)


def _tile(bits: int) -> int:
    """Return the blocks of 256 per program."""
    return POSITIONS * lanes(bits) // BLOCK_SIZE


@cache
def _table(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a table on the device, cached."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def encode(x: Tensor, boundaries: tuple[float, ...], parity: str) -> Tensor:
    """Return the codes of a contiguous `x`."""
    bits = 1 if parity == "band" else (len(boundaries) + 1).bit_length() - 1
    n_blocks = triton.cdiv(x.numel(), BLOCK_SIZE)
    codes = torch.empty((n_blocks, 32 * bits), dtype=torch.uint8, device=x.device)
    if n_blocks:
        launch(
            _encode_kernel, (triton.cdiv(n_blocks, _tile(bits)),), x, codes,
            codes if bits <= 4 else _table(boundaries, torch.float32, x.device),
            x.numel(), n_blocks,
            BOUNDARIES=boundaries if bits <= 4 else (), BITS=bits, LANES=lanes(bits),
            PARITY=parity, TILE=_tile(bits),
        )  # fmt: skip
    return codes


def backward(grad: Tensor | None, codes: Tensor, levels: tuple[float, ...], out: Tensor) -> Tensor:
    """Write the level of each code, times `grad` if given, to `out`; return `out`."""
    bits = len(levels).bit_length() - 1
    n_blocks = codes.shape[0]
    gather = bits > 4 or out.dtype == torch.float64
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    if n_blocks:
        launch(
            _backward_kernel, (triton.cdiv(n_blocks, _tile(bits)),),
            out if grad is None else grad, codes, out,
            _table(levels, wide, codes.device) if gather else codes, out.numel(), n_blocks,
            LEVELS=() if gather else levels, BITS=bits, LANES=lanes(bits), GATHER=gather,
            MULTIPLY=grad is not None, TILE=_tile(bits),
        )  # fmt: skip
    return out
