"""Triton kernels of `patch.py`: one lane per patch, sixteen values per lane.

With `INNER` 1 (NCHW) a lane reads its four rows as runs of four, by one wide load if `WHOLE`. Else
(NHWC) neighbouring lanes are neighbouring channels.
"""

import triton
import triton.language as tl

from memtrain.kernels import cpu
from memtrain.kernels.device_guard import launch
from memtrain.kernels.group.group_triton import bound
from memtrain.kernels.random.philox_triton import philox

_TWO_THIRDS = tl.constexpr(0.6666666865348816)
_LANES = 128


@triton.jit
def _round(x, KIND: tl.constexpr):
    if KIND == 1:
        x = x.to(tl.bfloat16).to(tl.float32)
    if KIND == 2:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def _inner_levels(lo, hi, KIND: tl.constexpr):
    third = (0.5 * hi - 0.5 * lo) * _TWO_THIRDS
    return _round(lo + third, KIND), _round(hi - third, KIND)


@triton.jit
def _bound_bits(x, KIND: tl.constexpr):
    if KIND == 2:
        bits = x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    else:
        bits = x.to(tl.uint32, bitcast=True) >> 16
    return tl.where(x == x, bits, 0x7E00 if KIND == 2 else 0x7FC0)


@triton.jit
def _bound_value(bits, KIND: tl.constexpr):
    if KIND == 2:
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _corner(patch, rows, columns, inner, INNER_ONE: tl.constexpr):
    # The patch's first row over all planes, that row and column in its map, and its channel.
    down, across = (rows + 3) // 4, (columns + 3) // 4
    channel = patch * 0
    if not INNER_ONE:
        channel = patch % inner
        patch = patch // inner
    column = patch % across * 4
    patch = patch // across
    return patch // down, patch % down * 4, column, channel


