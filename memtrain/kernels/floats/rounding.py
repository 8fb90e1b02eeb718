"""Rounding to floating-point formats with up to 16 bits: contract, reference, dispatch.

Codes have the memory order of their tensor, in which stochastic rounding numbers the elements.

Reference:
    Lee et al., Training with Mixed-Precision Floating-Point Assignments, arXiv:2301.13464.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from struct import pack, unpack
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from memtrain.kernels.dispatch import choose, is_plain, register
from memtrain.kernels.random import philox
from memtrain.kernels.strides import is_dense, memory_order

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 1024  # elements that share their Philox counters
PIECE = 64 * BLOCK
"""Elements that the reference rounds at once: its temporaries stay in the cache."""
AWAY, EVEN, STOCHASTIC = range(3)

_INF, _NAN = 0x7F800000, 0x7FC00000
_PRECISION = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}


class FormatFields(NamedTuple):
    """A format's fields for the kernels.

    A code is a sign bit above a magnitude code, which counts the magnitudes upwards from 0.

    Attributes:
        width: Bits of a code, at most 16.
        mantissa_bits: At most 14.
        least: Exponent of the smallest normal number, -126 or more.
        limit: Magnitude code of the largest finite number.
        infinity: Magnitude code of Inf, or -1.
        nan: Magnitude code of NaN. `1 << (width - 1)` is the sign bit alone, so that zero has no
            sign.
        saturate: 1 if overflow gives the largest finite number, 0 if Inf (NaN for a format with
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

    def number(self, code: int) -> float:
        """Return the number of a finite magnitude code."""
        exponent, mantissa = divmod(code, 1 << self.mantissa_bits)
        leading = 1 << self.mantissa_bits if exponent else 0
        scale = self.least + max(exponent, 1) - 1 - self.mantissa_bits
        return (leading + mantissa) * 2.0**scale


def round_count(x: Tensor, layout: FormatFields, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Round `x` to a format, and count overflows, in one pass: `FloatFormat.round_count`.

    Magnitudes are rounded as if the format had no largest number; results above it overflow. The
    largest number is the largest that both the format and the dtype of `x` represent. Subnormals
    are exact, -0 stays -0, and NaN stays NaN and is not counted. Inf overflows. The result has the
    strides of `x` if `x` is dense.

    Stochastic rounding takes the next number away from zero with the probability of the lost part,
    rounded to a multiple of 2**-16, ties up (exact for normal numbers with 7 mantissa bits or
    more).
    """
    _check(x, DTYPES)
    run = _round if is_plain(x) else _round_op
    return run(x, layout, philox.signed(seed))


def round_count_(x: Tensor, layout: FormatFields, seed: int = 0) -> Tensor:
    """Round in place, with half of the memory traffic; elements of `x` may not overlap."""
    _check(x, DTYPES)
    run = _round_inplace if is_plain(x) else _round_inplace_op
    return run(x, layout, philox.signed(seed))


def encode(x: Tensor, layout: FormatFields, seed: int = 0) -> Tensor:
    """Round as `round_count`, but to all numbers of the format, and return codes.

    Codes take 1 or 2 bytes per element, and the call about 20.
    """
    _check(x, DTYPES)
    y, _ = round_count(x.float(), layout, seed)
    # Numbers of the format are their own nearest numbers for every rounding.
    bits, code = _magnitude_codes(y, layout._replace(rounding=AWAY), 0)
    magnitude, mark = bits & 0x7FFFFFFF, 1 << (layout.width - 1)
    nan = magnitude > _INF if layout.infinity >= 0 else magnitude >= _INF
    code = torch.where(magnitude == _INF, layout.infinity, code).masked_fill_(nan, layout.nan)
    # Casts to float32 may drop a NaN's sign, depending on its position.
    signed = (bits < 0) & (magnitude <= _INF) & ((code > 0) | (layout.nan != mark))
    return _to_codes(torch.where(signed, code | mark, code), layout)


def decode(codes: Tensor, layout: FormatFields, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers of codes in a dtype of `DTYPES`, rounded to nearest, ties to even."""
    _check(codes, (code_dtype(layout.width),))
    if dtype not in DTYPES:
        raise TypeError(f"dtype {dtype} is not allowed; allowed: {', '.join(map(str, DTYPES))}")
    run = _decode if is_plain(codes) else _decode_op
    return run(codes, layout, dtype)


def code_dtype(width: int) -> torch.dtype:
    """Return the dtype of codes with so many bits."""
    return torch.uint8 if width <= 8 else torch.int16


@lru_cache
def limits(layout: FormatFields, dtype: torch.dtype) -> tuple[int, int]:
    """Return the largest magnitude code that `dtype` represents, too, and overflow's bits."""
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
        return limit, unpack("i", pack("f", layout.number(limit)))[0]
    is_infinite = layout.infinity >= 0 or layout.nan == 1 << (layout.width - 1)
    return limit, _INF if is_infinite else _NAN


@lru_cache
def _numbers(layout: FormatFields, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the kernels' arguments for a layout, in order."""
    return (*layout[1:3], *limits(layout, dtype), layout.rounding)


def _check(x: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if x.dtype not in allowed:
        raise TypeError(f"dtype {x.dtype} is not allowed; allowed: {', '.join(map(str, allowed))}")


def _round_inplace(x: Tensor, layout: Sequence[int], seed: int) -> Tensor:
    if is_dense(x):
        increment_version(x)  # autograd does not see the kernel's writes
        return _round(x, layout, seed, out=x)[1]
    y, count = _round(x, layout, seed)
    x.copy_(y)
    return count


def _round(
    x: Tensor, layout: Sequence[int], seed: int, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    layout, x = FormatFields(*layout), x if is_dense(x) else x.clone()
    out = torch.empty_like(x) if out is None else out
    count = x.new_zeros((), dtype=torch.int64)
    if choose(x) == "triton":
        if x.numel():
            from memtrain.kernels.floats import rounding_triton

            rounding_triton.run(x, out, count, _numbers(layout, x.dtype), seed)
        return out, count
    source, target = memory_order(x), memory_order(out)
    for first in range(0, x.numel(), PIECE):
        at = slice(first, first + PIECE)
        target[at], overflows = round_reference(source[at], layout, seed, first // BLOCK)
        count += overflows
    return out, count


@cache
def _values(layout: FormatFields, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the number of each code, cached."""
    codes = torch.arange(1 << layout.width, dtype=torch.int32, device="cpu")
    return decode_reference(_to_codes(codes, layout), layout, dtype).to(device)


def _decode(codes: Tensor, layout: Sequence[int], dtype: torch.dtype) -> Tensor:
    fields = FormatFields(*layout)
    index = codes.reshape(-1).int().bitwise_and_((1 << fields.width) - 1)
    return _values(fields, dtype, codes.device).index_select(0, index).view(codes.shape)


def round_reference(
    x: Tensor, layout: FormatFields, seed: int, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute `round_count` for a dense tensor in plain torch: the definition.

    `first` is the number of preceding blocks, as in `draws`.
    """
    bits, code = _magnitude_codes(x, layout, seed, first)
    limit, over = limits(layout, x.dtype)
    past, nan = code > limit, bits & 0x7FFFFFFF > _INF
    value = torch.where(past, over, _value_bits(code.clamp(max=limit), layout))
    return _signed(torch.where(nan, _NAN, value), bits).to(x.dtype), (past & ~nan).sum()


def decode_reference(codes: Tensor, layout: FormatFields, dtype: torch.dtype) -> Tensor:
    """Compute `decode` in plain torch: the definition."""
    mark = 1 << (layout.width - 1)
    code = codes.to(torch.int32) & (2 * mark - 1)
    magnitude = code & (mark - 1)
    bits = _value_bits(magnitude.clamp(max=layout.limit), layout)
    bits = torch.where(magnitude > layout.limit, _NAN, bits)
    bits = torch.where(magnitude == layout.infinity, _INF, bits)
    if layout.nan == mark:
        bits = torch.where(code == mark, _NAN, bits)
    return _signed(bits, -(code & mark)).to(dtype)


def _magnitude_codes(
    x: Tensor, layout: FormatFields, seed: int, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the float32 bits of `x`, negative below zero, and the codes, without a limit."""
    bits = x.float().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    significand = (magnitude & 0x7FFFFF) + ((magnitude >= 1 << 23).int() << 23)
    below = layout.least + 127 - (magnitude >> 23).clamp(min=1)  # distance to the normal numbers
    base = (-below).clamp(min=0) << layout.mantissa_bits
    shift = 23 - layout.mantissa_bits + below.clamp(min=0)
    if layout.rounding == STOCHASTIC:
        significand >>= (shift - 30).clamp(0, 24)
        shift.clamp_(max=30)
        draw = 2 * draws(x, seed, first).int() + 1
        part = (draw << (shift - 17).clamp(min=0)) >> (17 - shift).clamp(min=0)
    else:
        shift.clamp_(max=25)
        part = torch.ones_like(shift) << (shift - 1)
    if layout.rounding == EVEN:
        part += ((base + (significand >> shift)) & 1) - 1
    return bits, base + ((significand + part) >> shift)


def _value_bits(code: Tensor, layout: FormatFields) -> Tensor:
    """Return the bits of the float32 numbers of finite magnitude codes."""
    normal = (code << (23 - layout.mantissa_bits)) + ((layout.least + 126) << 23)
    if layout.least == -126:  # float32's own subnormals
        return normal
    whole = code.to(torch.float32).view(torch.int32)
    small = torch.where(code > 0, whole + ((layout.least - layout.mantissa_bits) << 23), 0)
    return torch.where(code < 1 << layout.mantissa_bits, small, normal)


def _signed(bits: Tensor, sign: Tensor) -> Tensor:
    """Return float32 numbers from their bits, negative for a negative `sign`."""
    return torch.where(sign < 0, bits | -(1 << 31), bits).view(torch.float32)


def draws(x: Tensor, seed: int, first: int = 0) -> Tensor:
    """Return 16 random bits per element, int64, in the memory order of `x`.

    `first` is the number of preceding blocks of `BLOCK` elements.
    """
    blocks = -(-x.numel() // BLOCK)
    u = philox.uniform_blocks(blocks, BLOCK, seed, x.device, first).view(-1)[: x.numel()]
    found = torch.empty_like(x, dtype=torch.int64)
    memory_order(found).copy_(u * 65536 - 0.5)
    return found


def _to_codes(code: Tensor, layout: FormatFields) -> Tensor:
    if layout.width > 8:
        code = torch.where(code > 0x7FFF, code - 0x10000, code)
    return code.to(code_dtype(layout.width))


def _cloned(x: Tensor, *options: object) -> int:
    """Return the bytes of a dense copy, if the kernels need one."""
    return 0 if is_dense(x) else x.nbytes


def _in_torch(x: Tensor, layout: Sequence[int], seed: int) -> int:
    """Return the largest bytes of the reference's temporaries and of a dense copy."""
    each = 32 + (4 if x.itemsize < 4 else 0) + (9 if layout[-1] == STOCHASTIC else 0)
    return _cloned(x) + each * min(x.numel(), PIECE)


_round_op = register(
    "floats_round(Tensor x, int[] layout, int seed) -> (Tensor, Tensor)",
    _round,
    lambda x, layout, seed: (torch.empty_like(x), x.new_empty((), dtype=torch.int64)),
    inside=_in_torch,
    inside_cuda=_cloned,
)
_round_inplace_op = register(
    "floats_round_inplace(Tensor(a!) x, int[] layout, int seed) -> Tensor",
    _round_inplace,
    lambda x, layout, seed: x.new_empty((), dtype=torch.int64),
    inside=lambda x, *options: _cloned(x) + _in_torch(x, *options),  # the result is a clone, too
    inside_cuda=lambda x, *options: 2 * _cloned(x),
)
_decode_op = register(
    "floats_decode(Tensor codes, int[] layout, ScalarType dtype) -> Tensor",
    _decode,
    lambda codes, layout, dtype: codes.new_empty(codes.shape, dtype=dtype),
    inside=lambda codes, *options: 4 * codes.numel(),
    inside_cuda=lambda codes, *options: 4 * codes.numel(),
)
