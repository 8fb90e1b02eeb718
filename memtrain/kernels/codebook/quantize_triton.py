"""Triton kernels of `codebook/quantize.py`: any codebook, and functions for the fused steps.

The tiles are those of `group_triton.py`, with blocks as groups.
"""

import triton
import triton.language as tl

from memtrain.kernels.codebook.quantize import inner_bounds
from memtrain.kernels.codebook.values import Codebook
from memtrain.kernels.device_guard import launch
from memtrain.kernels.group.group_triton import left_of, load_codes, store_codes, tile
from memtrain.kernels.random.philox_triton import philox


@triton.jit
def magnitude(x):
    """Return |x| as an integer with the same order: NaN above Inf above every number."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def least(a, b):
    """Return the smaller of two maxima; NaN only if both are NaN."""
    return tl.minimum(magnitude(a), magnitude(b)).to(tl.float32, bitcast=True)


@triton.jit
def position_and_sign(x, top, offset):
    """Return twice the offset plus the sign bit for elements of magnitude `top`; else 2**31 - 1.

    The minimum over a block belongs to the first element of largest magnitude.
    """
    position = 2 * offset | (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)
    return tl.where(magnitude(x) == top, position, 0x7FFFFFFF)


@triton.jit
def sign_of(first, top):
    """Return the sign bit of the minimum of `position_and_sign`; 0 for a block of zeros."""
    return tl.where(top > 0, first << 31, 0)


@triton.jit
def flipped(x, sign):
    """Return `x` with its sign bit flipped by `sign`."""
    return (x.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def _find(x, scale, bounds_ptr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Return the number of ascending bounds (times the scale) below x; 0 for NaN or scale Inf."""
    scale += scale - scale  # Inf becomes NaN
    code = tl.zeros(x.shape, dtype=tl.int32)
    for k in tl.static_range(BITS):
        bound = tl.load(bounds_ptr + code + (2 ** (BITS - 1 - k) - 1)) * scale
        passed = x > bound
        if STOCHASTIC:
            passed = x >= bound
        code += tl.where(passed, 2 ** (BITS - 1 - k), 0)
    return code


