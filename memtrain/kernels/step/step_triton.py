"""Triton kernels of the fused step: one launch a pass for all parameters of a kind and dtype."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from memtrain.kernels.codebook.quantize_triton import encode, least, magnitude, place
from memtrain.kernels.device_guard import launch
from memtrain.kernels.step.split_triton import DRAWN, draws, read_weight, ticked, write_weight

ROWS = tl.constexpr(256)  # rows per program of the first pass, in tiles of TILE x 128
TILE = tl.constexpr(16)
REDUCE_WARPS = 8
PIECE = tl.constexpr(1024)
ADAMW, SGD, LION = (tl.constexpr(k) for k in range(3))  # as in `update_rules.RULES`
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
def _updated(p, g, m, v, scalars, RULE: tl.constexpr, SECOND: tl.constexpr):
    """A rule's update, as `update_rules.py` has it: the new parameter and states."""
    decay = tl.load(scalars)
    a, b, c = tl.load(scalars + 3), tl.load(scalars + 4), tl.load(scalars + 5)
    d, e = tl.load(scalars + 6), tl.load(scalars + 7)
    if RULE == ADAMW:
        m = m + a * (g - m)
        if SECOND != FACTORED:
            v = b * v + (c * g) * g
        p = p * decay - (d * m) / (tl.sqrt(v) + e)
    elif RULE == SGD:
        m = a * m + b * g
        nesterov = tl.full(g.shape, 0.0, dtype=tl.float32) + c != 0
        p = p - d * tl.where(nesterov, g + c * m, m)
    elif RULE == LION:
        step = a * m + b * g
        step = tl.where(step > 0, 1.0, tl.where(step < 0, -1.0, step))
        m = c * m + d * g
        p = p * decay - e * step
    else:
        tl.static_assert(False, "a rule of RULES without its branch")
    return p, m, v


