"""The first pass of the Triton steps, for states that know rows and columns of the whole tensor."""

import triton
import triton.language as tl

from memtrain.kernels.codebook.quantize_triton import least, magnitude
from memtrain.kernels.step import groups
from memtrain.kernels.step.split_triton import read_weight
from memtrain.kernels.step.table_triton import (
    COL_NEW,
    COL_OLD,
    N_COLS,
    N_ROWS,
    PLACES,
    RANK1,
    ROW_INV,
    ROW_NEW,
    ROW_OLD,
    SCALARS,
    SECOND_STATE,
    G,
    P,
    address,
    corrections,
    field,
    floats,
    unless_refused,
)
from memtrain.kernels.step.update_rules_triton import EXACT

ROWS = tl.constexpr(groups.ROWS)  # rows per program, in tiles of TILE x 128
TILE = tl.constexpr(16)
AHEAD = tl.constexpr(8)  # partial sums that are loaded at once
PIECE = tl.constexpr(1024)  # rows per program of the ratios
MOST = tl.constexpr(3.4028234663852886e38)  # the largest float


@triton.jit
def _new_second(
    g_ptr, p_ptr, lost_ptr, numbers, at, inside, old,
    MASTER: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Terms of the first pass, 0 where nothing is: rank-1's new second moments, squares of g."""
    l2, sign, b2, w2 = numbers
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if l2 == 0:  # the sign is squared out
        term = _term(g, old, b2, w2, SECOND)
    else:
        p = read_weight(p_ptr, lost_ptr, at, inside, MASTER)
        term = _term(tl.where(inside, g * sign + l2 * p, 0.0), old, b2, w2, SECOND)
    return term


@triton.jit
def _term(g, old, b2, w2, SECOND: tl.constexpr):
    if SECOND == RANK1:
        return magnitude(b2 * old + (w2 * g) * g)
    else:
        return g * g


@triton.jit
def _reduce_kernel(
    programs_ptr, table_ptr, scalars_ptr, p_like, g_like,
    SECOND: tl.constexpr, MASTER: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Pass 1. Rank-1: maxima of the new second moment. Factored: partial sums of g * g."""
    tensor = tl.load(programs_ptr + 2 * tl.program_id(0)).to(tl.int64)
    chunk = tl.load(programs_ptr + 2 * tl.program_id(0) + 1).to(tl.int64)
    scalars = scalars_ptr + tensor * PLACES
    numbers = (
        tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 4), tl.load(scalars + 5)
    )  # fmt: skip
    p_ptr = address(table_ptr, tensor, P, p_like.dtype.element_ty, WHOLE)
    g_ptr = address(table_ptr, tensor, G, g_like.dtype.element_ty, WHOLE)
    lost_ptr = corrections(table_ptr, tensor, MASTER, WHOLE)
    rows, cols = field(table_ptr, tensor, N_ROWS), field(table_ptr, tensor, N_COLS)
    if WHOLE:
        cols = cols // 128 * 128  # it is: the compiler sees it so
    across = (cols + 127) // 128
    first_col = chunk % across * 128
    first_row = chunk // across * ROWS
    start = first_row * cols + first_col
    p_ptr, g_ptr, lost_ptr = p_ptr + start, g_ptr + start, lost_ptr + start
    left = tl.minimum(rows - first_row, ROWS).to(tl.int32)
    if SECOND == RANK1:
        row_ptr = address(table_ptr, tensor, ROW_NEW, tl.int32, False) + first_row
        col_ptr = address(table_ptr, tensor, COL_NEW, tl.int32, WHOLE) + first_col
        codes_ptr = address(table_ptr, tensor, SECOND_STATE, tl.uint8, WHOLE)
        values_ptr = floats(table_ptr, tensor, SECOND_STATE + 2)
        row_old = floats(table_ptr, tensor, ROW_OLD) + first_row
        col_old = address(table_ptr, tensor, COL_OLD, tl.float32, WHOLE) + first_col
    else:
        row_part = floats(table_ptr, tensor, ROW_NEW) + chunk % across * rows + first_row
        col_part = address(table_ptr, tensor, COL_NEW, tl.float32, WHOLE)
        col_part += first_row // ROWS * cols + first_col
    if SECOND == RANK1 and WHOLE:
        # Whole blocks of 128: a byte has columns i and i + 64.
        codes_ptr += start // 2
        lane = tl.arange(0, 64)[None, :]
        low_old, high_old = tl.load(col_old + lane), tl.load(col_old + 64 + lane)
        low_top = tl.zeros([TILE, 64], dtype=tl.int32)
        high_top = tl.zeros([TILE, 64], dtype=tl.int32)
        for first in range(0, ROWS, TILE):
            row = first + tl.arange(0, TILE)[:, None]
            here = row < left
            at = row * cols + lane
            inside = here & (lane < 64)
            byte = tl.load(codes_ptr + row * (cols // 2) + lane, mask=inside, other=0)
            scale = tl.load(row_old + row, mask=here, other=0.0)
            low = tl.load(values_ptr + (byte & 15)) * least(scale, low_old)
            high = tl.load(values_ptr + (byte >> 4)) * least(scale, high_old)
            low = _new_second(
                g_ptr, p_ptr, lost_ptr, numbers, at, inside, low, MASTER, SECOND
            )  # fmt: skip
            high = _new_second(
                g_ptr, p_ptr, lost_ptr, numbers, at + 64, inside, high, MASTER, SECOND
            )  # fmt: skip
            top = tl.max(tl.maximum(low, high), axis=1)[:, None]
            tl.atomic_max(row_ptr + row, top, mask=here, sem="relaxed")
            low_top, high_top = tl.maximum(low_top, low), tl.maximum(high_top, high)
        tl.atomic_max(col_ptr + lane, tl.max(low_top, axis=0)[None, :], sem="relaxed")
        tl.atomic_max(col_ptr + 64 + lane, tl.max(high_top, axis=0)[None, :], sem="relaxed")
    else:
        lane = tl.arange(0, 128)[None, :]
        in_cols = first_col + lane < cols
        if SECOND == RANK1:
            old_cols = tl.load(col_old + lane, mask=in_cols, other=0.0)
            col_top = tl.zeros([TILE, 128], dtype=tl.int32)
        else:
            col_sum = tl.zeros([TILE, 128], dtype=tl.float32)
        for first in range(0, ROWS, TILE):
            row = first + tl.arange(0, TILE)[:, None]
            here = row < left
            at = row * cols + lane
            inside = here & in_cols
            old = 0.0
            if SECOND == RANK1:
                place = start + at
                place_in = place % 128
                byte = tl.load(codes_ptr + place // 128 * 64 + place_in % 64, mask=inside, other=0)
                code = (byte.to(tl.int32) >> (place_in // 64 * 4).to(tl.int32)) & 15
                scale = tl.load(row_old + row, mask=here, other=0.0)
                old = tl.load(values_ptr + code) * least(scale, old_cols)
            new = _new_second(
                g_ptr, p_ptr, lost_ptr, numbers, at, inside, old, MASTER, SECOND
            )  # fmt: skip
            if SECOND == RANK1:
                top = tl.max(new, axis=1)[:, None]
                tl.atomic_max(row_ptr + row, top, mask=here, sem="relaxed")
                col_top = tl.maximum(col_top, new)
            else:
                tl.store(row_part + row, tl.sum(new, axis=1)[:, None], mask=here)
                col_sum += new
        if SECOND == RANK1:
            top = tl.max(col_top, axis=0)[None, :]
            tl.atomic_max(col_ptr + lane, top, mask=in_cols, sem="relaxed")
        else:
            tl.store(col_part + lane, tl.sum(col_sum, axis=0)[None, :], mask=in_cols)


@triton.jit
def _mean_kernel(programs_ptr, table_ptr):
    """New row (or column) means from the partial sums, always added in the same order."""
    tensor = tl.load(programs_ptr + 2 * tl.program_id(0)).to(tl.int64)
    piece = tl.load(programs_ptr + 2 * tl.program_id(0) + 1).to(tl.int64)
    rows, cols = field(table_ptr, tensor, N_ROWS), field(table_ptr, tensor, N_COLS)
    row_pieces = (rows + 127) // 128
    of_rows = piece < row_pieces
    length = tl.where(of_rows, rows, cols)
    written = unless_refused(table_ptr, tensor, length)
    parts = tl.where(of_rows, (cols + 127) // 128, (rows + ROWS - 1) // ROWS)
    k = tl.where(of_rows, piece, piece - row_pieces) * 128 + tl.arange(0, 128)
    row_part, col_part = field(table_ptr, tensor, ROW_NEW), field(table_ptr, tensor, COL_NEW)
    row_mean = field(table_ptr, tensor, SECOND_STATE)
    col_mean = field(table_ptr, tensor, SECOND_STATE + 1)
    part = tl.where(of_rows, row_part, col_part).to(tl.pointer_type(tl.float32))
    mean = tl.where(of_rows, row_mean, col_mean).to(tl.pointer_type(tl.float32))
    total = tl.zeros([128], dtype=tl.float32)
    for first in range(0, parts, AHEAD):  # several loads are under way at once; adding 0 is exact
        for i in tl.static_range(AHEAD):
            here = (k < length) & (first + i < parts)
            total += tl.load(part + (first + i) * length + k, mask=here, other=0.0)
    total = tl.div_rn(total, tl.where(of_rows, cols, rows).to(tl.float32))
    scalars = floats(table_ptr, tensor, SCALARS)
    b2, w2 = tl.load(scalars + 4), tl.load(scalars + 5)
    old = tl.load(mean + k, mask=k < length, other=0.0)
    tl.store(mean + k, b2 * old + w2 * total, mask=k < written)


@triton.jit
def _ratio_kernel(programs_ptr, table_ptr):
    """Return `codecs.ratio`; each program reads all row means and column means."""
    tensor = tl.load(programs_ptr + 2 * tl.program_id(0)).to(tl.int64)
    piece = tl.load(programs_ptr + 2 * tl.program_id(0) + 1).to(tl.int64) * PIECE
    rows = field(table_ptr, tensor, N_ROWS)
    mean_ptr, ratio_ptr = (
        floats(table_ptr, tensor, SECOND_STATE),
        floats(table_ptr, tensor, ROW_INV),
    )
    k = tl.arange(0, PIECE)
    total = tl.zeros([PIECE], dtype=tl.float32)
    for first in range(0, rows, PIECE):
        total += tl.load(mean_ptr + first + k, mask=first + k < rows, other=0.0)
    mean = tl.div_rn(tl.sum(total, axis=0), rows.to(tl.float32))
    cols, col_ptr = field(table_ptr, tensor, N_COLS), floats(table_ptr, tensor, SECOND_STATE + 1)
    overflowed = tl.full([PIECE], 0, dtype=tl.int32)
    for first in range(0, cols, PIECE):
        col = tl.load(col_ptr + first + k, mask=first + k < cols, other=0.0)
        overflowed |= (col > MOST).to(tl.int32)
    divisor = tl.where(mean == 0, 1.0, mean)
    row = tl.load(mean_ptr + piece + k, mask=piece + k < rows, other=0.0)
    ratio = tl.where(mean == 0, 0.0, tl.div_rn(row, divisor))
    still = (tl.max(overflowed, axis=0) > 0) | (mean > MOST)
    ratio = tl.where(still | (ratio > MOST), MOST, ratio)
    tl.store(ratio_ptr + piece + k, ratio, mask=piece + k < rows)


def reduce_options(second: int, whole: bool) -> dict[str, int]:
    """Return the launch options of the first pass.

    Rank-1 without alignment takes 16 warps. With 64 registers per thread, two such programs fit in
    the registers of a multiprocessor of sm_80 and sm_90.
    """
    if second == RANK1.value and not whole:
        return EXACT | {"num_warps": 16, "maxnreg": 64}
    return EXACT | {"num_warps": 8}
