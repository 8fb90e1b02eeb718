"""Triton kernels of `channel_norm.py`: from an input to codes, from codes to the gradients.

Forward a program takes some groups, as in `group_triton`, and looks the channel of every element
up. Backward the sums go over channels and look the code of every element up, so that no two
programs add to one number; dx goes over elements.
"""

import torch
import triton
import triton.language as tl

from memtrain.kernels.device_guard import launch
from memtrain.kernels.group.group_triton import encode, half_step, load_bounds, rounded, tile
from memtrain.kernels.norm.channel_norm import Channels, programs_of_sums, tile_of_sums

_MAGIC = ["inner_magic", "channels_magic"]  # never 1, and multiples of 16 by chance


@triton.jit
def _over(x, size, magic, shift, ONE: tl.constexpr, BIG: tl.constexpr):
    # x // size; of 31 bits by a product (`_magic`), since a division takes tens of instructions.
    if ONE:
        return x
    elif BIG:
        return x // size
    else:
        return (tl.umulhi(x.to(tl.uint32), magic.to(tl.uint32)) >> shift).to(tl.int32)


@triton.jit
def _channel_of(
    at,
    middle,
    channels,
    inner,
    inner_magic,
    inner_shift,
    channels_magic,
    channels_shift,
    PARTS: tl.constexpr,  # "own": a channel is a run; "one" outer part, or "many"
    INNER: tl.constexpr,  # more than one element
    CHANNELS: tl.constexpr,  # more than one channel
    BIG: tl.constexpr,  # int64 offsets
):
    # Which channel, of all of all outer parts, elements belong to.
    if not BIG:
        at = at.to(tl.int32)
    run = _over(at, inner, inner_magic, inner_shift, not INNER, BIG)
    if PARTS == "own":
        return run
    else:
        row = _over(run, channels, channels_magic, channels_shift, not CHANNELS, BIG)
        channel = run - row * channels
        if PARTS == "many":
            channel += row // middle * channels
        return channel


@triton.jit(do_not_specialize=["seed", *_MAGIC])
def _quantize_kernel(
    x_ptr,
    mean_ptr,
    rstd_ptr,
    codes_ptr,
    bounds_ptr,
    n,
    n_groups,
    seed,
    middle,
    channels,
    inner,
    inner_magic,
    inner_shift,
    channels_magic,
    channels_shift,
    PARTS: tl.constexpr,
    INNER: tl.constexpr,
    CHANNELS: tl.constexpr,
    BIG: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WIDE: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    column = tl.arange(0, WIDTH_PAD)[None, :]
    here = group < n_groups
    start = group * (WIDTH * 8) + column
    hats = ()
    for s in tl.static_range(8):
        at = start + s * WIDTH
        valid = here & (column < WIDTH) & (at < n)
        c = _channel_of(
            at, middle, channels, inner, inner_magic, inner_shift, channels_magic, channels_shift,
            PARTS, INNER, CHANNELS, BIG,
        )  # fmt: skip
        x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + c, mask=valid, other=0.0)
        rstd = tl.load(rstd_ptr + c, mask=valid, other=0.0)
        hats = hats + ((x - mean) * rstd,)  # noqa: RUF005 (the compiler knows no other form)
    encode(
        hats, codes_ptr, bounds_ptr, group, column, here, n, seed,
        BITS, WIDTH, WIDTH_PAD, GROUPS, STOCHASTIC, WIDE,
    )  # fmt: skip


@triton.jit
def _decoded(
    codes_ptr,
    bounds_ptr,
    at,
    inside,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
):
    # x_hat of elements one by one: `encode` lays a group's codes out in lanes.
    LANES: tl.constexpr = 8 if BITS % 2 else (4 if BITS % 4 else (2 if BITS % 8 else 1))
    LANE: tl.constexpr = WIDTH * 8 // LANES
    group = at // (WIDTH * 8)
    place = (at - group * (WIDTH * 8)).to(tl.int32)
    lane = place // LANE
    bit = lane * BITS
    first = codes_ptr + group * (WIDTH * BITS) + bit // 8 * LANE + (place - lane * LANE)
    word = tl.load(first, mask=inside, other=0).to(tl.int32)
    if LANES * BITS > 8:
        two = inside & (bit % 8 + BITS > 8)
        word |= tl.load(first + LANE, mask=two, other=0).to(tl.int32) << 8
    code = (word >> (bit % 8)) & (2**BITS - 1)
    lo, hi = load_bounds(bounds_ptr, group, inside, WIDE)
    step = half_step(lo, hi, float(2**BITS - 1))
    return 2.0 * (0.5 * lo + code.to(tl.float32) * step)


