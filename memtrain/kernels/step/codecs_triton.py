"""Blocks of codes of optimizer states in Triton, as `codecs.py` says."""

import triton
import triton.language as tl

from memtrain.kernels.codebook.quantize_triton import flipped, magnitude, position_and_sign, sign_of
from memtrain.kernels.ptx import PTX
from memtrain.kernels.step.codecs import MANTISSA
from memtrain.kernels.step.table_triton import address, floats

TINY = tl.constexpr(0x12800000)  # bits of 2**-90: bounds times smaller scales lose bits
SHIFT4, SHIFT8 = (tl.constexpr(23 - MANTISSA[bits]) for bits in (4, 8))  # of `upper_buckets`
CENTRE4, CENTRE8 = (tl.constexpr(2 ** (8 + MANTISSA[bits])) for bits in (4, 8))


def _loading(kind, nbytes):
    load = f"mad.wide.s32 at, $2, {nbytes}, $1; ld.global.nc.{kind} $0, [at];"
    return tl.constexpr(f"{{ .reg .b64 at; {load} }}")


_LOAD_FLOAT, _LOAD_LONG, _LOAD_BYTE = _loading("f32", 4), _loading("b64", 8), _loading("u8", 1)


@triton.jit
def looked_up(table, index):
    """`table[index]`, of a table that no kernel writes: float32 and int64 as they are, uint8 int32.

    By PTX, whose results lie where its arguments do. Of a `tl.load` of such addresses Triton 3.6
    takes a layout that runs down columns: all that is looked up goes through shared memory twice.
    """
    if not PTX:
        return tl.load(table + index)
    elif table.dtype.element_ty == tl.float32:
        return tl.inline_asm_elementwise(
            _LOAD_FLOAT, "=f,l,r", [table.to(tl.int64), index], tl.float32, is_pure=True, pack=1
        )
    elif table.dtype.element_ty == tl.int64:
        return tl.inline_asm_elementwise(
            _LOAD_LONG, "=l,l,r", [table.to(tl.int64), index], tl.int64, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _LOAD_BYTE, "=r,l,r", [table.to(tl.int64), index], tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _encode(x, state, scale, usable, SCALED: tl.constexpr, BITS: tl.constexpr):
    """The bounds (times the scale) below x: how many by its upper bits, and whether one more is."""
    SHIFT: tl.constexpr = SHIFT8 if BITS == 8 else SHIFT4
    CENTRE: tl.constexpr = CENTRE8 if BITS == 8 else CENTRE4
    starts_ptr = state[3] + CENTRE
    ratio = x
    if SCALED:
        ratio = x * (1.0 / tl.where(usable, scale, 1.0))
        starts_ptr += tl.where(usable, 0, 2 * CENTRE)
    start = looked_up(starts_ptr, ratio.to(tl.int32, bitcast=True) >> SHIFT)
    code = start.to(tl.int32)
    if BITS == 8:
        bound = looked_up(state[2] + 256, code)
    else:
        bound = (start >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    if SCALED:
        bound *= scale + (scale - scale)  # Inf becomes NaN: no bound is below x
    return code, x > bound


@triton.jit
def _encode_halves(low, high, state, scale, usable, SCALED: tl.constexpr, BITS: tl.constexpr):
    """The codes of both halves; of 4 bits in one byte."""
    low_code, low_more = _encode(low, state, scale, usable, SCALED, BITS)
    high_code, high_more = _encode(high, state, scale, usable, SCALED, BITS)
    if BITS == 8:
        low_code = tl.where(low_more, low_code + 1, low_code)
        return low_code, tl.where(high_more, high_code + 1, high_code)
    else:
        byte = low_code + (high_code << 4)
        byte = tl.where(low_more, byte + 1, byte)
        return tl.where(high_more, byte + 16, byte)


@triton.jit
def _encode_tiny(x, state, scale, BITS: tl.constexpr):
    """The same by halving: products of bounds and tiny scales lose bits, and more is in doubt."""
    scale += scale - scale
    code = tl.zeros(x.shape, dtype=tl.int32)
    for k in tl.static_range(BITS):
        bound = looked_up(state[2] + (2**BITS + 2 ** (BITS - 1 - k) - 1), code) * scale
        code = tl.where(x > bound, code + 2 ** (BITS - 1 - k), code)
    return code


@triton.jit
def _encode_drawn(x, state, scale, u):
    """Return 4-bit codes as `quantize.encode_drawn` does."""
    scale += scale - scale
    low = tl.zeros(x.shape, dtype=tl.int32)
    for k in tl.static_range(4):
        bound = looked_up(state[2] + 2 ** (3 - k), low) * scale
        low = tl.where(x > bound, low + 2 ** (3 - k), low)
    from_ = looked_up(state[2], low)
    bound = (from_ + u * (looked_up(state[2] + 1, low) - from_)) * scale
    return tl.where(x > bound, low + 1, low)


@triton.jit
def write_drawn(state, top, real, at, low, high, u_low, u_high):
    """Quantise both halves of the blocks of a 4-bit state as `quantize.encode_drawn` does."""
    scale = top.to(tl.float32, bitcast=True)
    low_code = _encode_drawn(low, state, scale, u_low)
    high_code = _encode_drawn(high, state, scale, u_high)
    tl.store(state[0] + at, (low_code | (high_code << 4)).to(tl.uint8), mask=real)


@triton.jit
def state_at(
    table_ptr, tensor, state, first, BITS: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """A state's addresses from element `first` on: numbers or codes, scales, values, buckets."""
    if BITS == 32:
        data = address(table_ptr, tensor, state, tl.float32, WHOLE) + first
    else:
        data = address(table_ptr, tensor, state, tl.uint8, WHOLE) + first // (8 // BITS)
    scale = floats(table_ptr, tensor, state + 1) + first // SIZE
    values = floats(table_ptr, tensor, state + 2)
    if BITS == 8:
        starts = address(table_ptr, tensor, state + 3, tl.uint8, False)
    else:
        starts = address(table_ptr, tensor, state + 3, tl.int64, False)
    return data, scale, values, starts


@triton.jit
def read_codes(state, real, at, BITS: tl.constexpr, HALF: tl.constexpr):
    """The codes of both halves of the blocks of one state."""
    byte = tl.load(state[0] + at, mask=real, other=0).to(tl.int32)
    if BITS == 8:
        high = tl.load(state[0] + at + HALF, mask=real, other=0).to(tl.int32)
        return byte, high
    return byte & 15, byte >> 4


@triton.jit
def write_scale(low, high, state, row, real, lane, HALF: tl.constexpr, SIGNED: tl.constexpr):
    """Store each block's new scale; return its magnitude's bits and the halves, sign removed."""
    larger = tl.maximum(tl.abs(low), tl.abs(high), propagate_nan=tl.PropagateNan.ALL)
    top = tl.max(magnitude(larger), axis=1)[:, None]
    scale = top
    if SIGNED:
        first = tl.minimum(
            position_and_sign(low, top, lane), position_and_sign(high, top, lane + HALF)
        )
        sign = sign_of(tl.min(first, axis=1)[:, None], top)
        scale = top | sign
        low, high = flipped(low, sign), flipped(high, sign)
    tl.store(state[1] + row, scale.to(tl.float32, bitcast=True), mask=real)
    return top, low, high


@triton.jit
def write_codes(
    state, top, tiny, real, at, low, high,
    SCALED: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Quantise both halves of the blocks of one state; SCALED: by a scale of each block."""
    scale = top.to(tl.float32, bitcast=True)
    usable = (top > 0) & (top < 0x7F800000)
    if not SCALED:
        codes = _encode_halves(low, high, state, scale, usable, False, BITS)
    elif tiny:
        low_code = _encode_tiny(low, state, scale, BITS)
        high_code = _encode_tiny(high, state, scale, BITS)
        codes = (low_code, high_code) if BITS == 8 else low_code | (high_code << 4)
    else:
        codes = _encode_halves(low, high, state, scale, usable, True, BITS)
    if BITS == 8:
        tl.store(state[0] + at, codes[0].to(tl.uint8), mask=real)
        tl.store(state[0] + at + HALF, codes[1].to(tl.uint8), mask=real)
    else:
        tl.store(state[0] + at, codes.to(tl.uint8), mask=real)
