"""Triton kernels of `norm.py`.

Forward a program takes a row, or a part of a long one: it reads the row twice for the sums and its
part once more, from memory only the first time. Backward it holds a row in registers, and takes
some rows one after the other: their sums over columns stay there too.
"""

import torch
import triton
import triton.language as tl

from memtrain.kernels.device_guard import launch
from memtrain.kernels.group.group_triton import (
    encode,
    half_step,
    load_bounds,
    load_codes,
)
from memtrain.kernels.norm.norm import rows_each


@triton.jit
def _sum(x_ptr, start, size, mean, SQUARE: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, size, BLOCK):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + start + column, mask=column < size, other=0.0).to(tl.float32)
        d = tl.where(column < size, x - mean, 0.0)
        total += d * d if SQUARE else d
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["seed"])
def _norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    rstd_ptr,
    codes_ptr,
    bounds_ptr,
    size,
    eps,
    seed,
    CENTRED: tl.constexpr,
    NARROW: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    per_row = size // (WIDTH * 8)
    tiles = (per_row + GROUPS - 1) // GROUPS
    program = tl.program_id(0)  # divided in 32 bits: 64 take a call, and a stack
    row, tile = (program // tiles).to(tl.int64), program % tiles
    mean = 0.0
    if CENTRED:
        # Rounded to nearest, else the mean of equal numbers is not theirs.
        total = _sum(x_ptr, row * size, size, 0.0, False, BLOCK)
        mean = tl.div_rn(total, tl.cast(size, tl.float32))
    rstd = 1.0 / tl.sqrt(_sum(x_ptr, row * size, size, mean, True, BLOCK) / size + eps)
    tl.store(rstd_ptr + row, rstd, mask=tile == 0)  # once, whichever parts the row has
    column = tl.arange(0, WIDTH_PAD)[None, :]
    local = tile * GROUPS + tl.arange(0, GROUPS)[:, None]
    here = local < per_row
    inside = here & (column < WIDTH)
    within = local * (WIDTH * 8) + column
    hats = ()
    for s in tl.static_range(8):
        at = within + s * WIDTH
        x = tl.load(x_ptr + row * size + at, mask=inside, other=0.0).to(tl.float32)
        hat = (x - mean) * rstd
        hats = hats + (tl.where(inside, hat, float("nan")),)  # noqa: RUF005 (the compiler knows no other form)
        value = hat
        if NARROW:
            value = hat.to(y_ptr.dtype.element_ty).to(tl.float32)
        w = tl.load(weight_ptr + at, mask=inside, other=0.0)
        b = tl.load(bias_ptr + at, mask=inside, other=0.0)
        y = (value * w + b).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row * size + at, y, mask=inside)
    encode(
        hats, codes_ptr, bounds_ptr, row * per_row + local, column, here, seed,
        BITS, WIDTH, WIDTH_PAD, GROUPS, STOCHASTIC,
    )  # fmt: skip


