"""Rounding to floating-point formats of up to 16 bits: contract, reference, dispatch."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from memtrain.kernels import cpu
from memtrain.kernels.dispatch import choose, is_plain, register
from memtrain.kernels.floats.rounding_reference import (
    Layout,
    code_dtype,
    decode_reference,
    encode_reference,
    limits,
    round_reference,
)
from memtrain.kernels.strides import is_dense

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # C++ knows their places


def round_count(x: Tensor, layout: Layout, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Round `x` to a format, and count what overflows, in one pass.

    Magnitudes are rounded as if the format had no largest number; what then lies past it overflows.
    Where the format holds numbers that the dtype of `x` does not (above 65504 in float16, or more
    than its mantissa bits), the largest number is the largest that both hold.

    Subnormals of the format and of `x` are exact, and -0 stays -0. NaN stays NaN and is not
    counted; Inf overflows like any number past the largest.

    Stochastic rounding takes the next number away from zero with the probability of the lost
    part in 16 random bits: rounded to a multiple of 2**-16, ties up (exact of normal numbers if
    there are 7 mantissa bits or more).

    Args:
        x: float32, bfloat16 or float16, any shape and strides.
        layout: The format.
        seed: 64 bits, of stochastic rounding; equal seeds give equal results.

    Returns:
        y: Like `x`, strides too where it is dense.
        count: int64, []: how many elements overflow.

    Raises:
        TypeError: If `x` is of another dtype.

    Memory:
        One tensor like `x`.

    Example:
        >>> y, count = round_count(torch.tensor([1.0625, 31.0]), Layout(8, 3, -10, 127, -1, 128, 1, 0))
        >>> y, count
        (tensor([ 1.1250, 30.0000]), tensor(1))

    Reference:
        Lee et al., Training with Mixed-Precision Floating-Point Assignments, arXiv:2301.13464.
    """  # noqa: E501
    _check(x, DTYPES)
    run = _round if is_plain(x) else _round_op
    return run(x, layout, seed)


def round_count_(x: Tensor, layout: Layout, seed: int = 0) -> Tensor:
    """`round_count` in place: half of the memory's traffic, and no second tensor.

    Args:
        x: As there; without overlapping elements.
        layout: The format.
        seed: 64 bits, of stochastic rounding.

    Returns:
        int64, []: how many elements overflowed.

    Raises:
        TypeError: If `x` is of another dtype.

    Example:
        >>> x = torch.tensor([1.0625, 31.0])
        >>> round_count_(x, Layout(8, 3, -10, 127, -1, 128, 1, 0)), x
        (tensor(1), tensor([ 1.1250, 30.0000]))
    """
    _check(x, DTYPES)
    run = _round_inplace if is_plain(x) else _round_inplace_op
    return run(x, layout, seed)


