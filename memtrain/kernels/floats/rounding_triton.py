"""Triton kernels of `rounding.py`: rounding with a count of overflows."""

import triton
import triton.language as tl

from memtrain.kernels.device_guard import launch
from memtrain.kernels.random.philox_triton import philox

_WIDTH = tl.constexpr(128)  # an eighth of a block of `rounding.BLOCK` elements
_BLOCKS = tl.constexpr(4)
_OPTIONS = {"maxnreg": 128}  # otherwise ptxas spills one register on sm_80
_TILE = tl.constexpr(1024)
_INF = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def _magnitude_code(magnitude, draw, least, MANTISSA: tl.constexpr, ROUNDING: tl.constexpr):
    """Return the format's int32 magnitude code, rounded as if there were no largest number."""
    exponent = tl.maximum(magnitude >> 23, 1)
    significand = (magnitude & 0x7FFFFF) + tl.where(magnitude < 0x800000, 0, 0x800000)
    below = least + 127 - exponent
    base = tl.maximum(-below, 0) << MANTISSA
    shift = 23 - MANTISSA + tl.maximum(below, 0)
    if ROUNDING == 2:
        significand = significand >> tl.minimum(tl.maximum(shift - 30, 0), 24)
        shift = tl.minimum(shift, 30)
        part = ((2 * draw + 1) << tl.maximum(shift - 17, 0)) >> tl.maximum(17 - shift, 0)
    else:
        shift = tl.minimum(shift, 25)
        part = (shift * 0 + 1) << (shift - 1)
    if ROUNDING == 1:
        part += ((base + (significand >> shift)) & 1) - 1
    return base + ((significand + part) >> shift)


@triton.jit
def _value_bits(code, least, MANTISSA: tl.constexpr):
    normal = (code << (23 - MANTISSA)) + ((least + 126) << 23)
    whole = code.to(tl.float32).to(tl.int32, bitcast=True)
    small = tl.where(code > 0, whole + (least - MANTISSA) * 0x800000, 0)
    # For a least exponent of -126 float32's own subnormals follow from the normal form.
    return tl.where((code < (1 << MANTISSA)) & (least != -126), small, normal)


@triton.jit
def _store(out_ptr, at, inside, bits, negative):
    """Store float32 magnitudes with the pointer's type."""
    if out_ptr.dtype.element_ty == tl.float16:
        # The cast rounds 65520 and more to Inf; the interpreter's would warn.
        bits = tl.where((bits >= 0x477FF000) & (bits < _INF), _INF, bits)
    value = (bits | (negative << 31)).to(tl.float32, bitcast=True)
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _one(
    x_ptr, out_ptr, at, inside, draw, least, limit, over,
    MANTISSA: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Round the elements at `at`; return 1 for overflows."""
    x = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    magnitude, negative = bits & 0x7FFFFFFF, (bits >> 31) & 1
    code = _magnitude_code(magnitude, draw, least, MANTISSA, ROUNDING)
    nan, past = magnitude > _INF, code > limit
    value = _value_bits(tl.minimum(code, limit), least, MANTISSA)
    value = tl.where(nan, _NAN, tl.where(past, over, value))
    _store(out_ptr, at, inside, value, negative)
    return (past & (magnitude <= _INF)).to(tl.int32)


@triton.jit
def _nearest_kernel(
    x_ptr, out_ptr, count_ptr, n, least, limit, over,
    MANTISSA: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * _TILE + tl.arange(0, _TILE)
    past = _one(
        x_ptr, out_ptr, at, at < n, 0, least, limit, over, MANTISSA, ROUNDING
    )  # fmt: skip
    count = tl.sum(past, axis=0)
    tl.atomic_add(count_ptr, count.to(tl.int64), mask=count > 0, sem="relaxed")


@triton.jit(do_not_specialize=["seed"])
def _stochastic_kernel(
    x_ptr, out_ptr, count_ptr, n, least, limit, over, seed, MANTISSA: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * _BLOCKS + tl.arange(0, _BLOCKS)[:, None]
    column = tl.arange(0, _WIDTH)[None, :]
    w0, w1, w2, w3 = philox(seed, (block * _WIDTH + column).to(tl.uint32))
    words = (w0, w1, w2, w3)
    past = tl.zeros((_BLOCKS, _WIDTH), tl.int32)
    for s in tl.static_range(8):
        at = (block * 8 + s) * _WIDTH + column
        draw = ((words[s // 2].to(tl.uint32) >> (s % 2 * 16)) & 0xFFFF).to(tl.int32)
        past += _one(
            x_ptr, out_ptr, at, at < n, draw, least, limit, over, MANTISSA, 2
        )  # fmt: skip
    count = tl.sum(tl.sum(past, axis=1), axis=0)
    tl.atomic_add(count_ptr, count.to(tl.int64), mask=count > 0, sem="relaxed")


def run(x, out, count, numbers, seed):
    mantissa, least, limit, over, rounding = numbers
    n = x.numel()
    args = (x, out, count, n, least, limit, over)
    if rounding == 2:
        grid = (triton.cdiv(n, 8 * _WIDTH.value * _BLOCKS.value),)
        launch(_stochastic_kernel, grid, *args, seed, MANTISSA=mantissa, **_OPTIONS)
    else:
        grid = (triton.cdiv(n, _TILE.value),)
        launch(_nearest_kernel, grid, *args, MANTISSA=mantissa, ROUNDING=rounding)
