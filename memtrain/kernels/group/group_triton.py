"""Triton kernels of `group.py`.

A group is eight slices of `group_size / 8` elements, one tile each. Slices share Philox counters,
and every lane of the packed layout is a run of whole slices, so no value is shuffled.
"""

import triton
import triton.language as tl

from memtrain.kernels.device_guard import launch
from memtrain.kernels.random.philox_triton import philox

_LIMIT = tl.constexpr(3.3895313892515355e38)
_TINY = tl.constexpr(2.0**-101)


@triton.jit
def bound(x, UP: tl.constexpr, TO_BFLOAT: tl.constexpr):
    """Round a minimum or maximum outwards to a bound within bfloat16's range."""
    if TO_BFLOAT:
        bits = x.to(tl.uint32, bitcast=True)
        positive = (bits >> 31) == 0
        enlarge = ((bits & 0xFFFF) != 0) & (positive if UP else (bits >> 31) != 0)
        bits = ((bits >> 16) + enlarge.to(tl.uint32)) << 16
        x = bits.to(tl.float32, bitcast=True)
    # Adding 0 turns -0 into 0, as in the reference.
    return tl.where(x > _LIMIT, _LIMIT, tl.where(x < -_LIMIT, -_LIMIT, x)) + 0.0


@triton.jit
def half_step(lo, hi, LEVELS: tl.constexpr):
    half = 0.5 * hi - 0.5 * lo
    return tl.where(half < _TINY, 0.0, tl.div_rn(half, half * 0.0 + LEVELS))


@triton.jit
def load_bounds(bounds_ptr, group, inside):
    lo = tl.load(bounds_ptr + group * 2, mask=inside, other=0)
    hi = tl.load(bounds_ptr + group * 2 + 1, mask=inside, other=0)
    return lo.to(tl.float32), hi.to(tl.float32)


@triton.jit
def _turned(word, odd):
    # Two groups share a counter; the odd one rotates its words (kernels/random/philox.py).
    word = word.to(tl.uint32)
    return tl.where(odd, (word >> 8) | (word << 24), word)


