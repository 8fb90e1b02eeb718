"""Triton twin of `kernels.norm.channel_norm`: from an input and its statistics to codes.

A program takes some groups, as in `group_triton`, and looks the channel of every element up.
"""

import torch
import triton
import triton.language as tl

from memtrain.kernels.group.group_triton import encode, tile
from memtrain.kernels.norm.channel_norm_reference import Channels


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
def channel_of(
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


@triton.jit
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
        c = channel_of(
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


def quantize(x, mean, rstd, packed, bounds, where, codes):
    if where.together > 1:
        mean, rstd = (t.view(-1).repeat_interleave(where.together) for t in (mean, rstd))
    wide, options = bounds.dtype == torch.float32, tile(codes.group_size)
    n_groups = packed.shape[0]
    if n_groups == 0:
        return
    sizes, kinds = places(where)
    _quantize_kernel[(triton.cdiv(n_groups, options["GROUPS"]),)](
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


def places(where):
    """What `_channel` takes: sizes with what divides by them, and which divisions there are."""
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


def place_types(where):
    """Types of `places(where)`'s sizes, for AOT cases."""
    types = dict.fromkeys(("middle", "channels", "inner"), "i32")
    for name in ("inner", "channels"):
        types |= {f"{name}_magic": "i64", f"{name}_shift": "i32"}
    return {"n": "i64" if places(where)[1]["BIG"] else "i32"}, types


def _case(x, where, bits, wide, group_size=256):
    count, types = place_types(where)
    pointers = {
        "x_ptr": x, "mean_ptr": "*fp32", "rstd_ptr": "*fp32", "codes_ptr": "*u8",
        "bounds_ptr": "*fp32" if wide else "*i16",
    }  # fmt: skip
    options = {"BITS": bits, "WIDTH": group_size // 8, "WIDE": wide, "STOCHASTIC": True}
    signature = pointers | count | {"n_groups": "i32", "seed": "i64"} | types
    constants = options | places(where)[1] | tile(group_size) | {"enable_fp_fusion": False}
    return _quantize_kernel, signature, constants


# Of images, of images whose channels are last, of groups, and with 2**31 elements.
CASES = [
    ("*fp32", Channels(1, 32, 64, 3136), 4, False),
    ("*bf16", Channels(1, 100352, 64, 1), 3, False),
    ("*fp16", Channels(32, 1, 64, 3136, 2), 2, True),
    ("*bf16", Channels(64, 4096, 64, 256, 4), 8, False),
]
AOT_CASES = [_case(*case) for case in CASES]