@triton.jit(do_not_specialize=["seed"])
def _quantize_kernel(
    x_ptr, words_ptr, n_patches, rows, columns, inner, seed,
    INNER_ONE: tl.constexpr,
    WHOLE: tl.constexpr,  # whether 4 divides the columns, and the pointer is aligned
    KIND: tl.constexpr,  # 0 float32, 1 bfloat16, 2 float16
    STOCHASTIC: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    patch = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = patch < n_patches
    plane, row, column, channel = _corner(patch, rows, columns, inner, INNER_ONE)
    xs = ()
    for r in tl.static_range(4):
        # A missing row or column repeats the patch's first.
        y = tl.where(row + r < rows, row + r, row)
        start = (plane.to(tl.int64) * rows + y) * columns + column
        if INNER_ONE:
            c = tl.arange(0, 4)[None, :]
            if WHOLE:
                start = tl.multiple_of(start, 4)
                at = start[:, None] + c
            else:
                at = start[:, None] + tl.where(column[:, None] + c < columns, c, 0)
            x = tl.load(x_ptr + at, mask=inside[:, None], other=0).to(tl.float32)
            even, odd = tl.split(tl.reshape(x, (LANES, 2, 2)))
            first, third = tl.split(even)
            second, fourth = tl.split(odd)
            xs = xs + (first, second, third, fourth)  # noqa: RUF005 (the compiler knows no other)
        else:
            for c in tl.static_range(4):
                at = start + tl.where(column + c < columns, c, 0)
                x = tl.load(x_ptr + at * inner + channel, mask=inside, other=0)
                xs = xs + (x.to(tl.float32),)  # noqa: RUF005

    lo = tl.full((LANES,), float("inf"), tl.float32)
    hi = -lo
    for k in tl.static_range(16):
        finite = tl.fma(xs[k], 0.0, xs[k])  # NaN for others, which minima and maxima ignore
        lo, hi = tl.minimum(lo, finite), tl.maximum(hi, finite)
    some = lo < float("inf")
    lo = tl.where(some, bound(lo, False, KIND == 0), float("nan"))
    hi = tl.where(some, bound(hi, True, KIND == 0), float("nan"))
    second, third = _inner_levels(lo, hi, KIND)

    # Halves, since a difference may overflow.
    base0, base1, base2 = 0.5 * lo, 0.5 * second, 0.5 * third
    width0, width1, width2 = base1 - base0, base2 - base1, 0.5 * hi - base2
    bounds = _bound_bits(lo, KIND) | (_bound_bits(hi, KIND) << 16)
    codes = tl.zeros((LANES,), tl.uint32)
    for half in tl.static_range(2):
        if STOCHASTIC:
            counter = patch + half * n_patches
            w0, w1, w2, w3 = philox(seed, counter.to(tl.uint32))
            draws = (w0, w1, w2, w3)
        for k in tl.static_range(8):
            u = 0.5
            if STOCHASTIC:
                r = (draws[k // 2].to(tl.uint32) >> (k % 2 * 16)) & 0xFFFF
                u = (r.to(tl.float32) + 0.5) * (1.0 / 65536)
            x = 0.5 * xs[half * 8 + k]
            code = (x - base0 >= u * width0).to(tl.uint32)
            code += (x - base1 >= u * width1).to(tl.uint32)
            code += (x - base2 >= u * width2).to(tl.uint32)
            codes |= code << (half * 16 + k * 2)
    words = bounds.to(tl.int64) | (codes.to(tl.int64) << 32)
    tl.store(words_ptr + patch, words, mask=inside)


@triton.jit
def _dequantize_kernel(
    words_ptr, out_ptr, n_patches, rows, columns, inner,
    INNER_ONE: tl.constexpr, WHOLE: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    patch = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = patch < n_patches
    plane, row, column, channel = _corner(patch, rows, columns, inner, INNER_ONE)
    word = tl.load(words_ptr + patch, mask=inside, other=0)
    bounds = (word & 0xFFFFFFFF).to(tl.uint32)
    codes = ((word >> 32) & 0xFFFFFFFF).to(tl.uint32)
    lo = _bound_value(bounds & 0xFFFF, KIND)
    hi = _bound_value(bounds >> 16, KIND)
    second, third = _inner_levels(lo, hi, KIND)
    for r in tl.static_range(4):
        start = (plane.to(tl.int64) * rows + row + r) * columns + column
        valid = inside & (row + r < rows)
        values = ()
        for c in tl.static_range(4):
            code = codes >> (r * 8 + c * 2)
            low = tl.where((code & 1) != 0, second, lo)
            high = tl.where((code & 1) != 0, hi, third)
            value = tl.where((code & 2) != 0, high, low)
            values = values + (value.to(out_ptr.dtype.element_ty),)  # noqa: RUF005
        if INNER_ONE:
            c = tl.arange(0, 4)[None, :]
            if WHOLE:
                start = tl.multiple_of(start, 4)
            pairs = tl.join(tl.join(values[0], values[2]), tl.join(values[1], values[3]))
            mask = valid[:, None] & (column[:, None] + c < columns)
            if WHOLE:
                mask = valid[:, None]
            tl.store(out_ptr + start[:, None] + c, tl.reshape(pairs, (LANES, 4)), mask=mask)
        else:
            for c in tl.static_range(4):
                at = (start + c) * inner + channel
                tl.store(out_ptr + at, values[c], mask=valid & (column + c < columns))


def _options(maps):
    columns, inner = maps.shape[2:]
    whole = inner == 1 and columns % 4 == 0 and maps.data_ptr() % 16 == 0
    # Without contraction the results equal the reference's bit for bit.
    return {
        "INNER_ONE": inner == 1,
        "WHOLE": whole,
        "KIND": cpu.FLOAT_TYPES[maps.dtype],
        "LANES": _LANES,
        "enable_fp_fusion": False,
    }


def quantize(x, words, seed, stochastic):
    n = words.numel()
    if n:
        grid = (triton.cdiv(n, _LANES),)
        options = _options(x) | {"STOCHASTIC": stochastic}
        launch(_quantize_kernel, grid, x, words, n, *x.shape[1:], seed, **options)


def dequantize(words, out):
    n = words.numel()
    if n:
        grid = (triton.cdiv(n, _LANES),)
        launch(_dequantize_kernel, grid, words, out, n, *out.shape[1:], **_options(out))
