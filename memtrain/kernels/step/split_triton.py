"""Weights of the Triton steps, read as float32 masters and written, of any `MasterWeight`."""

import triton
import triton.language as tl

from memtrain.kernels.random.philox_triton import philox

_WIDTH = tl.constexpr(128)  # an eighth of a block of `split.BLOCK` elements
DRAWN = tl.constexpr(1)  # in place of a correction's bits: stochastic rounding


@triton.jit
def _rounded(magnitude, KEPT: tl.constexpr):
    LOST: tl.constexpr = 16 - KEPT
    rounded = magnitude
    if LOST > 0:
        rounded = (magnitude + ((1 << (LOST - 1)) - 1) + ((magnitude >> LOST) & 1)) >> LOST
    return rounded


@triton.jit
def _halves(bits, magnitude, rounded, KEPT: tl.constexpr):
    """The weight's bits, and what `rounded` (to 16 + KEPT bits) has besides them."""
    upper = (rounded + ((1 << KEPT) >> 1)) >> KEPT
    nan = magnitude > 0x7F800000
    lost = tl.where(nan, 0, rounded.to(tl.int32) - (upper << KEPT).to(tl.int32))
    upper = tl.where(nan, 0x7FC0, upper)
    return (((bits >> 16) & 0x8000) | upper).to(tl.int16), lost


@triton.jit
def _ulp(half):
    """Of float16 numbers, given their bits: bits of the distance; of 1 where it is Inf or NaN."""
    exponent = (half & 0x7C00) >> 10
    return tl.where(exponent == 31, 127 << 23, (tl.maximum(exponent, 1) + 102) << 23)


@triton.jit
def read_weight(weight_ptr, lost_ptr, at, inside, KEPT: tl.constexpr):
    """float32 masters; corrections are read where KEPT is 8 or 16."""
    low = tl.load(weight_ptr + at, mask=inside)
    master = low.to(tl.float32)
    if KEPT > DRAWN:
        lost = tl.load(lost_ptr + at, mask=inside).to(tl.int32)
        bits = low.to(tl.int16, bitcast=True).to(tl.int32)
        if weight_ptr.dtype.element_ty == tl.float16:
            unit = (_ulp(bits) - (KEPT << 23)).to(tl.float32, bitcast=True)
            master += lost.to(tl.float32) * unit
        else:
            master = ((bits << 16) + (lost << (16 - KEPT))).to(tl.float32, bitcast=True)
    return master


@triton.jit
def block_order(COUNT: tl.constexpr, HALF: tl.constexpr, MASTER: tl.constexpr):
    """Which of a program's COUNT blocks each row is.

    Where blocks of 128 draw, two share their words: a thread has both.
    """
    row = tl.arange(0, COUNT)
    if MASTER == DRAWN and HALF < _WIDTH:
        row = row % (COUNT // 2) * 2 + row // (COUNT // 2)
    return row


@triton.jit
def draws(seed, chunk, HIGH: tl.constexpr, COUNT: tl.constexpr, HALF: tl.constexpr):
    """The 16 random bits of one half of each of a program's blocks in `block_order`, [COUNT, HALF].

    One counter serves eight elements, which other threads own: the words move once through shared
    memory, and no counter is drawn twice (not even where both halves share words: the compiler sees
    that they are the same).
    """
    RUNS: tl.constexpr = COUNT * HALF // 512  # of 8 * _WIDTH elements
    run = chunk.to(tl.int64) * RUNS + tl.arange(0, RUNS)[:, None]
    first = HALF if HIGH and HALF < _WIDTH else 0
    w0, w1, w2, w3 = philox(seed, run * _WIDTH + first + tl.arange(0, HALF)[None, :])
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # word 2 i + j at [run, position, i, j]
    words = tl.permute(tl.reshape(words, (RUNS, HALF, 4)), (0, 2, 1))
    words = tl.reshape(words, (RUNS * 4, HALF))
    if HALF < _WIDTH:
        words = tl.permute(tl.join(words & 0xFFFF, words >> 16), (2, 0, 1))
        return tl.reshape(words, (COUNT, HALF))
    else:
        return words >> 16 if HIGH else words & 0xFFFF


@triton.jit
def write_weight(weight_ptr, lost_ptr, at, inside, master, draw, KEPT: tl.constexpr):
    """Round masters into weights; what that loses, into corrections."""
    if KEPT and weight_ptr.dtype.element_ty == tl.float16:
        _write_float16(weight_ptr, lost_ptr, at, inside, master, KEPT)
    else:
        bits = master.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        if KEPT == DRAWN:
            # A NaN that arithmetic made is quiet: 0x7FC00000 or above.
            drawn = tl.minimum(magnitude + draw, 0x7FC00000)
            weight = (((bits & 0x80000000) | drawn) >> 16).to(tl.int16)
            weight = weight.to(tl.bfloat16, bitcast=True)
        elif KEPT:
            weight, lost = _halves(bits, magnitude, _rounded(magnitude, KEPT), KEPT)
            tl.store(lost_ptr + at, lost.to(lost_ptr.dtype.element_ty), mask=inside)
            weight = weight.to(tl.bfloat16, bitcast=True)
        else:
            weight = master.to(weight_ptr.dtype.element_ty)
        tl.store(weight_ptr + at, weight, mask=inside)


@triton.jit
def _write_float16(weight_ptr, lost_ptr, at, inside, master, KEPT: tl.constexpr):
    weight = master.to(tl.float16)
    bits = weight.to(tl.int16, bitcast=True).to(tl.int32)
    per_ulp = ((254 + KEPT - (_ulp(bits) >> 23)) << 23).to(tl.float32, bitcast=True)
    finite = (bits & 0x7C00) != 0x7C00
    units = tl.where(finite, master - weight.to(tl.float32), 0.0) * per_ulp
    # To the nearest integer, ties to even: at most half of 2**KEPT in magnitude.
    units = ((units + 12582912.0) - 12582912.0).to(tl.int32)
    most = (1 << (KEPT - 1)) - 1
    units = tl.minimum(tl.maximum(units, -most - 1), most)
    tl.store(lost_ptr + at, units.to(lost_ptr.dtype.element_ty), mask=inside)
    tl.store(weight_ptr + at, weight, mask=inside)
