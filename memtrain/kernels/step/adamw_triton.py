"""Triton twin of `adamw.py`: one launch a pass for all parameters of a kind and dtype."""

import triton
import triton.language as tl

from memtrain.kernels.codebook.block_triton import encode, magnitude
from memtrain.kernels.codebook.rank1_triton import least, place
from memtrain.kernels.step.split_triton import DRAWN, draws, read_weight, ticked, write_weight

BLOCKS = tl.constexpr(8)  # of 128 elements, per program of the update
ROWS = tl.constexpr(256)  # rows per program of the first pass, in tiles of TILE x 128
TILE = tl.constexpr(16)
LOOK_WARPS = 8
PIECE = tl.constexpr(1024)
EXACT, BLOCK, RANK1, FACTORED = (tl.constexpr(k) for k in range(4))

# The fields of a table's row, int64 each: addresses, then sizes.
_FIELD_NAMES = ("p", "g", "m", "m_scale", "v", "v_scale", "m_table", "v_table")
_FIELD_NAMES += ("row_old", "col_old", "row_inv", "col_inv", "row_new", "col_new")
_FIELD_NAMES += ("n", "rows", "cols", "correction", "kept", "tick", "seed")
FIELDS = tl.constexpr(len(_FIELD_NAMES))
(P, G, M, M_SCALE, V, V_SCALE, M_TABLE, V_TABLE, ROW_OLD, COL_OLD, ROW_INV, COL_INV) = (
    tl.constexpr(k) for k in range(12)
)
ROW_NEW, COL_NEW, NUMEL, N_ROWS, N_COLS, CORRECTION = (tl.constexpr(k) for k in range(12, 18))
TICK, SEED = tl.constexpr(19), tl.constexpr(20)


@triton.jit
def _field(table_ptr, tensor, k):
    return tl.load(table_ptr + tensor * FIELDS + k)


@triton.jit
def _floats(table_ptr, tensor, k):
    return _field(table_ptr, tensor, k).to(tl.pointer_type(tl.float32))


@triton.jit
def _bytes(table_ptr, tensor, k):
    return _field(table_ptr, tensor, k).to(tl.pointer_type(tl.uint8))


@triton.jit
def _gradient(p_ptr, correction, g_ptr, at, inside, hyper_ptr, KEPT: tl.constexpr):
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32) * tl.load(hyper_ptr + 2)
    l2 = tl.load(hyper_ptr + 1)
    # No traffic without L2 decay: the mask is false throughout then. (The interpreter cannot
    # broadcast a scalar condition.)
    wanted = inside & (tl.full(at.shape, 0.0, dtype=tl.float32) + l2 != 0)
    return g + l2 * read_weight(p_ptr, correction, at, wanted, KEPT)


@triton.jit
def _second(v, g, hyper_ptr):
    return tl.load(hyper_ptr + 4) * v + (tl.load(hyper_ptr + 5) * g) * g


