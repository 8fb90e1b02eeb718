"""The table that the Triton steps read, one row a tensor (`step.table`)."""

import triton
import triton.language as tl

from memtrain.kernels.step.update_rules import COUNT

PLACES = tl.constexpr(COUNT)  # of the scalars of a step
AS_FIRST, RANK1, FACTORED = (tl.constexpr(k) for k in range(3))  # SECOND, as `step.SECOND`

# The fields of a table's row, int64 each (`step.table`); of a state the payload's two tensors,
# the codebook and what C++ reads.
FIELDS = tl.constexpr(32)
P, G, FIRST, SECOND_STATE, SCALARS, NUMEL, N_ROWS, N_COLS = (
    tl.constexpr(k) for k in (0, 1, 2, 6, 10, 11, 12, 13)
)
CORRECTION, SEED = (tl.constexpr(k) for k in (19, 22))
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
