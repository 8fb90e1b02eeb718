"""Triton twin of `codebook.py` (4 bits), and the pieces that every 4-bit kernel here shares."""

import triton
import triton.language as tl

BLOCKS = 8  # blocks of codes per program


@triton.jit
def encode(x, bounds_ptr, scale):
    """The number of bounds (times the scale) below x; NaN and a scale of Inf give 0."""
    scale += scale - scale  # Inf becomes NaN
    code = tl.zeros(x.shape, dtype=tl.int32)
    for k in tl.static_range(15):
        bound = tl.load(bounds_ptr + k) * scale
        code = tl.where(x > bound, k + 1, code)  # the bounds ascend
    return code


@triton.jit
def magnitude(x):
    """|x| as an integer that sorts like it: NaN above Inf above every number."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _quantize_kernel(
    x_ptr, table_ptr, codes_ptr, scale_ptr, n, n_blocks, HALF: tl.constexpr, BLOCKS: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    lane = tl.arange(0, HALF)
    inside = (block < n_blocks)[:, None]
    at = block[:, None] * (2 * HALF) + lane[None, :]
    low = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + at + HALF, mask=at + HALF < n, other=0.0).to(tl.float32)
    top = tl.max(tl.maximum(magnitude(low), magnitude(high)), axis=1)
    scale = top.to(tl.float32, bitcast=True)
    tl.store(scale_ptr + block, scale, mask=block < n_blocks)
    code = encode(low, table_ptr + 16, scale[:, None])
    code |= encode(high, table_ptr + 16, scale[:, None]) << 4
    tl.store(codes_ptr + block[:, None] * HALF + lane[None, :], code.to(tl.uint8), mask=inside)


@triton.jit
def _dequantize_kernel(
    codes_ptr, scale_ptr, table_ptr, out_ptr, n, n_blocks, HALF: tl.constexpr, BLOCKS: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    lane = tl.arange(0, HALF)
    inside = (block < n_blocks)[:, None]
    byte = tl.load(codes_ptr + block[:, None] * HALF + lane[None, :], mask=inside, other=0)
    byte = byte.to(tl.int32)
    scale = tl.load(scale_ptr + block, mask=block < n_blocks, other=0.0)[:, None]
    at = block[:, None] * (2 * HALF) + lane[None, :]
    tl.store(out_ptr + at, tl.load(table_ptr + (byte & 15)) * scale, mask=at < n)
    tl.store(out_ptr + at + HALF, tl.load(table_ptr + (byte >> 4)) * scale, mask=at + HALF < n)


def quantize(x, table, codes, scale):
    """`codebook.quantize` into `codes` and `scale`."""
    blocks, half = codes.shape
    if blocks:
        per_program = max(1, BLOCKS * 64 // half)
        grid = (triton.cdiv(blocks, per_program),)
        _quantize_kernel[grid](x, table, codes, scale, x.numel(), blocks, half, per_program)


def dequantize(codes, scale, table, out):
    """`codebook.dequantize` into `out`."""
    blocks, half = codes.shape
    if blocks:
        per_program = max(1, BLOCKS * 64 // half)
        grid = (triton.cdiv(blocks, per_program),)
        _dequantize_kernel[grid](codes, scale, table, out, out.numel(), blocks, half, per_program)


_SIZES = {"HALF": 64, "BLOCKS": BLOCKS}
_COMMON = {"table_ptr": "*fp32", "codes_ptr": "*u8", "scale_ptr": "*fp32", "n": "i64"}
AOT_CASES = [
    (_quantize_kernel, {"x_ptr": x, **_COMMON, "n_blocks": "i64"}, _SIZES)
    for x in ("*fp32", "*bf16", "*fp16")
] + [(_dequantize_kernel, {"out_ptr": "*fp32", **_COMMON, "n_blocks": "i64"}, _SIZES)]
