"""Triton twins of few-bit derivative codes (contract: `memtrain.kernels.derivative`)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_SIZE = 256
POSITIONS = 512  # four a thread, and one element of each lane per position


@triton.jit
def _erf_gelu(x):
    return x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))


@triton.jit
def _tanh_gelu(x):
    # 0.5 (1 + tanh u) = sigmoid(2 u)
    u2 = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-u2))


@triton.jit
def _value(x, FUNCTION: tl.constexpr):
    if FUNCTION == "gelu":
        y = _erf_gelu(x)
    elif FUNCTION == "gelu_tanh":
        y = _tanh_gelu(x)
    elif FUNCTION == "silu":
        y = x / (1.0 + tl.exp(-x))
    else:
        y = tl.where(x <= 0.0, 0.0, x)  # NaN passes
    return y


@triton.jit
def _code(x, BOUNDARIES: tl.constexpr, COUNT: tl.constexpr, EVEN: tl.constexpr):
    side = tl.abs(x) if EVEN else x
    code = tl.zeros_like(x).to(tl.uint32)
    # Boundaries ascend, so the last one passed gives the count.
    for k in tl.static_range(COUNT):
        code = tl.where(side > BOUNDARIES[k], k + 1, code)
    return code


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
def _level(code, LEVELS: tl.constexpr, BITS: tl.constexpr):
    """A tree of selects over the code's bits: no gather, every level exact."""
    if BITS == 1:
        level = _pair(code, LEVELS, 0)
    elif BITS == 2:
        level = _quad(code, LEVELS, 0)
    elif BITS == 3:
        level = _octet(code, LEVELS, 0)
    else:
        level = tl.where((code & 8) != 0, _octet(code, LEVELS, 8), _octet(code, LEVELS, 0))
    return level


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """To the stored type; bfloat16 to nearest-even by integers: the interpreter would truncate."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.uint32, bitcast=True)
        high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        high = tl.where(x != x, 0x7FC0, high)
        y = high.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def _forward_kernel(
    x_ptr,
    y_ptr,
    codes_ptr,
    n,
    n_blocks,
    FUNCTION: tl.constexpr,  # "" writes codes only
    BOUNDARIES: tl.constexpr,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    WIDTH: tl.constexpr = 256 // LANES
    first = tl.program_id(0).to(tl.int64) * TILE  # block; inside the tile 32 bits do
    left = tl.minimum(n - first * 256, TILE * 256).to(tl.int32)
    left_blocks = tl.minimum(n_blocks - first, TILE).to(tl.int32)
    row = tl.arange(0, TILE)[:, None]
    position = tl.arange(0, WIDTH)[None, :]
    x_ptr += first * 256
    y_ptr += first * 256
    codes_ptr += first * (32 * BITS)
    word = tl.zeros([TILE, WIDTH], tl.uint32)
    for lane in tl.static_range(LANES):
        at = row * 256 + lane * WIDTH + position
        x = tl.load(x_ptr + at, mask=at < left, other=0.0).to(tl.float32)
        word |= _code(x, BOUNDARIES, (1 << BITS) - 1, EVEN) << (BITS * lane)
        if FUNCTION != "":
            y = _rounded(_value(x, FUNCTION), y_ptr.dtype.element_ty)
            tl.store(y_ptr + at, y, mask=at < left)
    for byte in tl.static_range(LANES * BITS // 8):
        at = row * (32 * BITS) + byte * WIDTH + position
        part = ((word >> (8 * byte)) & 0xFF).to(tl.uint8)
        tl.store(codes_ptr + at, part, mask=row < left_blocks)


@triton.jit
def _backward_kernel(
    grad_ptr,  # not read where not MULTIPLY
    codes_ptr,
    out_ptr,
    n,
    n_blocks,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    MULTIPLY: tl.constexpr,
    TILE: tl.constexpr,
):
    WIDTH: tl.constexpr = 256 // LANES
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * TILE  # block; inside the tile 32 bits do
    left = tl.minimum(n - first * 256, TILE * 256).to(tl.int32)
    left_blocks = tl.minimum(n_blocks - first, TILE).to(tl.int32)
    row = tl.arange(0, TILE)[:, None]
    position = tl.arange(0, WIDTH)[None, :]
    grad_ptr += first * 256
    out_ptr += first * 256
    codes_ptr += first * (32 * BITS)
    word = tl.zeros([TILE, WIDTH], tl.uint32)
    for byte in tl.static_range(LANES * BITS // 8):
        at = row * (32 * BITS) + byte * WIDTH + position
        part = tl.load(codes_ptr + at, mask=row < left_blocks, other=0)
        word |= part.to(tl.uint32) << (8 * byte)
    for lane in tl.static_range(LANES):
        at = row * 256 + lane * WIDTH + position
        value = _level(word >> (BITS * lane), LEVELS, BITS)
        if MULTIPLY:
            grad = tl.load(grad_ptr + at, mask=at < left, other=0.0)
            if DTYPE == tl.float64:  # noqa: SIM300
                value = grad * value.to(tl.float64)
            else:
                value = grad.to(tl.float32) * value
        value = value.to(tl.float64) if DTYPE == tl.float64 else _rounded(value, DTYPE)  # noqa: SIM300
        tl.store(out_ptr + at, value, mask=at < left)


def _lanes(bits: int) -> int:
    return {1: 8, 2: 4, 3: 8, 4: 2}[bits]


def _tile(bits: int) -> int:
    """Blocks of 256 a program."""
    return POSITIONS * _lanes(bits) // BLOCK_SIZE


def _run_forward(
    x: Tensor, y: Tensor | None, function: str, boundaries: tuple[float, ...], even: bool
) -> Tensor:
    bits = (len(boundaries) + 1).bit_length() - 1
    n_blocks = triton.cdiv(x.numel(), BLOCK_SIZE)
    codes = torch.empty((n_blocks, 32 * bits), dtype=torch.uint8, device=x.device)
    if n_blocks:
        _forward_kernel[(triton.cdiv(n_blocks, _tile(bits)),)](
            x,
            x if y is None else y,
            codes,
            x.numel(),
            n_blocks,
            FUNCTION=function,
            BOUNDARIES=boundaries,
            BITS=bits,
            LANES=_lanes(bits),
            EVEN=even,
            TILE=_tile(bits),
        )
    return codes


def encode(x: Tensor, boundaries: tuple[float, ...], even: bool) -> Tensor:
    """The codes of a contiguous `x`."""
    return _run_forward(x, None, "", boundaries, even)


def forward(
    x: Tensor, function: str, boundaries: tuple[float, ...], even: bool
) -> tuple[Tensor, Tensor]:
    """Value and codes of a flat `x` in one pass; `function` is gelu, gelu_tanh, silu or relu."""
    y = torch.empty_like(x)
    return y, _run_forward(x, y, function, boundaries, even)


def _run_backward(grad: Tensor | None, codes: Tensor, levels: tuple[float, ...], out: Tensor):
    bits = len(levels).bit_length() - 1
    n_blocks = codes.shape[0]
    if n_blocks:
        _backward_kernel[(triton.cdiv(n_blocks, _tile(bits)),)](
            out if grad is None else grad,
            codes,
            out,
            out.numel(),
            n_blocks,
            LEVELS=levels,
            BITS=bits,
            LANES=_lanes(bits),
            MULTIPLY=grad is not None,
            TILE=_tile(bits),
        )
    return out


def backward(grad: Tensor, codes: Tensor, levels: tuple[float, ...]) -> Tensor:
    """`grad` times the level of each code."""
    return _run_backward(grad, codes, levels, torch.empty_like(grad))


def decode(codes: Tensor, levels: tuple[float, ...], n: int, dtype: torch.dtype) -> Tensor:
    """The level of each code."""
    return _run_backward(None, codes, levels, torch.empty(n, dtype=dtype, device=codes.device))


def _aot_cases() -> list[tuple[object, dict[str, str], dict[str, object]]]:
    """Every kernel at every width; each fused function and dtype at 3 bits."""
    cases: list[tuple[object, dict[str, str], dict[str, object]]] = []
    for bits in (1, 2, 3, 4):
        steps = tuple(float(k) for k in range(1 << bits))
        shared = {"BITS": bits, "LANES": _lanes(bits), "TILE": _tile(bits)}
        sizes = {"n": "i64", "n_blocks": "i64"}
        dtypes = ("*fp32", "*bf16", "*fp16") if bits == 3 else ("*fp32", "*bf16")
        for dtype in dtypes:
            pointers = {"x_ptr": dtype, "y_ptr": dtype, "codes_ptr": "*u8"}
            for function in ("", "gelu", "gelu_tanh", "silu", "relu") if bits == 3 else ("gelu",):
                for even in (False, True) if function == "" else (False,):
                    constants = {"FUNCTION": function, "BOUNDARIES": steps[1:], "EVEN": even}
                    cases.append((_forward_kernel, pointers | sizes, constants | shared))
            pointers = {"grad_ptr": dtype, "codes_ptr": "*u8", "out_ptr": dtype}
            constants = {"LEVELS": steps, "MULTIPLY": True}
            cases.append((_backward_kernel, pointers | sizes, constants | shared))
            if bits == 3:
                cases.append(
                    (_backward_kernel, pointers | sizes, constants | shared | {"MULTIPLY": False})
                )
    pointers = {"grad_ptr": "*fp64", "codes_ptr": "*u8", "out_ptr": "*fp64"}
    cases.append((_backward_kernel, pointers | sizes, constants | shared))
    return cases


AOT_CASES = _aot_cases()