@triton.jit
def _reduce_kernel(
    programs_ptr, table_ptr, scalars_ptr, p_like, g_like,
    SECOND: tl.constexpr, MASTER: tl.constexpr,
):  # fmt: skip
    """Pass 1. Rank-1: maxima of the new second moment. Factored: partial sums of g * g."""
    tensor = tl.load(programs_ptr + 2 * tl.program_id(0)).to(tl.int64)
    chunk = tl.load(programs_ptr + 2 * tl.program_id(0) + 1).to(tl.int64)
    scalars = scalars_ptr + tensor * 8
    p_ptr = _field(table_ptr, tensor, P).to(p_like.dtype)
    g_ptr = _field(table_ptr, tensor, G).to(g_like.dtype)
    correction = _field(table_ptr, tensor, CORRECTION)
    rows, cols = _field(table_ptr, tensor, N_ROWS), _field(table_ptr, tensor, N_COLS)
    row_new, col_new = _field(table_ptr, tensor, ROW_NEW), _field(table_ptr, tensor, COL_NEW)
    across = (cols + 127) // 128
    col = chunk % across * 128 + tl.arange(0, 128)
    if SECOND == RANK1:
        row_ptr, col_ptr = (
            row_new.to(tl.pointer_type(tl.int32)),
            col_new.to(tl.pointer_type(tl.int32)),
        )
        codes_ptr = _bytes(table_ptr, tensor, SECOND_STATE)
        values_ptr = _floats(table_ptr, tensor, SECOND_STATE + 2)
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
        # The scalars are loaded where they are used: held over the loop, they would spill.
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scalars + 2)
        l2 = tl.load(scalars + 1)
        # No traffic without L2 decay: the mask is false throughout then. (The interpreter cannot
        # broadcast a scalar condition.)
        wanted = inside & (tl.full(at.shape, 0.0, dtype=tl.float32) + l2 != 0)
        g = g + l2 * read_weight(p_ptr, correction, at, wanted, MASTER)
        if SECOND == RANK1:
            place_in = at % 128
            byte = tl.load(codes_ptr + at // 128 * 64 + place_in % 64, mask=inside, other=0)
            code = (byte.to(tl.int32) >> (place_in // 64 * 4).to(tl.int32)) & 15
            scale = tl.load(row_old + row, mask=row < rows, other=0.0)
            old = tl.load(values_ptr + code) * least(scale[:, None], col_old[None, :])
            new = tl.load(scalars + 4) * old + (tl.load(scalars + 5) * g) * g
            size = tl.where(inside, magnitude(new), 0)
            tl.atomic_max(row_ptr + row, tl.max(size, axis=1), mask=row < rows)
            col_top = tl.maximum(col_top, tl.max(size, axis=0))
        else:
            square = tl.where(inside, g * g, 0.0)
            tl.store(row_part + row, tl.sum(square, axis=1), mask=row < rows)
            col_sum += tl.sum(square, axis=0)
    if SECOND == RANK1:
        tl.atomic_max(col_ptr + col, col_top, mask=col < cols)
    else:
        tl.store(col_part + col, col_sum, mask=col < cols)


@triton.jit
def _mean_kernel(programs_ptr, table_ptr):
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
    row_mean = _field(table_ptr, tensor, SECOND_STATE)
    col_mean = _field(table_ptr, tensor, SECOND_STATE + 1)
    part = tl.where(of_rows, row_part, col_part).to(tl.pointer_type(tl.float32))
    mean = tl.where(of_rows, row_mean, col_mean).to(tl.pointer_type(tl.float32))
    total = tl.zeros([128], dtype=tl.float32)
    for i in range(0, parts):
        total += tl.load(part + i * length + k, mask=k < length, other=0.0)
    total = total / tl.where(of_rows, cols, rows).to(tl.float32)
    scalars = _floats(table_ptr, tensor, SCALARS)
    b2, w2 = tl.load(scalars + 4), tl.load(scalars + 5)
    old = tl.load(mean + k, mask=k < length, other=0.0)
    tl.store(mean + k, b2 * old + w2 * total, mask=k < length)


@triton.jit
def _ratio_kernel(table_ptr):
    """Row means over their mean, zero where that is zero; one program a tensor."""
    tensor = tl.program_id(0).to(tl.int64)
    rows = _field(table_ptr, tensor, N_ROWS)
    mean_ptr, ratio_ptr = (
        _floats(table_ptr, tensor, SECOND_STATE),
        _floats(table_ptr, tensor, ROW_INV),
    )
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
def _encode8(x, bounds_ptr, scale):
    """The number of bounds (times the scale) below x, by halving; NaN and a scale of Inf give 0."""
    scale += scale - scale  # Inf becomes NaN
    code = tl.zeros(x.shape, dtype=tl.int32)
    for k in tl.static_range(8):
        half = 128 >> k
        bound = tl.load(bounds_ptr + code + (half - 1)) * scale
        code = tl.where(x > bound, code + half, code)
    return code


@triton.jit
def _decoded(
    table_ptr, tensor, state, at, inside, block, real, code, BITS: tl.constexpr
):  # fmt: skip
    """A state of its own, or in blocks with a scale each."""
    if BITS == 32:
        return tl.load(_floats(table_ptr, tensor, state) + at, mask=inside, other=0.0)
    scale = tl.load(_floats(table_ptr, tensor, state + 1) + block, mask=real, other=0.0)
    return tl.load(_floats(table_ptr, tensor, state + 2) + code) * scale[:, None]


@triton.jit
def _half(
    table_ptr, tensor, p_like, g_like, chunk, block, lane, m_code, v_code,
    RULE: tl.constexpr, STATES: tl.constexpr, BITS: tl.constexpr, SECOND: tl.constexpr,
    SIZE: tl.constexpr, MASTER: tl.constexpr,
):  # fmt: skip
    """The update of one half of each block: new states (rank-1: times the new reciprocals)."""
    numel = _field(table_ptr, tensor, NUMEL)
    scalars = _floats(table_ptr, tensor, SCALARS)
    p_ptr = _field(table_ptr, tensor, P).to(p_like.dtype)
    g_ptr = _field(table_ptr, tensor, G).to(g_like.dtype)
    correction = _field(table_ptr, tensor, CORRECTION)
    at = block[:, None] * SIZE + lane[None, :]
    inside = at < numel
    real = block * SIZE < numel
    p = read_weight(p_ptr, correction, at, inside, MASTER)
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scalars + 2)
    l2 = tl.load(scalars + 1)
    g = tl.where(tl.full(at.shape, 0.0, dtype=tl.float32) + l2 != 0, g + l2 * p, g)
    scaling = g
    m = tl.zeros(at.shape, dtype=tl.float32)
    if STATES > 0:
        m = _decoded(table_ptr, tensor, FIRST, at, inside, block, real, m_code, BITS)
    v = m
    if SECOND != AS_FIRST:
        row, col = place(
            (block * (SIZE // 128))[:, None], lane[None, :], 128, _field(table_ptr, tensor, N_COLS)
        )
        inv = tl.load(_floats(table_ptr, tensor, ROW_INV) + row, mask=inside, other=0.0)
        if SECOND == RANK1:
            a = tl.load(_floats(table_ptr, tensor, ROW_OLD) + row, mask=inside, other=0.0)
            b = tl.load(_floats(table_ptr, tensor, COL_OLD) + col, mask=inside, other=0.0)
            v = tl.load(_floats(table_ptr, tensor, SECOND_STATE + 2) + v_code) * least(a, b)
            other = tl.load(_floats(table_ptr, tensor, COL_INV) + col, mask=inside, other=0.0)
            scaling = tl.maximum(inv, other)
        else:
            means = _floats(table_ptr, tensor, SECOND_STATE + 1)
            v = inv * tl.load(means + col, mask=inside, other=0.0)
    elif STATES > 1:
        v = _decoded(table_ptr, tensor, SECOND_STATE, at, inside, block, real, v_code, BITS)
    p, m, v = _updated(p, g, m, v, scalars, RULE, SECOND)
    draw = 0
    if MASTER == DRAWN:
        seed = ticked(_field(table_ptr, tensor, SEED), _field(table_ptr, tensor, TICK))
        draw = draws(seed, chunk, lane, at)
    write_weight(p_ptr, correction, at, inside, p, draw, MASTER)
    if BITS == 32:
        tl.store(_floats(table_ptr, tensor, FIRST) + at, m, mask=inside)
        if STATES > 1:
            tl.store(_floats(table_ptr, tensor, SECOND_STATE) + at, v, mask=inside)
    m, v = tl.where(inside, m, 0.0), tl.where(inside, v, 0.0)
    if SECOND == RANK1:
        v = v * scaling
    return m, v


@triton.jit
def _read_codes(table_ptr, tensor, state, real, at, BITS: tl.constexpr, HALF: tl.constexpr):
    """The codes of both halves of the blocks of one state."""
    codes = _bytes(table_ptr, tensor, state)
    byte = tl.load(codes + at, mask=real[:, None], other=0).to(tl.int32)
    if BITS == 8:
        high = tl.load(codes + at + HALF, mask=real[:, None], other=0).to(tl.int32)
        return byte, high
    return byte & 15, byte >> 4


@triton.jit
def _write_codes(
    table_ptr, tensor, state, block, real, at, low, high,
    SCALED: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Quantise both halves of the blocks of one state; SCALED: by a scale of each block."""
    bounds = _floats(table_ptr, tensor, state + 2) + (1 << BITS)
    scale = tl.full([real.shape[0]], 1.0, dtype=tl.float32)
    if SCALED:
        top = tl.max(tl.maximum(magnitude(low), magnitude(high)), axis=1)
        scale = top.to(tl.float32, bitcast=True)
        tl.store(_floats(table_ptr, tensor, state + 1) + block, scale, mask=real)
    codes = _bytes(table_ptr, tensor, state)
    if BITS == 8:
        code = _encode8(low, bounds, scale[:, None])
        tl.store(codes + at, code.to(tl.uint8), mask=real[:, None])
        code = _encode8(high, bounds, scale[:, None])
        tl.store(codes + at + HALF, code.to(tl.uint8), mask=real[:, None])
    else:
        code = encode(low, bounds, scale[:, None]) | (encode(high, bounds, scale[:, None]) << 4)
        tl.store(codes + at, code.to(tl.uint8), mask=real[:, None])


@triton.jit
def _update_kernel(
    programs_ptr, table_ptr, p_like, g_like,
    RULE: tl.constexpr, STATES: tl.constexpr, BITS: tl.constexpr, SECOND: tl.constexpr,
    COUNT: tl.constexpr, HALF: tl.constexpr, MASTER: tl.constexpr,
):  # fmt: skip
    """Pass 2: decode the states, update the parameter, encode them: COUNT blocks a program."""
    tensor = tl.load(programs_ptr + 2 * tl.program_id(0)).to(tl.int64)
    chunk = tl.load(programs_ptr + 2 * tl.program_id(0) + 1).to(tl.int64)
    block = chunk * COUNT + tl.arange(0, COUNT)
    real = block * (2 * HALF) < _field(table_ptr, tensor, NUMEL)
    lane = tl.arange(0, HALF)
    at = block[:, None] * (2 * HALF if BITS == 8 else HALF) + lane[None, :]
    m_low = tl.zeros([COUNT, HALF], dtype=tl.int32)
    m_high, v_low, v_high = m_low, m_low, m_low
    if (BITS == 4) | (BITS == 8):
        m_low, m_high = _read_codes(table_ptr, tensor, FIRST, real, at, BITS, HALF)
        if STATES == 2 and SECOND != FACTORED:
            v_low, v_high = _read_codes(table_ptr, tensor, SECOND_STATE, real, at, BITS, HALF)
    m_low, v_low = _half(
        table_ptr, tensor, p_like, g_like, chunk, block, lane, m_low, v_low,
        RULE, STATES, BITS, SECOND, 2 * HALF, MASTER,
    )  # fmt: skip
    m_high, v_high = _half(
        table_ptr, tensor, p_like, g_like, chunk, block, lane + HALF, m_high, v_high,
        RULE, STATES, BITS, SECOND, 2 * HALF, MASTER,
    )  # fmt: skip
    if (BITS == 4) | (BITS == 8):
        _write_codes(table_ptr, tensor, FIRST, block, real, at, m_low, m_high, True, BITS, HALF)
        if STATES == 2 and SECOND != FACTORED:
            _write_codes(
                table_ptr, tensor, SECOND_STATE, block, real, at, v_low, v_high,
                SECOND == AS_FIRST, BITS, HALF,
            )  # fmt: skip


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


_LISTS = {"programs_ptr": "*i32", "table_ptr": "*i64"}
_SCALARS = {"scalars_ptr": "*fp32"}
# Weight, gradient, MASTER.
_DTYPES = [("*fp32", "*fp32", 0), ("*bf16", "*bf16", 0), ("*fp16", "*fp16", 0)]
_DTYPES += [("*bf16", "*fp32", 0), *(("*bf16", "*bf16", master) for master in (1, 8, 16))]
_DTYPES += [("*fp16", "*fp16", master) for master in (8, 16)]
# RULE, STATES, BITS, SECOND.
_KINDS = [(0, 2, 32, 0), (0, 2, 4, 0), (0, 2, 4, 1), (0, 2, 4, 2), (0, 2, 8, 0), (0, 2, 8, 2)]
_KINDS += [(rule, 1, bits, 0) for rule in (1, 2) for bits in (4, 8, 32)]
_KINDS += [(1, 0, 0, 0)]
_UPDATES = [
    {
        **dict(zip(("RULE", "STATES", "BITS", "SECOND"), kind, strict=True)),
        "COUNT": 4 if kind[2] == 8 else 8,
        "HALF": 128 if kind[2] == 8 else 64,
    }
    for kind in _KINDS
]
_REDUCES = [{"SECOND": second, "num_warps": REDUCE_WARPS} for second in (1, 2)]
AOT_CASES = [
    (kernel, {**lists, "p_like": p, "g_like": g}, {**form, "MASTER": master})
    for p, g, master in _DTYPES
    for kernel, lists, forms in (
        (_update_kernel, _LISTS, _UPDATES),
        (_reduce_kernel, _LISTS | _SCALARS, _REDUCES),
    )
    for form in forms
]
AOT_CASES += [(_mean_kernel, _LISTS, {}), (_ratio_kernel, {"table_ptr": "*i64"}, {})]
AOT_CASES += [
    (
        _point_kernel,
        {"column_ptr": "*i64", "stride": "i32", "count": "i32", **dict.fromkeys(_NAMES, dtype)},
        {},
    )
    for dtype in ("*fp32", "*bf16", "*fp16")
]