@triton.jit
def _decoded(
    codes_ptr,
    bounds_ptr,
    group,
    column,
    here,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """x_hat of groups, slice by slice."""
    PER_LANE: tl.constexpr = 1 if BITS % 2 else (2 if BITS % 4 else (4 if BITS % 8 else 8))
    lo, hi = load_bounds(bounds_ptr, group, here)
    step = 2.0 * half_step(lo, hi, float(2**BITS - 1))
    source = codes_ptr + group * (WIDTH * BITS) + column
    inside = here & (column < WIDTH)
    of_lanes = ()
    for h in tl.static_range(PER_LANE):
        of_lanes = of_lanes + (load_codes(source, inside, h, BITS, WIDTH),)  # noqa: RUF005
    hats = ()
    for s in tl.static_range(8):
        code = of_lanes[s % PER_LANE][s // PER_LANE]
        hats = hats + (lo + code.to(tl.float32) * step,)  # noqa: RUF005
    return hats


@triton.jit
def _backward_kernel(
    dy_ptr,
    codes_ptr,
    bounds_ptr,
    rstd_ptr,
    weight_ptr,
    dx_ptr,
    sums_ptr,  # [programs, 2 if CENTRED else 1, size]
    rows,
    rows_each,
    size,
    CENTRED: tl.constexpr,
    WEIGHT: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    first = program * rows_each
    last = tl.minimum(first + rows_each, rows)
    per_row = size // (WIDTH * 8)
    column = tl.arange(0, WIDTH_PAD)[None, :]
    local = tl.arange(0, GROUPS)[:, None]
    here = local < per_row
    inside = here & (column < WIDTH)
    within = local * (WIDTH * 8) + column
    dws = ()
    dbs = ()
    for _ in tl.static_range(8):
        dws = dws + (tl.zeros((GROUPS, WIDTH_PAD), tl.float32),)  # noqa: RUF005
        dbs = dbs + (tl.zeros((GROUPS, WIDTH_PAD), tl.float32),)  # noqa: RUF005
    for row in range(first, last):
        hats = _decoded(
            codes_ptr, bounds_ptr, row * per_row + local, column, here, BITS, WIDTH
        )  # fmt: skip
        start = row * size
        gs = ()
        new_dws = ()
        new_dbs = ()
        shifts = tl.zeros((GROUPS, WIDTH_PAD), tl.float32)
        slopes = tl.zeros((GROUPS, WIDTH_PAD), tl.float32)
        for s in tl.static_range(8):
            at = within + s * WIDTH
            dy = tl.load(dy_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
            new_dws = new_dws + (dws[s] + dy * hats[s],)  # noqa: RUF005
            new_dbs = new_dbs + (dbs[s] + dy,)  # noqa: RUF005
            if WEIGHT:
                dy *= tl.load(weight_ptr + at, mask=inside, other=0.0)
            shifts += dy
            slopes += dy * hats[s]
            gs = gs + (dy,)  # noqa: RUF005
        dws = new_dws
        if CENTRED:
            dbs = new_dbs
        slope = tl.sum(tl.sum(slopes, axis=1), axis=0) / size
        shift = 0.0
        if CENTRED:
            shift = tl.sum(tl.sum(shifts, axis=1), axis=0) / size
        rstd = tl.load(rstd_ptr + row)
        for s in tl.static_range(8):
            dx = (gs[s] - shift - hats[s] * slope) * rstd
            to = dx_ptr + start + within + s * WIDTH
            tl.store(to, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    to = sums_ptr + program * (size * 2 if CENTRED else size) + within
    for s in tl.static_range(8):
        tl.store(to + s * WIDTH, dws[s], mask=inside)
        if CENTRED:
            tl.store(to + size + s * WIDTH, dbs[s], mask=inside)


def backward(dy, codes, bounds, rstd, weight, dx, bits, group_size, centred):
    """Writes dx; returns the gradients of weight and bias."""
    rows, size = rstd.numel(), dy.numel() // rstd.numel()
    each = rows_each(rows)
    programs = triton.cdiv(rows, each)
    sums = rstd.new_empty(programs, 2 if centred else 1, size)
    launch(
        _backward_kernel,
        (programs,),
        dy,
        codes,
        bounds,
        rstd,
        rstd if weight is None else weight,
        dx,
        sums,
        rows,
        each,
        size,
        CENTRED=centred,
        WEIGHT=weight is not None,
        BITS=bits,
        enable_fp_fusion=True,
        **_backward_options(size, group_size),
    )
    dweight, *dbias = sums.sum(0)
    return dweight, dbias[0] if dbias else rstd.new_empty(0)


def _backward_options(size, group_size):
    """A row, sixteen elements to a thread."""
    width = triton.next_power_of_2(group_size // 8)
    groups = triton.next_power_of_2(size // group_size)
    warps = max(1, width * groups // 64)
    return {"WIDTH": group_size // 8, "WIDTH_PAD": width, "GROUPS": groups, "num_warps": warps}


def quantize(x, weight, bias, y, rstd, packed, bounds, size, eps, centred, narrow, codes):
    rows = rstd.numel()
    if rows == 0:
        return
    options = _options(size, codes.group_size)
    tiles = triton.cdiv(size // codes.group_size, options["GROUPS"])
    launch(
        _norm_kernel,
        (rows * tiles,),
        x,
        weight,
        bias,
        y,
        rstd,
        packed,
        bounds,
        size,
        eps,
        codes.seed,
        CENTRED=centred,
        NARROW=narrow and x.dtype != torch.float32,
        BITS=codes.bits,
        STOCHASTIC=codes.stochastic,
        enable_fp_fusion=False,
        **options,
    )


def _options(size, group_size):
    """Up to 4,096 elements of a row to a program, sixteen to a thread."""
    width = triton.next_power_of_2(group_size // 8)
    groups = min(max(1, 512 // width), triton.next_power_of_2(size // group_size))
    return {
        "WIDTH": group_size // 8,
        "WIDTH_PAD": width,
        "GROUPS": groups,
        "BLOCK": min(1024, triton.next_power_of_2(size)),
        # Without a limit ptxas takes 80, and spills two, where nothing is aligned.
        "maxnreg": 96,
        "num_warps": max(1, width * groups // 64),
    }