@triton.jit
def _words(seed, pair, column, like, WIDTH: tl.constexpr):
    # The shift gives 0 with the layout of the values. Random numbers with another layout would
    # travel through shared memory.
    nothing = (like.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> 31
    counter = (pair * WIDTH + column).to(tl.uint32) + nothing.to(tl.uint32)
    return philox(seed, counter)


@triton.jit
def store_codes(to, codes, inside, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Pack the codes of eight slices to `to`, the addresses of each position's first byte."""
    PER_LANE: tl.constexpr = 1 if BITS % 2 else (2 if BITS % 4 else (4 if BITS % 8 else 8))
    LANES: tl.constexpr = 8 // PER_LANE
    for h in tl.static_range(PER_LANE):
        for k in tl.static_range(LANES * BITS // 8):
            byte = tl.zeros(codes[0].shape, tl.int32)
            for lane in tl.static_range(LANES):
                if lane * BITS - 8 * k >= 0:
                    if lane * BITS - 8 * k < 8:
                        byte |= codes[lane * PER_LANE + h] << (lane * BITS - 8 * k)
                elif lane * BITS - 8 * k > -BITS:
                    byte |= codes[lane * PER_LANE + h] >> (8 * k - lane * BITS)
            tl.store(to + (k * PER_LANE + h) * WIDTH, (byte & 0xFF).to(tl.uint8), mask=inside)


@triton.jit
def load_codes(source, inside, H: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Unpack the codes of slice `H` of each lane: a tuple with one tile per lane."""
    PER_LANE: tl.constexpr = 1 if BITS % 2 else (2 if BITS % 4 else (4 if BITS % 8 else 8))
    LANES: tl.constexpr = 8 // PER_LANE
    loaded = ()
    for k in tl.static_range(LANES * BITS // 8):
        byte = tl.load(source + (k * PER_LANE + H) * WIDTH, mask=inside, other=0)
        loaded = loaded + (byte.to(tl.int32),)  # noqa: RUF005 (the compiler knows no other form)
    codes = ()
    for lane in tl.static_range(LANES):
        word = loaded[lane * BITS // 8]
        if lane * BITS % 8 + BITS > 8:
            word = word | (loaded[lane * BITS // 8 + 1] << 8)
        codes = codes + ((word >> (lane * BITS % 8)) & (2**BITS - 1),)  # noqa: RUF005
    return codes


@triton.jit
def left_of(group, n, WIDTH: tl.constexpr):
    """Return the number of elements of each group."""
    return tl.minimum(n - group * (WIDTH * 8), WIDTH * 8).to(tl.int32)


@triton.jit
def encode(
    xs,  # eight slices of float32, padded with NaN
    codes_ptr, bounds_ptr, group, column,
    here,  # mask of existing groups
    seed,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,  # elements of a slice
    WIDTH_PAD: tl.constexpr,  # the next power of two
    GROUPS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    drawn=None,  # random words of pairs of groups
    odd=None,  # whether these are the second groups of the pairs
):  # fmt: skip
    LEVELS: tl.constexpr = float(2**BITS - 1)
    inside = here & (column < WIDTH)
    lows = tl.full((GROUPS, WIDTH_PAD), float("inf"), tl.float32)
    highs = tl.full((GROUPS, WIDTH_PAD), float("-inf"), tl.float32)
    for s in tl.static_range(8):
        finite = tl.fma(xs[s], 0.0, xs[s])  # NaN for others, which minima and maxima ignore
        lows, highs = tl.minimum(lows, finite), tl.maximum(highs, finite)
    low = tl.min(lows, axis=1)[:, None]
    some = low < float("inf")  # a finite element
    lo = tl.where(some, bound(low, False, True), float("nan"))
    hi = tl.where(some, bound(tl.max(highs, axis=1)[:, None], True, True), float("nan"))
    step = half_step(lo, hi, LEVELS)
    inverse = tl.where(
        step > 0.0, tl.div_rn(step * 0.0 + 1.0, tl.where(step > 0.0, step, 1.0)), 0.0
    )
    tl.store(bounds_ptr + group * 2, lo.to(tl.bfloat16), mask=here)
    tl.store(bounds_ptr + group * 2 + 1, hi.to(tl.bfloat16), mask=here)

    if STOCHASTIC:
        if drawn is None:
            drawn = _words(seed, group // 2, column, xs[0], WIDTH)
            odd = (group % 2 == 1) & inside
        w0, w1, w2, w3 = drawn
        words = (_turned(w0, odd), _turned(w1, odd), _turned(w2, odd), _turned(w3, odd))
    base = 0.5 * lo
    codes = ()
    for s in tl.static_range(8):
        u = 0.5
        if STOCHASTIC:
            r = (words[s // 2] >> (s % 2 * 16)) & 0xFFFF
            # (r + 0.5) / 65536 exactly, from the bits of 2**23 + r
            u = tl.fma((r | 0x4B000000).to(tl.float32, bitcast=True), 2.0**-16, 2.0**-17 - 128.0)
        t = (0.5 * xs[s] - base) * inverse + u
        t = tl.minimum(tl.maximum(t, 0.0), LEVELS)  # 0 for NaN
        codes = codes + (t.to(tl.int32),)  # noqa: RUF005

    store_codes(codes_ptr + group * (WIDTH * BITS) + column, codes, inside, BITS, WIDTH)


@triton.jit(do_not_specialize=["seed"])
def _quantize_kernel(
    x_ptr, codes_ptr, bounds_ptr, n, n_groups,
    per_row, stride,  # groups per row, and elements between row starts
    seed,
    BITS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, GROUPS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,  # whether there are gaps between rows
):  # fmt: skip
    position = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    column = tl.arange(0, WIDTH_PAD)[None, :]
    drawn = None
    # If stochastic, a tile has both groups of each pair, which share random words.
    for odd in tl.static_range(2 if STOCHASTIC else 1):
        group = position
        if STOCHASTIC:
            group = 2 * position + odd
        here = group < n_groups
        left = left_of(group, n, WIDTH)
        start = group * (WIDTH * 8)
        if ROWS:
            row = group.to(tl.int32) // per_row
            start = row.to(tl.int64) * stride + (group - row * per_row) * (WIDTH * 8)
        xs = ()
        for s in tl.static_range(8):
            valid = (column < WIDTH) & (column + s * WIDTH < left)
            x = tl.load(x_ptr + start + column + s * WIDTH, mask=valid, other=float("nan"))
            xs = xs + (x.to(tl.float32),)  # noqa: RUF005 (the compiler knows no other form)
        if STOCHASTIC and odd == 0:
            drawn = _words(seed, position, column, xs[0], WIDTH)
        encode(
            xs, codes_ptr, bounds_ptr, group, column, here, seed,
            BITS, WIDTH, WIDTH_PAD, GROUPS, STOCHASTIC, drawn, odd == 1,
        )  # fmt: skip


@triton.jit
def _dequantize_kernel(
    codes_ptr, bounds_ptr, out_ptr, n, n_groups,
    BITS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    LEVELS: tl.constexpr = float(2**BITS - 1)
    PER_LANE: tl.constexpr = 1 if BITS % 2 else (2 if BITS % 4 else (4 if BITS % 8 else 8))
    LANES: tl.constexpr = 8 // PER_LANE
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    column = tl.arange(0, WIDTH_PAD)[None, :]
    inside = (group < n_groups) & (column < WIDTH)
    lo, hi = load_bounds(bounds_ptr, group, group < n_groups)
    step = half_step(lo, hi, LEVELS)
    base = 0.5 * lo
    start = group * (WIDTH * 8) + column
    source = codes_ptr + group * (WIDTH * BITS) + column
    for h in tl.static_range(PER_LANE):
        codes = load_codes(source, inside, h, BITS, WIDTH)
        for lane in tl.static_range(LANES):
            code = codes[lane]
            value = 2.0 * (base + code.to(tl.float32) * step)
            at = start + (lane * PER_LANE + h) * WIDTH
            valid = inside & (at < n)
            if out_ptr.dtype.element_ty == tl.float16:
                value = tl.where(value > 65504.0, 65504.0, value)
                value = tl.where(value < -65504.0, -65504.0, value)
            tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=valid)


def tile(group_size, elements=256):
    """Return the tile: padded slice width, groups and warps, 2 to 4 elements per thread and slice.

    A tile has `elements` of each slice, or one group. With 512, each thread has four.
    """
    width = triton.next_power_of_2(group_size // 8)
    groups = max(1, elements // width)
    # 16 warps leave 128 registers per thread, too few for four elements of both groups of a pair.
    warps = 32 if width > 1024 else max(4, width * groups // 128)
    return {"WIDTH_PAD": width, "GROUPS": groups, "num_warps": warps}


def _quantize_tile(group_size, in_rows):
    # Bounds and quotients per thread of a group serve twice as many elements. Addresses of rows
    # need the registers for that.
    options = tile(group_size, 256 if in_rows else 512)
    # Otherwise ptxas takes 168 registers for unaligned addresses, and spills one.
    return options | {"maxnreg": min(144, 65536 // (32 * options["num_warps"]))}


def quantize(x, codes, bounds, bits, group_size, seed, stochastic, columns=0, stride=0):
    """Quantise `x` in memory order, or rows of whole groups, given their length and stride."""
    n_groups = codes.shape[0]
    if n_groups == 0:
        return
    in_rows = columns > 0
    options = _quantize_tile(group_size, in_rows)
    each = options["GROUPS"] * (2 if stochastic else 1)
    # Without contraction the results equal the reference's bit for bit.
    launch(
        _quantize_kernel, (triton.cdiv(n_groups, each),), x, codes, bounds, x.numel(), n_groups,
        columns // group_size if in_rows else n_groups, stride if in_rows else n_groups,
        seed, BITS=bits, WIDTH=group_size // 8, STOCHASTIC=stochastic, ROWS=in_rows,
        enable_fp_fusion=False, **options,
    )  # fmt: skip


def dequantize(codes, bounds, out, bits, group_size):
    n_groups = codes.shape[0]
    if n_groups == 0:
        return
    options = tile(group_size)
    launch(
        _dequantize_kernel, (triton.cdiv(n_groups, options["GROUPS"]),), codes, bounds, out,
        out.numel(), n_groups, BITS=bits, WIDTH=group_size // 8, enable_fp_fusion=False, **options,
    )  # fmt: skip