@triton.jit(do_not_specialize=_MAGIC)
def _gradient_kernel(
    dy_ptr,
    codes_ptr,
    bounds_ptr,
    scale_ptr,
    slope_ptr,
    shift_ptr,
    dx_ptr,
    n,
    middle,
    channels,
    inner,
    inner_magic,
    inner_shift,
    channels_magic,
    channels_shift,
    PARTS: tl.constexpr,
    INNER: tl.constexpr,
    CHANNELS: tl.constexpr,
    BIG: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    BF16: tl.constexpr,  # dx_ptr is int16: bfloat16's bits, rounded here
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    c = _channel_of(
        at, middle, channels, inner, inner_magic, inner_shift, channels_magic, channels_shift,
        PARTS, INNER, CHANNELS, BIG,
    )  # fmt: skip
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    hat = _decoded(codes_ptr, bounds_ptr, at, inside, BITS, WIDTH, WIDE)
    scale = tl.load(scale_ptr + c, mask=inside, other=0.0)
    slope = tl.load(slope_ptr + c, mask=inside, other=0.0)
    shift = tl.load(shift_ptr + c, mask=inside, other=0.0)
    dx = scale * dy + (slope * hat + shift)
    if BF16:
        tl.store(dx_ptr + at, (rounded(dx) >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sums_kernel(
    dy_ptr,
    codes_ptr,
    bounds_ptr,
    sums_ptr,  # [3, splits, outer * channels]
    middle,
    channels,
    inner,
    all_channels,
    rows_each,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    ACROSS: tl.constexpr,  # a column is a channel (inner is 1), else an element of a run
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    split = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    last = tl.minimum((split + 1) * rows_each, middle)
    first_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    second_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    third_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    if ACROSS:
        blocks = (channels + BLOCK - 1) // BLOCK
        outer = (program // blocks).to(tl.int64)
        channel = program % blocks * BLOCK + column
    else:
        outer = (program // channels).to(tl.int64)
        channel = program % channels
    for m in range(split * rows_each, last, ROWS):
        start = ((outer * middle + m + row) * channels + channel) * inner
        for k in range(0, inner, BLOCK):
            if ACROSS:
                at = start
                inside = (m + row < last) & (channel < channels)
            else:
                at = start + k + column
                inside = (m + row < last) & (k + column < inner)
            dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
            hat = _decoded(codes_ptr, bounds_ptr, at, inside, BITS, WIDTH, WIDE)
            first_sum += dy
            second_sum += tl.where(inside, dy * hat, 0.0)
            third_sum += tl.where(inside, hat, 0.0)
    splits = tl.num_programs(1)
    to = sums_ptr + split * all_channels + outer * channels + channel
    if ACROSS:
        first = tl.sum(first_sum, axis=0)[None, :]
        second = tl.sum(second_sum, axis=0)[None, :]
        third = tl.sum(third_sum, axis=0)[None, :]
        tl.store(to, first, mask=channel < channels)
        tl.store(to + splits * all_channels, second, mask=channel < channels)
        tl.store(to + 2 * splits * all_channels, third, mask=channel < channels)
    else:
        tl.store(to, tl.sum(tl.sum(first_sum, axis=1), axis=0))
        tl.store(to + splits * all_channels, tl.sum(tl.sum(second_sum, axis=1), axis=0))
        tl.store(to + 2 * splits * all_channels, tl.sum(tl.sum(third_sum, axis=1), axis=0))


def quantize(x, mean, rstd, packed, bounds, where, codes):
    if where.together > 1:
        mean, rstd = (t.view(-1).repeat_interleave(where.together) for t in (mean, rstd))
    wide, options = bounds.dtype == torch.float32, tile(codes.group_size)
    n_groups = packed.shape[0]
    if n_groups == 0:
        return
    sizes, kinds = _places(where)
    launch(
        _quantize_kernel,
        (triton.cdiv(n_groups, options["GROUPS"]),),
        x,
        mean,
        rstd,
        packed,
        bounds if wide else bounds.view(torch.int16),
        x.numel(),
        n_groups,
        codes.seed,
        *sizes,
        **kinds,
        BITS=codes.bits,
        WIDTH=codes.group_size // 8,
        STOCHASTIC=codes.stochastic,
        WIDE=wide,
        enable_fp_fusion=False,
        **options,
    )


def _places(where):
    """The arguments of `_channel_of`: sizes, magic numbers to divide by them, and which divide."""
    outer, middle, channels, inner = where[:4]
    kinds = {
        "PARTS": "own" if middle == 1 else "one" if outer == 1 else "many",
        "INNER": inner > 1,
        "CHANNELS": channels > 1,
        "BIG": outer * middle * channels * inner >= 2**31,
    }
    return (middle, channels, inner, *_magic(inner), *_magic(channels)), kinds


def _magic(size):
    """Multiplier and shift by which numbers below 2**31 are divided exactly (size > 1).

    With 2**shift < size <= 2**(shift + 1) the multiplier floor(2**(32 + shift) / size) + 1 is off
    by e / size with 0 < e <= size, and e * x < 2**(32 + shift) for x < 2**31: the quotient's floor
    is right. It always takes 32 bits, so that kernels see one type.
    """
    shift = max((size - 1).bit_length() - 1, 0)
    return 2 ** (32 + shift) // max(size, 2) + 1, shift


def _place_types(where):
    """Types of `_places(where)`'s sizes, for AOT cases."""
    types = dict.fromkeys(("middle", "channels", "inner"), "i32")
    for name in ("inner", "channels"):
        types |= {f"{name}_magic": "i64", f"{name}_shift": "i32"}
    return {"n": "i64" if _places(where)[1]["BIG"] else "i32"}, types


def sums(dy, codes, bounds, where, bits, group_size):
    """Of dy, of dy * x_hat and of x_hat: float64, [3, outer, channels]."""
    all_channels = where.outer * where.channels
    programs, splits = programs_of_sums(where)
    rows_each = triton.cdiv(where.middle, splits)
    out = dy.new_empty(3, splits, where.outer, where.channels, dtype=torch.float32)
    wide = bounds.dtype == torch.float32
    launch(
        _sums_kernel,
        (programs, splits),
        dy,
        codes,
        bounds if wide else bounds.view(torch.int16),
        out,
        where.middle,
        where.channels,
        where.inner,
        all_channels,
        rows_each,
        BITS=bits,
        WIDTH=group_size // 8,
        WIDE=wide,
        **_sum_options(where),
    )
    return out.double().sum(1)


def gradient(dy, dx, codes, bounds, lines, where, bits, group_size):
    wide, bf16 = bounds.dtype == torch.float32, dx.dtype == torch.bfloat16
    sizes, kinds = _places(where)
    launch(
        _gradient_kernel,
        (triton.cdiv(dy.numel(), 1024),),
        dy,
        codes,
        bounds if wide else bounds.view(torch.int16),
        *lines,
        dx.view(torch.int16) if bf16 else dx,
        dy.numel(),
        *sizes,
        **kinds,
        BITS=bits,
        WIDTH=group_size // 8,
        WIDE=wide,
        BF16=bf16,
        BLOCK=1024,
        enable_fp_fusion=False,
    )


def _sum_options(where):
    across, block, rows = tile_of_sums(where)
    # Left to itself ptxas spills one register here for a fifth program of a multiprocessor.
    return {"ACROSS": across, "BLOCK": block, "ROWS": rows, "num_warps": 4, "maxnreg": 128}


def _case(x, where, bits, wide, group_size=256):
    count, types = _place_types(where)
    pointers = {
        "x_ptr": x, "mean_ptr": "*fp32", "rstd_ptr": "*fp32", "codes_ptr": "*u8",
        "bounds_ptr": "*fp32" if wide else "*i16",
    }  # fmt: skip
    options = {"BITS": bits, "WIDTH": group_size // 8, "WIDE": wide, "STOCHASTIC": True}
    signature = pointers | count | {"n_groups": "i32", "seed": "i64"} | types
    constants = options | _places(where)[1] | tile(group_size) | {"enable_fp_fusion": False}
    return _quantize_kernel, signature, constants


def _backward_case(kernel, x, where, bits, wide, group_size=256):
    payload = {"codes_ptr": "*u8", "bounds_ptr": "*fp32" if wide else "*i16"}
    count, types = _place_types(where)
    options = {"BITS": bits, "WIDTH": group_size // 8, "WIDE": wide}
    if kernel is _sums_kernel:
        names = ("middle", "channels", "inner", "all_channels", "rows_each")
        signature = {"dy_ptr": x, **payload, "sums_ptr": "*fp32", **dict.fromkeys(names, "i32")}
        return kernel, signature, options | _sum_options(where)
    lines = dict.fromkeys(("scale_ptr", "slope_ptr", "shift_ptr"), "*fp32")
    bf16 = x == "*bf16"
    pointers = {"dy_ptr": x, **payload, **lines, "dx_ptr": "*i16" if bf16 else x}
    options |= {"BF16": bf16, "BLOCK": 1024, "enable_fp_fusion": False}
    return kernel, pointers | count | types, options | _places(where)[1]


# Of images, of images whose channels are last, of groups, and with 2**31 elements.
_CASES = [
    ("*fp32", Channels(1, 32, 64, 3136), 4, False),
    ("*bf16", Channels(1, 100352, 64, 1), 3, False),
    ("*fp16", Channels(32, 1, 64, 3136, 2), 2, True),
    ("*bf16", Channels(64, 4096, 64, 256, 4), 8, False),
]
AOT_CASES = [_case(*case) for case in _CASES] + [
    _backward_case(kernel, *case) for kernel in (_gradient_kernel, _sums_kernel) for case in _CASES
]
