"""Triton kernel of `norm.py`.

A program takes a row, or a part of a long one: it reads the row twice for the sums and its part
once more, from memory only the first time.
"""

import torch
import triton
import triton.language as tl

from memtrain.kernels.device_guard import launch
from memtrain.kernels.group.group_triton import encode, rounded


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
    n,
    size,
    eps,
    seed,
    CENTRED: tl.constexpr,
    NARROW: tl.constexpr,
    BF16: tl.constexpr,  # y_ptr is int16: bfloat16's bits, rounded here
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WIDE: tl.constexpr,
):
    per_row = size // (WIDTH * 8)
    tiles = (per_row + GROUPS - 1) // GROUPS
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    mean = 0.0
    if CENTRED:
        mean = _sum(x_ptr, row * size, size, 0.0, False, BLOCK) / size
    rstd = 1.0 / tl.sqrt(_sum(x_ptr, row * size, size, mean, True, BLOCK) / size + eps)
    tl.store(rstd_ptr + row, rstd)
    column = tl.arange(0, WIDTH_PAD)[None, :]
    local = (program % tiles) * GROUPS + tl.arange(0, GROUPS)[:, None]
    here = local < per_row
    inside = here & (column < WIDTH)
    within = local * (WIDTH * 8) + column
    hats = ()
    for s in tl.static_range(8):
        at = within + s * WIDTH
        x = tl.load(x_ptr + row * size + at, mask=inside, other=0.0).to(tl.float32)
        hat = tl.where(inside, (x - mean) * rstd, 0.0)
        hats = hats + (hat,)  # noqa: RUF005 (the compiler knows no other form)
        value = hat
        if NARROW:
            if BF16:
                value = rounded(hat).to(tl.float32, bitcast=True)
            else:
                value = hat.to(y_ptr.dtype.element_ty).to(tl.float32)
        w = tl.load(weight_ptr + at, mask=inside, other=0.0)
        b = tl.load(bias_ptr + at, mask=inside, other=0.0)
        value = value * w + b
        if BF16:
            bits = (rounded(value) >> 16).to(tl.int16)
            tl.store(y_ptr + row * size + at, bits, mask=inside)
        else:
            y = value.to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + row * size + at, y, mask=inside)
    encode(
        hats, codes_ptr, bounds_ptr, row * per_row + local, column, here, n, seed,
        BITS, WIDTH, WIDTH_PAD, GROUPS, STOCHASTIC, WIDE,
    )  # fmt: skip


def quantize(x, weight, bias, y, rstd, packed, bounds, size, eps, centred, narrow, codes):
    rows = rstd.numel()
    if rows == 0:
        return
    wide, bf16 = bounds.dtype == torch.float32, x.dtype == torch.bfloat16
    options = _options(size, codes.group_size)
    tiles = triton.cdiv(size // codes.group_size, options["GROUPS"])
    launch(
        _norm_kernel,
        (rows * tiles,),
        x,
        weight,
        bias,
        y.view(torch.int16) if bf16 else y,
        rstd,
        packed,
        bounds if wide else bounds.view(torch.int16),
        x.numel(),
        size,
        eps,
        codes.seed,
        CENTRED=centred,
        NARROW=narrow and x.dtype != torch.float32,
        BF16=bf16,
        BITS=codes.bits,
        STOCHASTIC=codes.stochastic,
        WIDE=wide,
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
        "num_warps": max(1, width * groups // 64),
    }


def _case(x, y, size, group_size=256, **more):
    bounds = "*fp32" if more["WIDE"] else "*i16"
    pointers = {
        "x_ptr": x, "weight_ptr": "*fp32", "bias_ptr": "*fp32", "y_ptr": y, "rstd_ptr": "*fp32",
        "codes_ptr": "*u8", "bounds_ptr": bounds,
    }  # fmt: skip
    sizes = {"n": "i32", "size": "i32", "eps": "fp32", "seed": "i64"}
    constants = {"enable_fp_fusion": False, "STOCHASTIC": True, "BF16": y == "*i16"}
    return _norm_kernel, pointers | sizes, constants | _options(size, group_size) | more


AOT_CASES = [
    *(
        _case("*fp32", "*fp32", 768, BITS=bits, WIDE=False, CENTRED=True, NARROW=False)
        for bits in (2, 3, 4, 8)
    ),
    _case("*bf16", "*i16", 4096, BITS=4, WIDE=False, CENTRED=False, NARROW=True),
    _case("*bf16", "*i16", 8192, BITS=4, WIDE=False, CENTRED=True, NARROW=False),
    _case("*fp16", "*fp16", 4096, BITS=4, WIDE=True, CENTRED=False, NARROW=True),
    _case("*bf16", "*i16", 16384, 16384, BITS=3, WIDE=False, CENTRED=True, NARROW=False),
]
