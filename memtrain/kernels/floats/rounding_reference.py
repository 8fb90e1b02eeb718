"""Rounding to floating-point formats in plain torch: the definition."""

from functools import lru_cache
from struct import pack, unpack
from typing import NamedTuple

import torch
from torch import Tensor

from memtrain.kernels.random import philox
from memtrain.kernels.strides import memory_order

BLOCK = 1024  # elements that share their Philox counters
AWAY, EVEN, STOCHASTIC = range(3)

_INF, _NAN = 0x7F800000, 0x7FC00000
_PRECISION = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}


class Layout(NamedTuple):
    """A format as the kernels take it.

    A code is a sign bit above a magnitude code, which counts the magnitudes upwards from 0.

    Attributes:
        width: Bits of a code, at most 16.
        mantissa_bits: At most 14.
        least: Exponent of the least normal number, -126 or more.
        limit: Magnitude code of the largest finite number.
        infinity: Magnitude code of Inf, or -1.
        nan: Magnitude code of NaN; `1 << (width - 1)` where the sign bit alone is kept for it, and
            zero therefore has no sign.
        saturate: 1 if overflow gives the largest finite number, 0 if Inf (NaN where the format has
            another NaN and no Inf).
        rounding: 0 to nearest, ties away from zero; 1 to nearest, ties to even; 2 stochastic.
    """

    width: int
    mantissa_bits: int
    least: int
    limit: int
    infinity: int
    nan: int
    saturate: int
    rounding: int


def round_reference(x: Tensor, layout: Layout, seed: int) -> tuple[Tensor, Tensor]:
    """`round_count` of a dense tensor in plain torch: the definition."""
    bits, code = _magnitude_codes(x, layout, seed)
    limit, over, _ = limits(layout, x.dtype)
    past, nan = code > limit, bits & 0x7FFFFFFF > _INF
    value = torch.where(past, over, _value_bits(code.clamp(max=limit), layout))
    return _signed(torch.where(nan, _NAN, value), bits).to(x.dtype), (past & ~nan).sum()


def encode_reference(x: Tensor, layout: Layout, seed: int) -> tuple[Tensor, Tensor]:
    """`encode_count` of a dense tensor in plain torch: the definition."""
    bits, code = _magnitude_codes(x, layout, seed)
    _, _, over = limits(layout, torch.float32)
    past, nan, mark = code > layout.limit, bits & 0x7FFFFFFF > _INF, 1 << (layout.width - 1)
    code = torch.where(nan, layout.nan, torch.where(past, over, code))
    # A NaN's sign is lost: conversions to float32 keep it or not, by the place in the tensor.
    signed = (bits < 0) & ~nan & ((code > 0) | (layout.nan != mark))
    return _to_codes(torch.where(signed, code | mark, code), layout), (past & ~nan).sum()


def decode_reference(codes: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """`decode` in plain torch: the definition."""
    mark = 1 << (layout.width - 1)
    code = codes.to(torch.int64) & (2 * mark - 1)
    magnitude = code & (mark - 1)
    bits = _value_bits(magnitude.clamp(max=layout.limit), layout)
    bits = torch.where(magnitude > layout.limit, _NAN, bits)
    bits = torch.where(magnitude == layout.infinity, _INF, bits)
    if layout.nan == mark:
        bits = torch.where(code == mark, _NAN, bits)
    return _signed(bits, -(code & mark)).to(dtype)


def _magnitude_codes(x: Tensor, layout: Layout, seed: int) -> tuple[Tensor, Tensor]:
    """The bits of `x` as float32, negative below zero; and the codes, rounded without a limit."""
    bits = x.float().view(torch.int32).to(torch.int64)
    magnitude = bits & 0x7FFFFFFF
    significand = (magnitude & 0x7FFFFF) + torch.where(magnitude >= 1 << 23, 1 << 23, 0)
    below = layout.least + 127 - (magnitude >> 23).clamp(min=1)  # the least normal's binade
    base = (-below).clamp(min=0) << layout.mantissa_bits
    shift = 23 - layout.mantissa_bits + below.clamp(min=0)
    if layout.rounding == STOCHASTIC:
        significand >>= (shift - 30).clamp(0, 24)
        shift.clamp_(max=30)
        draw = 2 * _draws(x, seed) + 1
        part = (draw << (shift - 17).clamp(min=0)) >> (17 - shift).clamp(min=0)
    else:
        shift.clamp_(max=25)
        part = 1 << (shift - 1)
    if layout.rounding == EVEN:
        part += ((base + (significand >> shift)) & 1) - 1
    return bits, base + ((significand + part) >> shift)


def _value_bits(code: Tensor, layout: Layout) -> Tensor:
    """The bits of the float32 numbers that finite magnitude codes stand for."""
    normal = (code << (23 - layout.mantissa_bits)) + ((layout.least + 126) << 23)
    if layout.least == -126:  # float32's own subnormals
        return normal
    whole = code.to(torch.float32).view(torch.int32).to(torch.int64)
    small = torch.where(code > 0, whole + ((layout.least - layout.mantissa_bits) << 23), 0)
    return torch.where(code < 1 << layout.mantissa_bits, small, normal)


def _signed(bits: Tensor, sign: Tensor) -> Tensor:
    """float32 numbers of these bits, negative where `sign` is."""
    return torch.where(sign < 0, bits - (1 << 31), bits).to(torch.int32).view(torch.float32)


def _draws(x: Tensor, seed: int) -> Tensor:
    """16 random bits for each element of a dense tensor, in its order of memory."""
    blocks = -(-x.numel() // BLOCK)
    u = philox.uniform_blocks(blocks, BLOCK, seed, x.device).view(-1)[: x.numel()]
    draws = torch.empty_like(x, dtype=torch.int64)
    memory_order(draws).copy_(u * 65536 - 0.5)
    return draws


def _to_codes(code: Tensor, layout: Layout) -> Tensor:
    if layout.width > 8:
        code = torch.where(code > 0x7FFF, code - 0x10000, code)
    return code.to(code_dtype(layout.width))


def code_dtype(width: int) -> torch.dtype:
    """Of codes of so many bits."""
    return torch.uint8 if width <= 8 else torch.int16


def _bits_of(code: int, layout: Layout) -> int:
    """`_value_bits` of one code; without a tensor, so that a fake mode does not see it."""
    exponent, mantissa = divmod(code, 1 << layout.mantissa_bits)
    leading = 1 << layout.mantissa_bits if exponent else 0
    scale = layout.least + max(exponent, 1) - 1 - layout.mantissa_bits
    return unpack("i", pack("f", (leading + mantissa) * 2.0**scale))[0]


@lru_cache
def limits(layout: Layout, dtype: torch.dtype) -> tuple[int, int, int]:
    """The largest magnitude code that `dtype` holds too; overflow's float32 bits and code."""
    mantissa_bits, limit = layout.mantissa_bits, layout.limit
    if dtype == torch.float16:
        if layout.least <= 15:
            limit = min(limit, ((15 - layout.least + 2) << mantissa_bits) - 1)
        else:
            limit = min(limit, 65504 >> (layout.least - mantissa_bits))
    normal = limit >> mantissa_bits > 0
    significant = mantissa_bits + 1 if normal else limit.bit_length()
    limit &= -1 << max(0, significant - _PRECISION[dtype])
    if layout.saturate:
        return limit, _bits_of(limit, layout), layout.limit
    if layout.infinity >= 0:
        return limit, _INF, layout.infinity
    return limit, _INF if layout.nan == 1 << (layout.width - 1) else _NAN, layout.nan
