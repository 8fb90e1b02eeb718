"""Triton kernel of `softmax_gradient.py`: codes of a log-softmax become a gradient in one pass."""

import triton
import triton.language as tl

from memtrain.kernels.device_guard import launch
from memtrain.kernels.group.group_triton import (
    half_step,
    left_of,
    load_bounds,
    load_codes,
    tile,
)


@triton.jit
def _gradient_kernel(
    dx_ptr,
    codes_ptr,
    bounds_ptr,
    scale_ptr,
    class_ptr,
    n,
    n_groups,
    size,  # elements of a row
    each,  # class's share of the smoothing
    hit,  # what the row's own class gets besides
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    BIG: tl.constexpr,  # 2**31 elements or more
    LONG: tl.constexpr,  # a group lies in two rows at most
    SMOOTH: tl.constexpr,
):
    LEVELS: tl.constexpr = float(2**BITS - 1)
    PER_LANE: tl.constexpr = 1 if BITS % 2 else (2 if BITS % 4 else (4 if BITS % 8 else 8))
    LANES: tl.constexpr = 8 // PER_LANE
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    column = tl.arange(0, WIDTH_PAD)[None, :]
    here = group < n_groups
    inside = here & (column < WIDTH)
    lo, hi = load_bounds(bounds_ptr, group, here)
    step = half_step(lo, hi, LEVELS)
    base = 0.5 * lo
    left = left_of(group, n, WIDTH)
    # Where a group begins: its row, and its place in it. Divided once a group.
    first = group * (WIDTH * 8)
    if not BIG:
        first = first.to(tl.int32)
    row = first // size
    begin = (first - row * size).to(tl.int32)
    row = row.to(tl.int64)
    if LONG:
        second = here & (begin + left > size)
        scale_one = tl.load(scale_ptr + row, mask=here, other=0.0)
        scale_two = tl.load(scale_ptr + row + 1, mask=second, other=0.0)
        # Places of the two rows' classes from the group's begin on.
        class_one = tl.load(class_ptr + row, mask=here, other=0).to(tl.int32) - begin
        class_two = tl.load(class_ptr + row + 1, mask=second, other=0).to(tl.int32)
        class_two += size - begin
    source = codes_ptr + group * (WIDTH * BITS) + column
    for h in tl.static_range(PER_LANE):
        codes = load_codes(source, inside, h, BITS, WIDTH)
        for lane in tl.static_range(LANES):
            at = (lane * PER_LANE + h) * WIDTH + column
            valid = inside & (at < left)
            if LONG:
                in_one = begin + at < size
                scale = tl.where(in_one, scale_one, scale_two)
                own = at == tl.where(in_one, class_one, class_two)
            else:
                over = (begin + at) // size
                scale = tl.load(scale_ptr + row + over, mask=valid, other=0.0)
                found = tl.load(class_ptr + row + over, mask=valid, other=0).to(tl.int32)
                own = begin + at - over * size == found
            value = tl.exp(2.0 * (base + codes[lane].to(tl.float32) * step)) * scale
            if SMOOTH:
                value -= scale * each
            value = tl.where(own, value + scale * hit, value)
            to = dx_ptr + group * (WIDTH * 8) + at
            tl.store(to, value.to(dx_ptr.dtype.element_ty), mask=valid)


def gradient(dx, codes, bounds, scale, classes, bits, group_size, smoothing):
    n_groups = codes.shape[0]
    if n_groups == 0:
        return
    options = tile(group_size)
    launch(
        _gradient_kernel,
        (triton.cdiv(n_groups, options["GROUPS"]),),
        dx,
        codes,
        bounds,
        scale,
        classes,
        dx.numel(),
        n_groups,
        dx.shape[1],
        float(smoothing / max(dx.shape[1], 1)),
        float(smoothing - 1),
        BITS=bits,
        WIDTH=group_size // 8,
        BIG=dx.numel() >= 2**31,
        LONG=dx.shape[1] >= group_size,
        SMOOTH=smoothing != 0,
        enable_fp_fusion=False,
        **options,
    )
