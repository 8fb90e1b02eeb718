"""The table that the Triton steps read, one row a tensor (`step.table_row`)."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from memtrain.kernels.device_guard import launch
from memtrain.kernels.step.update_rules import COUNT

PLACES = tl.constexpr(COUNT)  # of the scalars of a step
AS_FIRST, RANK1, FACTORED = (tl.constexpr(k) for k in range(3))  # SECOND, as `step.SECOND`

# The fields of a table's row, int64 each (`step.table_row`); of a state the payload's two tensors,
# the codebook and what C++ reads.
FIELDS = tl.constexpr(32)
P, G, FIRST, SECOND_STATE, SCALARS, NUMEL, N_ROWS, N_COLS = (
    tl.constexpr(k) for k in (0, 1, 2, 6, 10, 11, 12, 13)
)
CORRECTION, TICK, SEED = (tl.constexpr(k) for k in (19, 21, 22))
VECTORS = ("row_old", "col_old", "row_inv", "col_inv", "row_new", "col_new")
ROW_OLD, COL_OLD, ROW_INV, COL_INV, ROW_NEW, COL_NEW = (tl.constexpr(23 + k) for k in range(6))
GUARD = tl.constexpr(29)


@triton.jit
def field(table_ptr, tensor, k):
    return tl.load(table_ptr + tensor * FIELDS + k)


@triton.jit
def address(table_ptr, tensor, k, dtype: tl.constexpr, WHOLE: tl.constexpr):
    """The address in field k; with WHOLE, the compiler assumes that it is a multiple of 16."""
    pointer = field(table_ptr, tensor, k).to(tl.pointer_type(dtype))
    if WHOLE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def floats(table_ptr, tensor, k):
    return address(table_ptr, tensor, k, tl.float32, False)


@triton.jit
def unless_refused(table_ptr, tensor, count):
    """`count`; 0 where a tensor has a guard and that is not finite."""
    guard = field(table_ptr, tensor, GUARD)
    bits = tl.load(guard.to(tl.pointer_type(tl.int32)), mask=guard != 0, other=0)
    return tl.where((bits & 0x7FFFFFFF) < 0x7F800000, count, 0)


@triton.jit
def read_scalars(scalars):
    """The eight scalars of a step."""
    return (
        tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3),
        tl.load(scalars + 4), tl.load(scalars + 5), tl.load(scalars + 6), tl.load(scalars + 7),
    )  # fmt: skip


@triton.jit
def corrections(table_ptr, tensor, MASTER: tl.constexpr, WHOLE: tl.constexpr):
    """Where the corrections of weights are, if there are any."""
    if MASTER == 8:
        return address(table_ptr, tensor, CORRECTION, tl.int8, WHOLE)
    else:
        return address(table_ptr, tensor, CORRECTION, tl.int16, WHOLE)


_COUNT = 16  # addresses a launch of `point`
_NAMES = [f"g{k}" for k in range(_COUNT)]


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


def point(table: Tensor, column: int, tensors: Sequence[Tensor]) -> None:
    """`table[k, column] = tensors[k].data_ptr()`, as a kernel's arguments: CUDA graphs hold them.

    Args:
        table: int64, [n, fields], contiguous.
        column: Of the addresses.
        tensors: n of one dtype, on the table's device.
    """
    for first in range(0, len(tensors), _COUNT):
        some = list(tensors[first : first + _COUNT])
        padded = some + some[-1:] * (_COUNT - len(some))
        given = table[first:, column], table.stride(0), len(some), *padded
        launch(_point_kernel, (1,), *given)