def encode_count(x: Tensor, layout: Layout, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Round `x` to a format's codes, and count what overflows, in one pass.

    Rounds as `round_count` does, but to all of the format's numbers, whatever the dtype of `x`.

    Args:
        x: float32, bfloat16 or float16, any shape and strides.
        layout: The format.
        seed: 64 bits, of stochastic rounding.

    Returns:
        codes: uint8, or int16 (the code's bits) where the width is over 8; the shape of `x`,
            strides too where it is dense.
        count: int64, []: how many elements overflow.

    Raises:
        TypeError: If `x` is of another dtype.

    Memory:
        1 or 2 bytes per element.

    Example:
        >>> encode_count(torch.tensor([1.0, -30.0]), Layout(8, 3, -10, 127, -1, 128, 1, 0))[0]
        tensor([ 88, 255], dtype=torch.uint8)
    """
    _check(x, DTYPES)
    run = _encode if is_plain(x) else _encode_op
    return run(x, layout, seed)


def decode(codes: Tensor, layout: Layout, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that codes stand for.

    Args:
        codes: uint8 or int16, as from `encode_count`, any shape and strides.
        layout: The format.
        dtype: Of the result: float32 (exact), or bfloat16 or float16, rounded to nearest, ties to
            even, where they do not hold a number.

    Returns:
        `dtype`, shaped as the codes are.

    Raises:
        TypeError: If a dtype is not one named above.

    Memory:
        One tensor of the result's size.

    Example:
        >>> codes = torch.tensor([88, 255, 128], dtype=torch.uint8)
        >>> decode(codes, Layout(8, 3, -10, 127, -1, 128, 1, 0))
        tensor([  1., -30.,  nan])
    """
    _check(codes, (code_dtype(layout.width),))
    if dtype not in DTYPES:
        raise TypeError(f"dtype {dtype} is not allowed; allowed: {', '.join(map(str, DTYPES))}")
    run = _decode if is_plain(codes) else _decode_op
    return run(codes, layout, dtype)


@lru_cache
def _numbers(layout: Layout, dtype: torch.dtype) -> tuple[int, ...]:
    """What the kernels take of a layout, in their order."""
    return (
        *layout[1:3],
        *limits(layout, dtype),
        layout.nan,
        1 << (layout.width - 1),
        layout.infinity,
        layout.rounding,
    )


@lru_cache
def _table(layout: Layout, dtype: torch.dtype) -> Tensor:
    """The same as C++ reads it."""
    return torch.tensor(_numbers(layout, dtype), device="cpu")  # whatever the default is


def _check(x: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if x.dtype not in allowed:
        raise TypeError(f"dtype {x.dtype} is not allowed; allowed: {', '.join(map(str, allowed))}")


def _round(x: Tensor, layout: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
    return _run(x, Layout(*layout), seed, x.dtype)


def _encode(x: Tensor, layout: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
    return _run(x, Layout(*layout), seed, code_dtype(layout[0]))


def _round_inplace(x: Tensor, layout: Sequence[int], seed: int) -> Tensor:
    if is_dense(x) and choose(x) != "reference":
        increment_version(x)  # autograd does not see what a kernel writes
        return _run(x, Layout(*layout), seed, x.dtype, out=x)[1]
    y, count = _round(x, layout, seed)
    x.copy_(y)
    return count


def _run(
    x: Tensor, layout: Layout, seed: int, dtype: torch.dtype, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """To `dtype`: codes if it is not that of `x`."""
    x = x if is_dense(x) else x.clone()
    encodes, choice = dtype != x.dtype, choose(x)
    if choice == "reference":
        return (encode_reference if encodes else round_reference)(x, layout, seed)
    out = torch.empty_like(x, dtype=dtype) if out is None else out
    kind = torch.float32 if encodes else dtype
    written = choice == "cpu" and x.numel() > 0
    count = x.new_empty((), dtype=torch.int64) if written else x.new_zeros((), dtype=torch.int64)
    if not x.numel():
        return out, count
    if choice == "triton":
        from memtrain.kernels.floats import rounding_triton

        rounding_triton.run(x, out, count, _numbers(layout, kind), seed)
    else:
        sizes = (x.numel(), DTYPES.index(x.dtype), out.element_size() if encodes else 0, seed)
        cpu.call("mt_floats_round", x, out, count, _table(layout, kind), *sizes)
    return out, count


def _decode(codes: Tensor, layout: Sequence[int], dtype: torch.dtype) -> Tensor:
    form = Layout(*layout)
    codes = codes if is_dense(codes) else codes.clone()
    choice = choose(codes)
    if choice == "reference":
        return decode_reference(codes, form, dtype)
    out = torch.empty_like(codes, dtype=dtype)
    if not codes.numel():
        return out
    if choice == "triton":
        from memtrain.kernels.floats import rounding_triton

        rounding_triton.decode(codes, out, _numbers(form, torch.float32))
    else:
        sizes = (codes.numel(), DTYPES.index(dtype), codes.element_size())
        cpu.call("mt_floats_decode", codes, out, _table(form, torch.float32), *sizes)
    return out


def _fake(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=dtype), x.new_empty((), dtype=torch.int64)


_round_op = register(
    "floats_round(Tensor x, int[] layout, int seed) -> (Tensor, Tensor)",
    _round,
    lambda x, layout, seed: _fake(x, x.dtype),
)
_round_inplace_op = register(
    "floats_round_inplace(Tensor(a!) x, int[] layout, int seed) -> Tensor",
    _round_inplace,
    lambda x, layout, seed: x.new_empty((), dtype=torch.int64),
)
_encode_op = register(
    "floats_encode(Tensor x, int[] layout, int seed) -> (Tensor, Tensor)",
    _encode,
    lambda x, layout, seed: _fake(x, code_dtype(layout[0])),
)
_decode_op = register(
    "floats_decode(Tensor codes, int[] layout, ScalarType dtype) -> Tensor",
    _decode,
    lambda codes, layout, dtype: torch.empty_like(codes, dtype=dtype),
)
