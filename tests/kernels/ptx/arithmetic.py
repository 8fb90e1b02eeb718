"""PTX's types and what its instructions compute, on arrays with an element for each thread.

Reference: NVIDIA, Parallel Thread Execution ISA, version 8.7, chapter 9.7.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES: dict[str, Any] = {
    kind + str(8 * size): np.dtype(f"{numpy}{size}")
    for kind, numpy, sizes in (
        ("u", "u", (1, 2, 4, 8)), ("b", "u", (1, 2, 4, 8)),
        ("s", "i", (1, 2, 4, 8)), ("f", "f", (2, 4, 8)),
    )
    for size in sizes
}  # fmt: skip
BITS = {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()} | {"bf16": 16, "pred": 1}

_U32, _U64 = np.uint32, np.uint64


def flushed(x: Array) -> Array:
    """Float32 with subnormal numbers as zeros of their sign."""
    return np.where(np.abs(x) < np.float32(2**-126), np.copysign(np.float32(0), x), x)


def from_bfloat16(bits: Array) -> Array:
    """Float32 of its 16 bits."""
    return (bits.astype(_U32) << _U32(16)).view(np.float32)


def narrowed(value: Array, kind: str) -> Array:
    """The bits of a value in a type of 16 bits; to bfloat16 by rounding to nearest even."""
    if kind != "bf16":
        return value.astype(DTYPES[kind]).view(np.uint16)
    bits = value.astype(np.float32).view(_U32)
    rounded = (bits + _U32(0x7FFF) + ((bits >> _U32(16)) & _U32(1))) >> _U32(16)
    return np.where(np.isnan(value), _U32(0x7FFF), rounded).astype(np.uint16)


def fma(a: Array, b: Array, c: Array) -> Array:
    """`a * b + c` of float32, rounded once.

    The sum in float64 is rounded to odd, so that rounding it again to float32 is right.
    """
    product, c = a.astype(np.float64) * b, c.astype(np.float64)  # the product is exact
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    even = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    odd = np.where((error > 0) == (total > 0), bits + 1, bits - 1)
    return np.where(even, odd, bits).view(np.float64).astype(np.float32)


def widened(a: Array) -> Array:
    """Integers of twice the bits."""
    return a.astype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")


def _high(a: Array, b: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    if bits == 64:
        return (a.astype(object) * b.astype(object) >> 64).astype(a.dtype)
    return (widened(a) * widened(b) >> bits).astype(a.dtype)


PRODUCTS: dict[str, Callable[[Array, Array], Array]] = {
    "lo": operator.mul,
    "hi": _high,
    "wide": lambda a, b: widened(a) * widened(b),
}


def divided(a: Array, b: Array) -> Array:
    """Integers divided, towards zero; by zero all bits are set."""
    divisor = np.where(b == 0, np.ones_like(b), b)
    quotient = a // divisor
    if a.dtype.kind == "i":
        quotient = quotient + ((a % divisor != 0) & ((a < 0) != (divisor < 0)))
    return np.where(b == 0, ~np.zeros_like(a), quotient).astype(a.dtype)


def _least(a: Array, b: Array) -> Array:
    if a.dtype.kind != "f":
        return np.minimum(a, b)
    return np.where(a == b, np.where(np.signbit(a), a, b), np.fmin(a, b))  # -0 is below 0


def _most(a: Array, b: Array) -> Array:
    if a.dtype.kind != "f":
        return np.maximum(a, b)
    return np.where(a == b, np.where(np.signbit(a), b, a), np.fmax(a, b))


def _or_nan(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda a, b: np.where(_unordered(a, b), a + b, function(a, b))


def _shifted_left(a: Array, by: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    return np.where(by >= bits, np.zeros_like(a), a << np.minimum(by, bits - 1).astype(a.dtype))


def _shifted_right(a: Array, by: Array) -> Array:
    last = 8 * a.dtype.itemsize - 1
    beyond = a >> a.dtype.type(last) if a.dtype.kind == "i" else np.zeros_like(a)
    return np.where(by > last, beyond, a >> np.minimum(by, last).astype(a.dtype))


def _permuted(a: Array, b: Array, selectors: Array) -> Array:
    """Each byte of the result is one of the eight of both, or its sign throughout."""
    both = a.astype(_U64) | (b.astype(_U64) << _U64(32))
    result = np.zeros(np.broadcast(a, b, selectors).shape, _U32)
    for k in range(4):
        selector = selectors >> _U32(4 * k)
        shift = (selector & _U32(7)).astype(_U64) * _U64(8)
        byte = (both >> shift).astype(_U32) & _U32(255)
        signs = (byte >> _U32(7)) * _U32(255)
        result |= np.where(selector & _U32(8), signs, byte) << _U32(8 * k)
    return result


def _extracted(a: Array, start: Array, length: Array) -> Array:
    """A field of bits, of signed types with its sign."""
    signed = a.dtype.kind == "i"
    wide = a.astype(np.int64 if signed else _U64)  # shifted to the right with its sign, or with 0
    start = np.minimum(start & _U32(255), _U32(63)).astype(wide.dtype)
    length = np.minimum(length & _U32(255), _U32(8 * a.dtype.itemsize)).astype(_U64)
    mask = (_U64(1) << length) - _U64(1)
    field = (wide >> start).view(_U64) & mask
    if signed:
        sign = (field << _U64(1)) >> length & _U64(1)
        field = np.where(sign == 1, field | ~mask, field)
    return field.astype(f"u{a.dtype.itemsize}").view(a.dtype)


def _inserted(a: Array, b: Array, start: Array, length: Array) -> Array:
    a_wide, b_wide = a.astype(_U64), b.astype(_U64)
    start, length = ((x & _U32(255)).astype(_U64) for x in (start, length))
    mask = ((_U64(1) << length) - _U64(1)) << start
    return ((b_wide & ~mask) | ((a_wide << start) & mask)).astype(a.dtype)


def funnel_left(low: Array, high: Array, by: Array) -> Array:
    """The upper half of both shifted left."""
    both = low.astype(_U64) | (high.astype(_U64) << _U64(32))
    return ((both << (by & _U32(31)).astype(_U64)) >> _U64(32)).astype(_U32)


FUNCTIONS: dict[str, Callable[..., Array]] = {
    "mov": lambda a: a, "add": operator.add, "sub": operator.sub, "mul": operator.mul,
    "min": _least, "max": _most, "neg": operator.neg, "abs": np.abs,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": operator.invert,
    "shl": _shifted_left, "shr": _shifted_right, "prmt": _permuted, "bfe": _extracted,
    "bfi": _inserted, "popc": lambda a: np.bitwise_count(a).astype(_U32),
}  # fmt: skip
OR_NAN = {"min": _or_nan(_least), "max": _or_nan(_most)}
"""The lesser and the greater, or NaN where one is."""
COUNTS = {"shl": (1,), "shr": (1,), "bfe": (1, 2), "bfi": (2, 3)}
"""Operands that are of 32 bits whatever the type."""
REDUCTIONS: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum}

APPROXIMATE: dict[str, tuple[Callable[..., Array], int]] = {
    "rcp": (lambda a: np.float32(1) / a, 1),
    "sqrt": (np.sqrt, 1),
    "div": (operator.truediv, 2),
}
"""Functions of float32 that a device gives within so many units in the last place."""


def _unordered(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": operator.eq, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "ne": lambda a, b: (a < b) | (a > b), "nan": _unordered,
    "num": lambda a, b: ~_unordered(a, b),
}  # fmt: skip


def compared(how: str, a: Array, b: Array) -> Array:
    """A comparison by its name in PTX."""
    if how in _COMPARISONS:
        return _COMPARISONS[how](a, b)
    return _COMPARISONS[how.removesuffix("u")](a, b) | _unordered(a, b)


_WHOLE = {"rzi": np.trunc, "rni": np.rint}


def conversion(how: Sequence[str], target: str, source: str) -> Callable[[Array], Array]:
    """The function from one type to another, whose floats are given as float32."""
    if set(how) - {"rn", "ftz", *_WHOLE}:
        raise NotImplementedError(f"cvt.{'.'.join(how)}.{target}.{source}")
    if target == "bf16":
        return lambda x: narrowed(x, "bf16")
    dtype = DTYPES[target]
    rounding = next((_WHOLE[name] for name in how if name in _WHOLE), None)
    if rounding is None:
        return lambda x: x.astype(dtype)
    if dtype.kind == "f":
        return lambda x: rounding(x).astype(dtype)
    limits = np.iinfo(dtype)
    # What NaN becomes, of 64 bits (or of f64) the highest bit alone.
    lost = 0 if source != "f64" and dtype.itemsize < 8 else dtype.type(1) << (BITS[target] - 1)

    def to_integer(x: Array) -> Array:
        value = rounding(x.astype(np.float64))
        low, high = value <= limits.min, value >= limits.max
        usual = np.where(low | high | np.isnan(value), 0, value).astype(dtype)
        usual = np.where(low, limits.min, np.where(high, limits.max, usual))
        return np.where(np.isnan(value), lost, usual).astype(dtype)

    return to_integer
