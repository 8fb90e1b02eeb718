"""Writes addresses of gradients into a table: as a kernel's arguments, so that graphs hold them."""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

COUNT = 16  # addresses a launch
_NAMES = [f"g{k}" for k in range(COUNT)]


@triton.jit(do_not_specialize=["stride", "count", *_NAMES])
def _point_kernel(
    column_ptr, stride, count, g0, g1, g2, g3, g4, g5, g6, g7, g8, g9, g10, g11, g12, g13, g14, g15
):
    tl.store(column_ptr, g0.to(tl.int64))
    tl.store(column_ptr + stride, g1.to(tl.int64), mask=count > 1)
    tl.store(column_ptr + 2 * stride, g2.to(tl.int64), mask=count > 2)
    tl.store(column_ptr + 3 * stride, g3.to(tl.int64), mask=count > 3)
    tl.store(column_ptr + 4 * stride, g4.to(tl.int64), mask=count > 4)
    tl.store(column_ptr + 5 * stride, g5.to(tl.int64), mask=count > 5)
    tl.store(column_ptr + 6 * stride, g6.to(tl.int64), mask=count > 6)
    tl.store(column_ptr + 7 * stride, g7.to(tl.int64), mask=count > 7)
    tl.store(column_ptr + 8 * stride, g8.to(tl.int64), mask=count > 8)
    tl.store(column_ptr + 9 * stride, g9.to(tl.int64), mask=count > 9)
    tl.store(column_ptr + 10 * stride, g10.to(tl.int64), mask=count > 10)
    tl.store(column_ptr + 11 * stride, g11.to(tl.int64), mask=count > 11)
    tl.store(column_ptr + 12 * stride, g12.to(tl.int64), mask=count > 12)
    tl.store(column_ptr + 13 * stride, g13.to(tl.int64), mask=count > 13)
    tl.store(column_ptr + 14 * stride, g14.to(tl.int64), mask=count > 14)
    tl.store(column_ptr + 15 * stride, g15.to(tl.int64), mask=count > 15)


launch: Any = _point_kernel  # launches take a grid that no signature shows


def point(table: Tensor, column: int, tensors: Sequence[Tensor]) -> None:
    """`table[k, column] = tensors[k].data_ptr()`, by the device.

    Args:
        table: int64, [n, fields], contiguous.
        column: Of the addresses.
        tensors: n of one dtype, on the table's device.
    """
    for first in range(0, len(tensors), COUNT):
        some = list(tensors[first : first + COUNT])
        padded = some + some[-1:] * (COUNT - len(some))
        launch[(1,)](table[first:, column], table.stride(0), len(some), *padded)


AOT_CASES = [
    (
        _point_kernel,
        {"column_ptr": "*i64", "stride": "i32", "count": "i32", **dict.fromkeys(_NAMES, dtype)},
        {},
    )
    for dtype in ("*fp32", "*bf16", "*fp16")
]
