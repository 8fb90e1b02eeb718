"""Triton kernels of `derivative.py`: value and codes in one pass; a gradient times levels.

A position's word holds the codes of all lanes of a block (layout: `packing.bits`).
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from memtrain.kernels.derivative.pointwise import FUNCTIONS
from memtrain.kernels.device_guard import launch
from memtrain.kernels.packing.bits import lanes

BLOCK_SIZE = 256
POSITIONS = 512  # four a thread, and one element of each lane per position
FUSED = tuple(FUNCTIONS)  # `_value` knows them


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _log1p(e):
    """For e in [0, 1]; the quotient takes the rounding of 1 + e back."""
    u = 1.0 + e
    return tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _expm1(x):
    """For x <= 0."""
    u = tl.exp(x)
    near = (u == 1.0) | (u - 1.0 == -1.0)
    exact = (u - 1.0) * (x / tl.log(tl.where(near, 0.5, u)))
    return tl.where(u == 1.0, x, tl.where(u - 1.0 == -1.0, -1.0, exact))


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    # Taylor's series, where the difference above would cancel
    near = 1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835))))
    return tl.where(tl.abs(x) < 0.25, x * near, tl.where(x < 0.0, -far, far))


@triton.jit
def _softplus(x):
    return tl.where(x > 0.0, x, 0.0) + _log1p(tl.exp(-tl.abs(x)))


@triton.jit
def _mish(x):
    # tanh(log(1 + e)) = n / (n + 2) with n = e (e + 2); above 20 it is 1
    e = tl.exp(tl.where(x > 20.0, 20.0, x))
    n = e * (e + 2.0)
    return tl.where(x > 20.0, x, x * (n / (n + 2.0)))


@triton.jit
def _elu(x, alpha, stretch):
    low = tl.where(x > 0.0, 0.0, x)
    return tl.where(x > 0.0, x, alpha * _expm1(low / stretch))


@triton.jit
def _clamp(x, low, high):
    y = tl.where(x < low, low, x)  # NaN passes
    return tl.where(y > high, high, y)


@triton.jit
def _smooth(x, FUNCTION: tl.constexpr, a, b):
    if FUNCTION == "gelu":
        y = x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":
        # 0.5 (1 + tanh u) = sigmoid(2 u)
        y = x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif FUNCTION == "quick_gelu":
        y = x * _sigmoid(1.702 * x)
    elif FUNCTION == "silu":
        y = x * _sigmoid(x)
    elif FUNCTION == "mish":
        y = _mish(x)
    elif FUNCTION == "elu":
        y = _elu(x, a, 1.0)
    elif FUNCTION == "celu":
        y = _elu(x, a, a)
    elif FUNCTION == "selu":
        y = 1.0507009873554805 * _elu(x, 1.6732632423543772, 1.0)
    elif FUNCTION == "sigmoid":
        y = _sigmoid(x)
    elif FUNCTION == "logsigmoid":
        y = tl.where(x > 0.0, 0.0, x) - _log1p(tl.exp(-tl.abs(x)))
    elif FUNCTION == "tanh":
        y = _tanh(x)
    elif FUNCTION == "tanhshrink":
        y = x - _tanh(x)
    elif FUNCTION == "softplus":
        y = tl.where(x * a > b, x, _softplus(x * a) / a)
    else:
        tl.static_assert(FUNCTION == "softsign")
        y = x / (1.0 + tl.abs(x))
    return y


@triton.jit
def _value(x, FUNCTION: tl.constexpr, a, b):
    """The value of float32 `x`; NaN stays NaN."""
    if FUNCTION == "relu":
        y = tl.where(x <= 0.0, 0.0, x)
    elif FUNCTION == "leaky_relu":
        y = tl.where(x > 0.0, x, x * a)
    elif FUNCTION == "hardtanh" or FUNCTION == "relu6" or FUNCTION == "clamp":
        y = _clamp(x, a, b)
    elif FUNCTION == "threshold":
        y = tl.where(x <= a, b, x)
    elif FUNCTION == "hardshrink":
        y = tl.where((x >= -a) & (x <= a), 0.0, x)
    elif FUNCTION == "softshrink":
        y = tl.where(x > a, x - a, tl.where(x < -a, x + a, x * 0.0))
    elif FUNCTION == "hardsigmoid":
        y = _clamp(x + 3.0, 0.0, 6.0) / 6.0
    elif FUNCTION == "hardswish":
        y = x * _clamp(x + 3.0, 0.0, 6.0) / 6.0
    else:
        y = _smooth(x, FUNCTION, a, b)
    return y


@triton.jit
def _code(
    side,
    table_ptr,
    BOUNDARIES: tl.constexpr,
    BITS: tl.constexpr,
    BAND: tl.constexpr,
):
    if BAND:
        code = ((side > BOUNDARIES[0]) & (side <= BOUNDARIES[1])).to(tl.uint32)
    elif BITS <= 4:
        code = tl.zeros_like(side).to(tl.uint32)
        # Boundaries ascend, so the last one passed gives the count.
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
def _forward_kernel(
    x_ptr,
    y_ptr,  # not written where FUNCTION is ""; may be x_ptr
    codes_ptr,
    table_ptr,  # the boundaries, read where there are more than 15
    n,
    n_blocks,
    shift,
    a,
    b,
    FUNCTION: tl.constexpr,
    BOUNDARIES: tl.constexpr,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    PARITY: tl.constexpr,
    TILE: tl.constexpr,
):
    WIDTH: tl.constexpr = 256 // LANES
    WORD: tl.constexpr = tl.uint64 if LANES * BITS > 32 else tl.uint32
    first = tl.program_id(0).to(tl.int64) * TILE  # block; inside the tile 32 bits do
    left = tl.minimum(n - first * 256, TILE * 256).to(tl.int32)
    left_blocks = tl.minimum(n_blocks - first, TILE).to(tl.int32)
    row = tl.arange(0, TILE)[:, None]
    position = tl.arange(0, WIDTH)[None, :]
    x_ptr += first * 256
    y_ptr += first * 256
    codes_ptr += first * (32 * BITS)
    word = tl.zeros([TILE, WIDTH], WORD)
    for lane in tl.static_range(LANES):
        at = row * 256 + lane * WIDTH + position
        x = tl.load(x_ptr + at, mask=at < left, other=0.0).to(tl.float32)
        side = tl.abs(x - shift) if PARITY == "even" else x - shift
        code = _code(side, table_ptr, BOUNDARIES, BITS, PARITY == "band")
        word |= code.to(WORD) << (BITS * lane)
        if FUNCTION != "":
            y = _value(x, FUNCTION, a, b).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + at, y, mask=at < left)
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
        out = level.to(DTYPE)
        tl.store(out_ptr + at, out, mask=at < left)


def _tile(bits: int) -> int:
    """Blocks of 256 a program."""
    return POSITIONS * lanes(bits) // BLOCK_SIZE


@cache
def _table(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A table on the device, made once."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def forward(
    x: Tensor,
    y: Tensor,
    function: tuple[str, float, float],
    boundaries: tuple[float, ...],
    side: tuple[str, float],
) -> Tensor:
    """Codes of a dense `x`, its value written to `y` (may be `x`) in the same pass.

    `function` is a name of `FUSED` with its two parameters, `side` parity and shift.
    """
    bits = 1 if side[0] == "band" else (len(boundaries) + 1).bit_length() - 1
    n_blocks = triton.cdiv(x.numel(), BLOCK_SIZE)
    codes = torch.empty((n_blocks, 32 * bits), dtype=torch.uint8, device=x.device)
    if n_blocks:
        launch(
            _forward_kernel,
            (triton.cdiv(n_blocks, _tile(bits)),),
            x,
            y,
            codes,
            codes if bits <= 4 else _table(boundaries, torch.float32, x.device),
            x.numel(),
            n_blocks,
            float(side[1]),
            float(function[1]),
            float(function[2]),
            FUNCTION=function[0],
            BOUNDARIES=boundaries if bits <= 4 else (),
            BITS=bits,
            LANES=lanes(bits),
            PARITY=side[0],
            TILE=_tile(bits),
        )
    return codes


def encode(x: Tensor, boundaries: tuple[float, ...], parity: str, shift: float) -> Tensor:
    """The codes of a contiguous `x`."""
    return forward(x, x, ("", 0.0, 0.0), boundaries, (parity, shift))


def backward(grad: Tensor | None, codes: Tensor, levels: tuple[float, ...], out: Tensor) -> Tensor:
    """The level of each code, times `grad` where there is one, written to `out`."""
    bits = len(levels).bit_length() - 1
    n_blocks = codes.shape[0]
    gather = bits > 4 or out.dtype == torch.float64
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    if n_blocks:
        launch(
            _backward_kernel,
            (triton.cdiv(n_blocks, _tile(bits)),),
            out if grad is None else grad,
            codes,
            out,
            _table(levels, wide, codes.device) if gather else codes,
            out.numel(),
            n_blocks,
            LEVELS=() if gather else levels,
            BITS=bits,
            LANES=lanes(bits),
            GATHER=gather,
            MULTIPLY=grad is not None,
            TILE=_tile(bits),
        )
    return out
