"""Triton kernels of `split`, for bfloat16; and the weights of the fused steps, of any form."""

import torch
import triton
import triton.language as tl

from memtrain.kernels.device_guard import launch
from memtrain.kernels.random.philox_triton import philox

_WIDTH = tl.constexpr(128)  # an eighth of a block of `split.BLOCK` elements
_BLOCKS = tl.constexpr(4)
_TILE = tl.constexpr(2048)
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
def _split_kernel(master_ptr, weight_ptr, correction_ptr, n, KEPT: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * _TILE + tl.arange(0, _TILE)
    inside = at < n
    bits = tl.load(master_ptr + at, mask=inside, other=0).to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    weight, lost = _halves(bits, magnitude, _rounded(magnitude, KEPT), KEPT)
    if KEPT:
        tl.store(correction_ptr + at, lost.to(correction_ptr.dtype.element_ty), mask=inside)
    tl.store(weight_ptr + at, weight, mask=inside)


@triton.jit(do_not_specialize=["seed"])
def _stochastic_kernel(master_ptr, weight_ptr, n, n_blocks, seed):
    block = tl.program_id(0).to(tl.int64) * _BLOCKS + tl.arange(0, _BLOCKS)[:, None]
    column = tl.arange(0, _WIDTH)[None, :]
    w0, w1, w2, w3 = philox(seed, (block * _WIDTH + column).to(tl.uint32))
    words = (w0, w1, w2, w3)
    for s in tl.static_range(8):
        at = (block * 8 + s) * _WIDTH + column
        inside = (block < n_blocks) & (at < n)
        bits = tl.load(master_ptr + at, mask=inside, other=0).to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        draw = (words[s // 2].to(tl.uint32) >> (s % 2 * 16)) & 0xFFFF
        weight, _ = _halves(bits, magnitude, (magnitude + draw) >> 16, 0)
        tl.store(weight_ptr + at, weight, mask=inside)


@triton.jit
def _merge_kernel(weight_ptr, correction_ptr, master_ptr, n, KEPT: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * _TILE + tl.arange(0, _TILE)
    inside = at < n
    word = tl.load(weight_ptr + at, mask=inside, other=0).to(tl.int32) << 16
    if KEPT:
        difference = tl.load(correction_ptr + at, mask=inside, other=0).to(tl.int32)
        word += difference << (16 - KEPT)
    tl.store(master_ptr + at, word, mask=inside)


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
def ticked(seed, tick):
    """The seed of this step: with the number at address `tick` mixed in, unless that is 0."""
    if tick != 0:
        seed ^= tl.load(tick.to(tl.pointer_type(tl.int64)))
    return seed


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
            weight = nearest(master, weight_ptr.dtype.element_ty)
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


@triton.jit
def nearest(x, dtype: tl.constexpr):
    """To the nearest value of `dtype`, ties to even: Triton's interpreter truncates to bfloat16."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        up = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        bits = tl.where(x == x, up, bits | 0x400000)  # NaN stays NaN
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


def split(master, weight, correction, *, seed, stochastic):
    n, bits, out = weight.numel(), master.view(torch.int32), weight.view(torch.int16)
    if stochastic:
        n_blocks = triton.cdiv(n, 8 * _WIDTH.value)
        grid = (triton.cdiv(n_blocks, _BLOCKS.value),)
        launch(_stochastic_kernel, grid, bits, out, n, n_blocks, seed)
        return
    grid = (triton.cdiv(n, _TILE.value),)
    lost = out if correction is None else correction
    launch(_split_kernel, grid, bits, out, lost, n, KEPT=_kept(correction))


def merge(weight, correction, master):
    n, bits = weight.numel(), weight.view(torch.int16)
    grid = (triton.cdiv(n, _TILE.value),)
    given = bits if correction is None else correction
    out = master.view(torch.int32)
    launch(_merge_kernel, grid, bits, given, out, n, KEPT=_kept(correction))


def _kept(correction):
    return 0 if correction is None else 8 * correction.element_size()


_FORMS = ((0, "*i16"), (8, "*i8"), (16, "*i16"))
_WEIGHT, _MASTER = {"weight_ptr": "*i16"}, {"master_ptr": "*i32"}
AOT_CASES = [
    *(
        (kernel, _WEIGHT | _MASTER | {"correction_ptr": dtype, "n": "i32"}, {"KEPT": kept})
        for kernel in (_split_kernel, _merge_kernel)
        for kept, dtype in _FORMS
    ),
    (
        _stochastic_kernel,
        _WEIGHT | _MASTER | {"n": "i32", "n_blocks": "i32", "seed": "i64"},
        {},
    ),
]