@triton.jit
def _look_kernel(
    programs_ptr, table_ptr, hyper_ptr, p_like, g_like, KIND: tl.constexpr, KEPT: tl.constexpr
):
    """Pass 1. Rank-1: maxima of the new second moment. Factored: partial sums of g * g."""
    tensor = tl.load(programs_ptr + 2 * tl.program_id(0)).to(tl.int64)
    chunk = tl.load(programs_ptr + 2 * tl.program_id(0) + 1).to(tl.int64)
    hyper_ptr += tensor * 8
    p_ptr = _field(table_ptr, tensor, P).to(p_like.dtype)
    g_ptr = _field(table_ptr, tensor, G).to(g_like.dtype)
    correction = _field(table_ptr, tensor, CORRECTION)
    rows, cols = _field(table_ptr, tensor, N_ROWS), _field(table_ptr, tensor, N_COLS)
    row_new, col_new = _field(table_ptr, tensor, ROW_NEW), _field(table_ptr, tensor, COL_NEW)
    across = (cols + 127) // 128
    col = chunk % across * 128 + tl.arange(0, 128)
    if KIND == RANK1:
        row_ptr, col_ptr = (
            row_new.to(tl.pointer_type(tl.int32)),
            col_new.to(tl.pointer_type(tl.int32)),
        )
        codes_ptr, values_ptr = _bytes(table_ptr, tensor, V), _floats(table_ptr, tensor, V_TABLE)
        row_old = _floats(table_ptr, tensor, ROW_OLD)
        col_old = tl.load(_floats(table_ptr, tensor, COL_OLD) + col, mask=col < cols, other=0.0)
        col_top = tl.zeros([128], dtype=tl.int32)
    else:
        row_part = row_new.to(tl.pointer_type(tl.float32)) + chunk % across * rows
        col_part = col_new.to(tl.pointer_type(tl.float32)) + chunk // across * cols
        col_sum = tl.zeros([128], dtype=tl.float32)
    for first in range(0, ROWS, TILE):
        row = chunk // across * ROWS + first + tl.arange(0, TILE)
        at = row[:, None] * cols + col[None, :]
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        g = _gradient(p_ptr, correction, g_ptr, at, inside, hyper_ptr, KEPT)
        if KIND == RANK1:
            place_in = at % 128
            byte = tl.load(codes_ptr + at // 128 * 64 + place_in % 64, mask=inside, other=0)
            code = (byte.to(tl.int32) >> (place_in // 64 * 4).to(tl.int32)) & 15
            scale = tl.load(row_old + row, mask=row < rows, other=0.0)
            old = tl.load(values_ptr + code) * least(scale[:, None], col_old[None, :])
            size = tl.where(inside, magnitude(_second(old, g, hyper_ptr)), 0)
            tl.atomic_max(row_ptr + row, tl.max(size, axis=1), mask=row < rows)
            col_top = tl.maximum(col_top, tl.max(size, axis=0))
        else:
            square = tl.where(inside, g * g, 0.0)
            tl.store(row_part + row, tl.sum(square, axis=1), mask=row < rows)
            col_sum += tl.sum(square, axis=0)
    if KIND == RANK1:
        tl.atomic_max(col_ptr + col, col_top, mask=col < cols)
    else:
        tl.store(col_part + col, col_sum, mask=col < cols)


@triton.jit
def _mean_kernel(programs_ptr, table_ptr, hyper_ptr):
    """New row (or column) means from the partial sums, always added in the same order."""
    tensor = tl.load(programs_ptr + 2 * tl.program_id(0)).to(tl.int64)
    piece = tl.load(programs_ptr + 2 * tl.program_id(0) + 1).to(tl.int64)
    rows, cols = _field(table_ptr, tensor, N_ROWS), _field(table_ptr, tensor, N_COLS)
    row_pieces = (rows + 127) // 128
    of_rows = piece < row_pieces
    length = tl.where(of_rows, rows, cols)
    parts = tl.where(of_rows, (cols + 127) // 128, (rows + ROWS - 1) // ROWS)
    k = tl.where(of_rows, piece, piece - row_pieces) * 128 + tl.arange(0, 128)
    row_part, col_part = _field(table_ptr, tensor, ROW_NEW), _field(table_ptr, tensor, COL_NEW)
    row_mean, col_mean = _field(table_ptr, tensor, V), _field(table_ptr, tensor, V_SCALE)
    part = tl.where(of_rows, row_part, col_part).to(tl.pointer_type(tl.float32))
    mean = tl.where(of_rows, row_mean, col_mean).to(tl.pointer_type(tl.float32))
    total = tl.zeros([128], dtype=tl.float32)
    for i in range(0, parts):
        total += tl.load(part + i * length + k, mask=k < length, other=0.0)
    total = total / tl.where(of_rows, cols, rows).to(tl.float32)
    b2, w2 = tl.load(hyper_ptr + tensor * 8 + 4), tl.load(hyper_ptr + tensor * 8 + 5)
    old = tl.load(mean + k, mask=k < length, other=0.0)
    tl.store(mean + k, b2 * old + w2 * total, mask=k < length)


@triton.jit
def _ratio_kernel(table_ptr):
    """Row means over their mean, zero where that is zero; one program a tensor."""
    tensor = tl.program_id(0).to(tl.int64)
    rows = _field(table_ptr, tensor, N_ROWS)
    mean_ptr, ratio_ptr = _floats(table_ptr, tensor, V), _floats(table_ptr, tensor, ROW_INV)
    k = tl.arange(0, PIECE)
    total = tl.zeros([PIECE], dtype=tl.float32)
    for first in range(0, rows, PIECE):
        total += tl.load(mean_ptr + first + k, mask=first + k < rows, other=0.0)
    mean = tl.sum(total, axis=0) / rows.to(tl.float32)
    divisor = tl.where(mean == 0, 1.0, mean)
    for first in range(0, rows, PIECE):
        row = tl.load(mean_ptr + first + k, mask=first + k < rows, other=0.0)
        ratio = tl.where(mean == 0, 0.0, row / divisor)
        tl.store(ratio_ptr + first + k, ratio, mask=first + k < rows)


@triton.jit
def _half(
    table_ptr, tensor, hyper_ptr, p_like, g_like, chunk, lane, m_code, v_code,
    KIND: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """The update of one half of each block: new moments (rank-1: times the new reciprocals)."""
    p_ptr = _field(table_ptr, tensor, P).to(p_like.dtype)
    g_ptr = _field(table_ptr, tensor, G).to(g_like.dtype)
    correction = _field(table_ptr, tensor, CORRECTION)
    block = chunk * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * 128 + lane[None, :]
    inside = at < _field(table_ptr, tensor, NUMEL)
    g = _gradient(p_ptr, correction, g_ptr, at, inside, hyper_ptr, KEPT)
    scaling = g
    if KIND == EXACT:
        m_ptr, v_ptr = _floats(table_ptr, tensor, M), _floats(table_ptr, tensor, V)
        m = tl.load(m_ptr + at, mask=inside, other=0.0)
        v = tl.load(v_ptr + at, mask=inside, other=0.0)
    else:
        real = block < (_field(table_ptr, tensor, NUMEL) + 127) // 128
        scale = tl.load(_floats(table_ptr, tensor, M_SCALE) + block, mask=real, other=0.0)
        m = tl.load(_floats(table_ptr, tensor, M_TABLE) + m_code) * scale[:, None]
        if KIND == BLOCK:
            scale = tl.load(_floats(table_ptr, tensor, V_SCALE) + block, mask=real, other=0.0)
            v = tl.load(_floats(table_ptr, tensor, V_TABLE) + v_code) * scale[:, None]
        else:
            row, col = place(block, lane, _field(table_ptr, tensor, N_COLS))
            inv = tl.load(_floats(table_ptr, tensor, ROW_INV) + row, mask=inside, other=0.0)
            if KIND == RANK1:
                a = tl.load(_floats(table_ptr, tensor, ROW_OLD) + row, mask=inside, other=0.0)
                b = tl.load(_floats(table_ptr, tensor, COL_OLD) + col, mask=inside, other=0.0)
                v = tl.load(_floats(table_ptr, tensor, V_TABLE) + v_code) * least(a, b)
                other = tl.load(_floats(table_ptr, tensor, COL_INV) + col, mask=inside, other=0.0)
                scaling = tl.maximum(inv, other)
            else:
                mean = tl.load(_floats(table_ptr, tensor, V_SCALE) + col, mask=inside, other=0.0)
                v = inv * mean
    m = tl.where(inside, m + tl.load(hyper_ptr + 3) * (g - m), 0.0)
    if KIND != FACTORED:
        v = tl.where(inside, _second(v, g, hyper_ptr), 0.0)
    p = read_weight(p_ptr, correction, at, inside, KEPT)
    update = (tl.load(hyper_ptr + 6) * m) / (tl.sqrt(v) + tl.load(hyper_ptr + 7))
    p = p * tl.load(hyper_ptr) - update
    draw = 0
    if KEPT == DRAWN:
        seed = ticked(_field(table_ptr, tensor, SEED), _field(table_ptr, tensor, TICK))
        draw = draws(seed, chunk, lane, at)
    write_weight(p_ptr, correction, at, inside, p, draw, KEPT)
    if KIND == EXACT:
        tl.store(m_ptr + at, m, mask=inside)
        tl.store(v_ptr + at, v, mask=inside)
    if KIND == RANK1:
        v = v * scaling
    return m, v


@triton.jit
def _update_kernel(
    programs_ptr, table_ptr, hyper_ptr, p_like, g_like, KIND: tl.constexpr, KEPT: tl.constexpr
):
    """Decode both moments, update the parameter, encode both: eight blocks of 128 a program."""
    tensor = tl.load(programs_ptr + 2 * tl.program_id(0)).to(tl.int64)
    chunk = tl.load(programs_ptr + 2 * tl.program_id(0) + 1).to(tl.int64)
    hyper_ptr += tensor * 8
    block = chunk * BLOCKS + tl.arange(0, BLOCKS)
    lane = tl.arange(0, 64)
    real = block < (_field(table_ptr, tensor, NUMEL) + 127) // 128
    at = block[:, None] * 64 + lane[None, :]
    m_byte = tl.zeros([BLOCKS, 64], dtype=tl.int32)
    v_byte = m_byte
    if KIND != EXACT:
        m_codes = _bytes(table_ptr, tensor, M)
        m_byte = tl.load(m_codes + at, mask=real[:, None], other=0).to(tl.int32)
    if (KIND == BLOCK) | (KIND == RANK1):
        v_codes = _bytes(table_ptr, tensor, V)
        v_byte = tl.load(v_codes + at, mask=real[:, None], other=0).to(tl.int32)
    m_low, v_low = _half(
        table_ptr, tensor, hyper_ptr, p_like, g_like, chunk, lane, m_byte & 15, v_byte & 15,
        KIND, KEPT,
    )  # fmt: skip
    m_high, v_high = _half(
        table_ptr, tensor, hyper_ptr, p_like, g_like, chunk, lane + 64, m_byte >> 4, v_byte >> 4,
        KIND, KEPT,
    )  # fmt: skip
    if KIND != EXACT:
        bounds = _floats(table_ptr, tensor, M_TABLE) + 16
        scale = _top(m_low, m_high)
        tl.store(_floats(table_ptr, tensor, M_SCALE) + block, scale, mask=real)
        code = encode(m_low, bounds, scale[:, None]) | (encode(m_high, bounds, scale[:, None]) << 4)
        tl.store(m_codes + at, code.to(tl.uint8), mask=real[:, None])
    if (KIND == BLOCK) | (KIND == RANK1):
        bounds = _floats(table_ptr, tensor, V_TABLE) + 16
        scale = tl.full([BLOCKS], 1.0, dtype=tl.float32)
        if KIND == BLOCK:
            scale = _top(v_low, v_high)
            tl.store(_floats(table_ptr, tensor, V_SCALE) + block, scale, mask=real)
        code = encode(v_low, bounds, scale[:, None]) | (encode(v_high, bounds, scale[:, None]) << 4)
        tl.store(v_codes + at, code.to(tl.uint8), mask=real[:, None])


@triton.jit
def _top(low, high):
    top = tl.max(tl.maximum(magnitude(low), magnitude(high)), axis=1)
    return top.to(tl.float32, bitcast=True)


_LISTS = {"programs_ptr": "*i32", "table_ptr": "*i64", "hyper_ptr": "*fp32"}
# Weight, gradient, KEPT.
DTYPES = [("*fp32", "*fp32", 0), ("*bf16", "*bf16", 0), ("*fp16", "*fp16", 0)]
DTYPES += [("*bf16", "*fp32", 0), *(("*bf16", "*bf16", kept) for kept in (1, 8, 16))]
DTYPES += [("*fp16", "*fp16", kept) for kept in (8, 16)]
_UPDATES = [(_update_kernel, {"KIND": kind}) for kind in range(4)]
_LOOKS = [(_look_kernel, {"KIND": kind, "num_warps": LOOK_WARPS}) for kind in (2, 3)]
AOT_CASES = [
    (kernel, {**_LISTS, "p_like": p, "g_like": g}, {**form, "KEPT": kept})
    for p, g, kept in DTYPES
    for kernel, form in _UPDATES + _LOOKS
]
AOT_CASES += [(_mean_kernel, _LISTS, {}), (_ratio_kernel, {"table_ptr": "*i64"}, {})]
