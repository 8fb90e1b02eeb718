"""Triton kernels of `norm.py`.

A program handles a row, or a part of a long row: it reads the row twice for the sums and its part
once more, from memory only the first time.
"""

import torch
import triton
import triton.language as tl

from memtrain.kernels.device_guard import launch
from memtrain.kernels.group.group_triton import encode


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
    x_ptr, weight_ptr, bias_ptr, y_ptr, rstd_ptr, codes_ptr, bounds_ptr, size, eps, seed,
    CENTRED: tl.constexpr, NARROW: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    per_row = size // (WIDTH * 8)
    tiles = (per_row + GROUPS - 1) // GROUPS
    program = tl.program_id(0)  # divided in 32 bits: a 64-bit division needs a call and a stack
    row, tile = (program // tiles).to(tl.int64), program % tiles
    mean = 0.0
    if CENTRED:
        # Rounded to nearest, so that the mean of equal numbers equals them.
        total = _sum(x_ptr, row * size, size, 0.0, False, BLOCK)
        mean = tl.div_rn(total, tl.cast(size, tl.float32))
    rstd = 1.0 / tl.sqrt(_sum(x_ptr, row * size, size, mean, True, BLOCK) / size + eps)
    tl.store(rstd_ptr + row, rstd, mask=tile == 0)  # by the first part of the row
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


def quantize(x, weight, bias, y, rstd, packed, bounds, size, eps, centred, narrow, codes):
    rows = rstd.numel()
    if rows == 0:
        return
    bits, group_size, seed, stochastic = codes
    options = _options(size, group_size)
    tiles = triton.cdiv(size // group_size, options["GROUPS"])
    launch(
        _norm_kernel, (rows * tiles,), x, weight, bias, y, rstd, packed, bounds, size, eps,
        seed, CENTRED=centred, NARROW=narrow and x.dtype != torch.float32, BITS=bits,
        STOCHASTIC=stochastic, enable_fp_fusion=False, **options,
    )  # fmt: skip


def _options(size, group_size):
    """Return the tile: up to 4,096 elements of a row per program, sixteen per thread."""
    width = triton.next_power_of_2(group_size // 8)
    groups = min(max(1, 512 // width), triton.next_power_of_2(size // group_size))
    return {
        "WIDTH": group_size // 8,
        "WIDTH_PAD": width,
        "GROUPS": groups,
        "BLOCK": min(1024, triton.next_power_of_2(size)),
        # Otherwise ptxas takes 80 registers for unaligned addresses, and spills two.
        "maxnreg": 96,
        "num_warps": max(1, width * groups // 64),
    }
