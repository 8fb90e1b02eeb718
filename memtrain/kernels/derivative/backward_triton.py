"""Triton twin of the backward half of derivative codes: a gradient times levels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memtrain.kernels.derivative.forward_triton import lanes, rounded, table, tile


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
    """Up to 4 bits a tree of selects over the code's bits: no gather, every level exact."""
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
    grad_ptr,  # not read where not MULTIPLY
    codes_ptr,
    out_ptr,
    table_ptr,  # the levels, read where GATHER
    n,
    n_blocks,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    GATHER: tl.constexpr,
    MULTIPLY: tl.constexpr,
    TILE: tl.constexpr,
):
    WIDTH: tl.constexpr = 256 // LANES
    WORD: tl.constexpr = tl.uint64 if LANES * BITS > 32 else tl.uint32
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * TILE  # block; inside the tile 32 bits do
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
        out = level if DTYPE == tl.float64 else rounded(level, DTYPE)  # noqa: SIM300
        tl.store(out_ptr + at, out, mask=at < left)


def backward(grad: Tensor | None, codes: Tensor, levels: tuple[float, ...], out: Tensor) -> Tensor:
    """The level of each code, times `grad` where there is one, written to `out`."""
    bits = len(levels).bit_length() - 1
    n_blocks = codes.shape[0]
    gather = bits > 4 or out.dtype == torch.float64
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    if n_blocks:
        _backward_kernel[(triton.cdiv(n_blocks, tile(bits)),)](
            out if grad is None else grad,
            codes,
            out,
            table(levels, wide, codes.device) if gather else codes,
            out.numel(),
            n_blocks,
            LEVELS=() if gather else levels,
            BITS=bits,
            LANES=lanes(bits),
            GATHER=gather,
            MULTIPLY=grad is not None,
            TILE=tile(bits),
        )
    return out


def _backward_cases() -> list[tuple[object, dict[str, str], dict[str, object]]]:
    """Every width and dtype; levels alone at 3 bits."""
    cases: list[tuple[object, dict[str, str], dict[str, object]]] = []
    for bits in range(1, 9):
        for dtype in ("*fp32", "*bf16", "*fp16", "*fp64"):
            gather = bits > 4 or dtype == "*fp64"
            kind = "*fp64" if dtype == "*fp64" else "*fp32"
            pointers = {"grad_ptr": dtype, "codes_ptr": "*u8", "out_ptr": dtype, "table_ptr": kind}
            steps = () if gather else tuple(float(k) for k in range(1 << bits))
            shared = {"BITS": bits, "LANES": lanes(bits), "TILE": tile(bits), "LEVELS": steps}
            for multiply in (True, False) if bits == 3 else (True,):
                constants = shared | {"GATHER": gather, "MULTIPLY": multiply}
                signature = pointers | {"n": "i64", "n_blocks": "i64"}
                cases.append((_backward_kernel, signature, constants))
    return cases


AOT_CASES = _backward_cases()