@triton.jit(do_not_specialize=["seed"])
def _quantize_kernel(
    x_ptr, bounds_ptr, values_ptr, codes_ptr, scale_ptr, n, n_blocks, seed,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,  # elements of a slice
    WIDTH_PAD: tl.constexpr,  # the next power of two
    GROUPS: tl.constexpr,
    SCALED: tl.constexpr,  # whether all scales are 1
    STOCHASTIC: tl.constexpr,
    SIGNED: tl.constexpr,  # whether scales of blocks have a sign
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    column = tl.arange(0, WIDTH_PAD)[None, :]
    inside = (block < n_blocks) & (column < WIDTH)
    start = block * (WIDTH * 8) + column
    left = left_of(block, n, WIDTH)

    tops = tl.zeros((GROUPS, WIDTH_PAD), tl.int32)
    xs = ()
    for s in tl.static_range(8):
        valid = inside & (s * WIDTH + column < left)
        x = tl.load(x_ptr + start + s * WIDTH, mask=valid, other=0.0).to(tl.float32)
        tops = tl.maximum(tops, magnitude(x))
        xs = xs + (x,)  # noqa: RUF005 (the compiler knows no other form)
    if SCALED:
        scale = 1.0
        usable = inside
    else:
        top = tl.max(tops, axis=1)[:, None]
        scale = top.to(tl.float32, bitcast=True)
        sign = tl.zeros_like(top)
        if SIGNED:
            first = tl.full((GROUPS, WIDTH_PAD), 0x7FFFFFFF, tl.int32)
            for s in tl.static_range(8):
                position = position_and_sign(xs[s], top, s * WIDTH + column)
                first = tl.minimum(first, tl.where(inside, position, 0x7FFFFFFF))
            sign = sign_of(tl.min(first, axis=1)[:, None], top)
        tl.store(scale_ptr + block, flipped(scale, sign), mask=block < n_blocks)
        # The bits of Inf and NaN are not below 0x7F800000.
        usable = inside & (top > 0) & (top < 0x7F800000)

    if STOCHASTIC:
        scale = tl.where(usable, scale, 1.0)
        w0, w1, w2, w3 = philox(seed, (block * WIDTH + column).to(tl.uint32))
        words = (w0, w1, w2, w3)
    codes = ()
    for s in tl.static_range(8):
        x = xs[s]
        if SIGNED:
            x = flipped(x, sign)
        code = _find(x, scale, bounds_ptr, BITS, STOCHASTIC)
        if STOCHASTIC:
            r = (words[s // 2].to(tl.uint32) >> (s % 2 * 16)) & 0xFFFF
            u = (r.to(tl.float32) + 0.5) * (1.0 / 65536)
            low = tl.load(values_ptr + code)
            gap = tl.load(values_ptr + code + 1) - low
            code += (x > (low + u * gap) * scale).to(tl.int32)
            code = tl.where(usable & (x == x), code, 0)
        codes = codes + (code,)  # noqa: RUF005

    store_codes(codes_ptr + block * (WIDTH * BITS) + column, codes, inside, BITS, WIDTH)


@triton.jit
def _dequantize_kernel(
    codes_ptr, scale_ptr, values_ptr, out_ptr, n, n_blocks,
    BITS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, GROUPS: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    PER_LANE: tl.constexpr = 1 if BITS % 2 else (2 if BITS % 4 else (4 if BITS % 8 else 8))
    LANES: tl.constexpr = 8 // PER_LANE
    block = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    column = tl.arange(0, WIDTH_PAD)[None, :]
    inside = (block < n_blocks) & (column < WIDTH)
    start = block * (WIDTH * 8) + column
    source = codes_ptr + block * (WIDTH * BITS) + column
    left = left_of(block, n, WIDTH)
    scale = 1.0
    if not SCALED:
        scale = tl.load(scale_ptr + block, mask=block < n_blocks, other=0.0)
    for h in tl.static_range(PER_LANE):
        codes = load_codes(source, inside, h, BITS, WIDTH)
        for lane in tl.static_range(LANES):
            code = codes[lane]
            offset = (lane * PER_LANE + h) * WIDTH
            valid = inside & (offset + column < left)
            tl.store(out_ptr + start + offset, tl.load(values_ptr + code) * scale, mask=valid)


def quantize(x, book: Codebook, seed, codes, scale):
    """Write the codes of `x`, and the scales of its blocks unless all scales are 1."""
    n_blocks, width = codes.shape[0], codes.shape[1] // book.bits
    if n_blocks == 0:
        return
    values, scaled = book.values(x.device), scale is None
    options = tile(width * 8)
    # Without contraction the results equal the reference's bit for bit.
    launch(
        _quantize_kernel, (triton.cdiv(n_blocks, options["GROUPS"]),), x,
        inner_bounds(book, x.device, stochastic=seed is not None), values, codes,
        values if scaled else scale, x.numel(), n_blocks, seed or 0,
        BITS=book.bits, WIDTH=width, SCALED=scaled, STOCHASTIC=seed is not None,
        SIGNED=book.signed and not scaled, enable_fp_fusion=False, **options,
    )  # fmt: skip


def dequantize(codes, book: Codebook, out, scale):
    """Write the values of codes to `out`, times the scales if there are any."""
    n_blocks, width = codes.shape[0], codes.shape[1] // book.bits
    if n_blocks == 0:
        return
    values, scaled = book.values(codes.device), scale is None
    options = tile(width * 8)
    launch(
        _dequantize_kernel, (triton.cdiv(n_blocks, options["GROUPS"]),), codes,
        values if scaled else scale, values, out, out.numel(), n_blocks,
        BITS=book.bits, WIDTH=width, SCALED=scaled, enable_fp_fusion=False, **options,
    )  # fmt: skip
