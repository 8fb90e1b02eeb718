"""Triton twin of `rank1.py` (4 bits): a tensor seen as [rows, cols], codes in blocks of 128."""

import triton
import triton.language as tl

from memtrain.kernels.codebook.block_triton import BLOCKS, encode, magnitude


@triton.jit
def place(block, lane, cols):
    """Row and column of the elements `lane` of the blocks `block`; int64 only once a block."""
    first = block * 128
    row = first // cols
    at = (first - row * cols)[:, None] + lane[None, :]
    return row[:, None] + at // cols, at % cols


@triton.jit
def least(a, b):
    """The smaller of two maxima; NaN only where both are."""
    return tl.minimum(magnitude(a), magnitude(b)).to(tl.float32, bitcast=True)


@triton.jit
def _code(x_ptr, row_ptr, col_ptr, table_ptr, block, lane, n, cols):
    row, col = place(block, lane, cols)
    at = block[:, None] * 128 + lane[None, :]
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(row_ptr + row, mask=inside, other=0.0)
    b = tl.load(col_ptr + col, mask=inside, other=0.0)
    return encode(x * tl.maximum(a, b), table_ptr + 16, 1.0)


@triton.jit
def _quantize_kernel(
    x_ptr, row_ptr, col_ptr, table_ptr, codes_ptr, n, cols, n_blocks, BLOCKS: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    lane = tl.arange(0, 64)
    code = _code(x_ptr, row_ptr, col_ptr, table_ptr, block, lane, n, cols)
    code |= _code(x_ptr, row_ptr, col_ptr, table_ptr, block, lane + 64, n, cols) << 4
    inside = (block < n_blocks)[:, None]
    tl.store(codes_ptr + block[:, None] * 64 + lane[None, :], code.to(tl.uint8), mask=inside)


@triton.jit
def _value(code, row_ptr, col_ptr, table_ptr, out_ptr, block, lane, n, cols):
    row, col = place(block, lane, cols)
    at = block[:, None] * 128 + lane[None, :]
    inside = at < n
    a = tl.load(row_ptr + row, mask=inside, other=0.0)
    b = tl.load(col_ptr + col, mask=inside, other=0.0)
    tl.store(out_ptr + at, tl.load(table_ptr + code) * least(a, b), mask=inside)


@triton.jit
def _dequantize_kernel(
    codes_ptr, row_ptr, col_ptr, table_ptr, out_ptr, n, cols, n_blocks, BLOCKS: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    lane = tl.arange(0, 64)
    inside = (block < n_blocks)[:, None]
    byte = tl.load(codes_ptr + block[:, None] * 64 + lane[None, :], mask=inside, other=0)
    byte = byte.to(tl.int32)
    _value(byte & 15, row_ptr, col_ptr, table_ptr, out_ptr, block, lane, n, cols)
    _value(byte >> 4, row_ptr, col_ptr, table_ptr, out_ptr, block, lane + 64, n, cols)


def quantize(x, row_inv, col_inv, table, codes):
    """`rank1.quantize` into `codes`, given the reciprocals of the maxima."""
    blocks = codes.shape[0]
    if blocks:
        grid = (triton.cdiv(blocks, BLOCKS),)
        _quantize_kernel[grid](
            x, row_inv, col_inv, table, codes, x.numel(), col_inv.numel(), blocks, BLOCKS
        )


def dequantize(codes, row, col, table, out):
    """`rank1.dequantize` into `out`, given the maxima of rows and columns."""
    blocks = codes.shape[0]
    if blocks:
        grid = (triton.cdiv(blocks, BLOCKS),)
        _dequantize_kernel[grid](
            codes, row, col, table, out, out.numel(), col.numel(), blocks, BLOCKS, num_warps=8
        )


_COMMON = {
    "row_ptr": "*fp32",
    "col_ptr": "*fp32",
    "table_ptr": "*fp32",
    "codes_ptr": "*u8",
    "n": "i64",
    "cols": "i64",
    "n_blocks": "i64",
}
AOT_CASES = [
    (_quantize_kernel, {"x_ptr": x, **_COMMON}, {"BLOCKS": BLOCKS})
    for x in ("*fp32", "*bf16", "*fp16")
] + [(_dequantize_kernel, {"out_ptr": "*fp32", **_COMMON}, {"BLOCKS": BLOCKS, "num_warps": 8})]
