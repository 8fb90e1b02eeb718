"""Triton kernels of the fused step: one launch a pass for all parameters of a kind and dtype."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from memtrain.kernels.codebook.quantize_triton import least, magnitude
from memtrain.kernels.device_guard import launch
from memtrain.kernels.step.codecs import MANTISSA
from memtrain.kernels.step.split_triton import DRAWN, draws, read_weight, ticked, write_weight
from memtrain.kernels.step.update_rules import COUNT as _COUNT_OF_SCALARS

ROWS = tl.constexpr(256)  # rows per program of the first pass, in tiles of TILE x 128
TILE = tl.constexpr(16)
PIECE = tl.constexpr(1024)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
PLACES = tl.constexpr(_COUNT_OF_SCALARS)  # of the scalars of a step
TINY = tl.constexpr(0x12800000)  # bits of 2**-90: bounds times smaller scales lose bits
SHIFT4, SHIFT8 = (tl.constexpr(23 - MANTISSA[bits]) for bits in (4, 8))  # of `upper_buckets`
CENTRE4, CENTRE8 = (tl.constexpr(2 ** (8 + MANTISSA[bits])) for bits in (4, 8))
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
GUARD = tl.constexpr(29)


@triton.jit
def _field(table_ptr, tensor, k):
    return tl.load(table_ptr + tensor * FIELDS + k)


@triton.jit
def _pointer(table_ptr, tensor, k, dtype: tl.constexpr, WHOLE: tl.constexpr):
    """The address in field k. WHOLE: the compiler is told what it cannot see in a table."""
    pointer = _field(table_ptr, tensor, k).to(tl.pointer_type(dtype))
    if WHOLE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _floats(table_ptr, tensor, k):
    return _pointer(table_ptr, tensor, k, tl.float32, False)


@triton.jit
def _unless_refused(table_ptr, tensor, count):
    """`count`; 0 where a tensor has a guard and that is not finite."""
    guard = _field(table_ptr, tensor, GUARD)
    bits = tl.load(guard.to(tl.pointer_type(tl.int32)), mask=guard != 0, other=0)
    return tl.where((bits & 0x7FFFFFFF) < 0x7F800000, count, 0)


@triton.jit
def _numbers(scalars):
    """The eight scalars of a step."""
    return (
        tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3),
        tl.load(scalars + 4), tl.load(scalars + 5), tl.load(scalars + 6), tl.load(scalars + 7),
    )  # fmt: skip


@triton.jit
def quotient(x, y):
    """A quotient within 1.5 units in the last place; y is 0, or neither subnormal nor over 2**126.

    `/` scales both before, which takes six instructions more; and the interpreter has no PTX.
    """
    if INTERPRETED:
        return x / y
    else:
        return x * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _updated(p, g, m, v, numbers, RULE: tl.constexpr, SECOND: tl.constexpr):
    """A rule's update, as `update_rules.py` has it: the new parameter and states."""
    decay, _, _, a, b, c, d, e = numbers
    if RULE == ADAMW:
        m = m + a * (g - m)
        if SECOND != FACTORED:
            v = b * v + (c * g) * g
        p = p * decay - quotient(d * m, tl.sqrt(v) + e)
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
    p_ptr = _pointer(table_ptr, tensor, P, p_like.dtype.element_ty, WHOLE)
    g_ptr = _pointer(table_ptr, tensor, G, g_like.dtype.element_ty, WHOLE)
    lost_ptr = _lost(table_ptr, tensor, MASTER, WHOLE)
    rows, cols = _field(table_ptr, tensor, N_ROWS), _field(table_ptr, tensor, N_COLS)
    if WHOLE:
        cols = cols // 128 * 128  # it is: the compiler sees it so
    across = (cols + 127) // 128
    first_col = chunk % across * 128
    first_row = chunk // across * ROWS
    start = first_row * cols + first_col
    p_ptr, g_ptr, lost_ptr = p_ptr + start, g_ptr + start, lost_ptr + start
    left = tl.minimum(rows - first_row, ROWS).to(tl.int32)
    if SECOND == RANK1:
        row_ptr = _pointer(table_ptr, tensor, ROW_NEW, tl.int32, False) + first_row
        col_ptr = _pointer(table_ptr, tensor, COL_NEW, tl.int32, WHOLE) + first_col
        codes_ptr = _pointer(table_ptr, tensor, SECOND_STATE, tl.uint8, WHOLE)
        values_ptr = _floats(table_ptr, tensor, SECOND_STATE + 2)
        row_old = _floats(table_ptr, tensor, ROW_OLD) + first_row
        col_old = _pointer(table_ptr, tensor, COL_OLD, tl.float32, WHOLE) + first_col
    else:
        row_part = _floats(table_ptr, tensor, ROW_NEW) + chunk % across * rows + first_row
        col_part = _pointer(table_ptr, tensor, COL_NEW, tl.float32, WHOLE)
        col_part += first_row // ROWS * cols + first_col
    if SECOND == RANK1 and WHOLE:
        # Whole blocks of 128: a byte's two elements are 64 columns apart.
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
    rows, cols = _field(table_ptr, tensor, N_ROWS), _field(table_ptr, tensor, N_COLS)
    row_pieces = (rows + 127) // 128
    of_rows = piece < row_pieces
    length = tl.where(of_rows, rows, cols)
    written = _unless_refused(table_ptr, tensor, length)
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
    tl.store(mean + k, b2 * old + w2 * total, mask=k < written)


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
def _encode(x, state, scale, usable, SCALED: tl.constexpr, BITS: tl.constexpr):
    """The number of bounds (times the scale) below x; one at most is in doubt by x's upper bits."""
    SHIFT: tl.constexpr = SHIFT8 if BITS == 8 else SHIFT4
    CENTRE: tl.constexpr = CENTRE8 if BITS == 8 else CENTRE4
    starts_ptr = state[3] + CENTRE
    ratio = x
    if SCALED:
        ratio = x * (1.0 / tl.where(usable, scale, 1.0))
        starts_ptr += tl.where(usable, 0, 2 * CENTRE)
    start = tl.load(starts_ptr + (ratio.to(tl.int32, bitcast=True) >> SHIFT))
    code = start.to(tl.int32)
    if BITS == 8:
        bound = tl.load(state[2] + 256 + code)
    else:
        bound = (start >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    if SCALED:
        bound *= scale + (scale - scale)  # Inf becomes NaN: no bound is below x
    return tl.where(x > bound, code + 1, code)


@triton.jit
def _encode_tiny(x, state, scale, BITS: tl.constexpr):
    """The same by halving: products of bounds and tiny scales lose bits, and more is in doubt."""
    scale += scale - scale
    code = tl.zeros(x.shape, dtype=tl.int32)
    for k in tl.static_range(BITS):
        bound = tl.load(state[2] + 2**BITS + code + (2 ** (BITS - 1 - k) - 1)) * scale
        code = tl.where(x > bound, code + 2 ** (BITS - 1 - k), code)
    return code


@triton.jit
def _lost(table_ptr, tensor, MASTER: tl.constexpr, WHOLE: tl.constexpr):
    """Where the corrections of weights are, if there are any."""
    if MASTER == 8:
        return _pointer(table_ptr, tensor, CORRECTION, tl.int8, WHOLE)
    else:
        return _pointer(table_ptr, tensor, CORRECTION, tl.int16, WHOLE)


@triton.jit
def _state(
    table_ptr, tensor, state, first, BITS: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """A state's addresses from element `first` on: numbers or codes, scales, values, buckets."""
    if BITS == 32:
        data = _pointer(table_ptr, tensor, state, tl.float32, WHOLE) + first
    else:
        data = _pointer(table_ptr, tensor, state, tl.uint8, WHOLE) + first // (8 // BITS)
    scale = _floats(table_ptr, tensor, state + 1) + first // SIZE
    values = _floats(table_ptr, tensor, state + 2)
    if BITS == 8:
        starts = _pointer(table_ptr, tensor, state + 3, tl.uint8, False)
    else:
        starts = _pointer(table_ptr, tensor, state + 3, tl.int64, False)
    return data, scale, values, starts


@triton.jit
def _read_codes(state, real, at, BITS: tl.constexpr, HALF: tl.constexpr):
    """The codes of both halves of the blocks of one state."""
    byte = tl.load(state[0] + at, mask=real, other=0).to(tl.int32)
    if BITS == 8:
        high = tl.load(state[0] + at + HALF, mask=real, other=0).to(tl.int32)
        return byte, high
    return byte & 15, byte >> 4


@triton.jit
def _scale(low, high, state, row, real):
    """The bits of the new scale of each block, which are stored."""
    top = tl.max(tl.maximum(magnitude(low), magnitude(high)), axis=1)[:, None]
    tl.store(state[1] + row, top.to(tl.float32, bitcast=True), mask=real)
    return top


@triton.jit
def _write_codes(
    state, top, tiny, real, at, low, high,
    SCALED: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Quantise both halves of the blocks of one state; SCALED: by a scale of each block."""
    scale = top.to(tl.float32, bitcast=True)
    usable = (top > 0) & (top < 0x7F800000)
    if not SCALED:
        low_code = _encode(low, state, scale, usable, False, BITS)
        high_code = _encode(high, state, scale, usable, False, BITS)
    elif tiny:
        low_code = _encode_tiny(low, state, scale, BITS)
        high_code = _encode_tiny(high, state, scale, BITS)
    else:
        low_code = _encode(low, state, scale, usable, True, BITS)
        high_code = _encode(high, state, scale, usable, True, BITS)
    if BITS == 8:
        tl.store(state[0] + at, low_code.to(tl.uint8), mask=real)
        tl.store(state[0] + at + HALF, high_code.to(tl.uint8), mask=real)
    else:
        tl.store(state[0] + at, (low_code | (high_code << 4)).to(tl.uint8), mask=real)


@triton.jit
def _update_kernel(
    programs_ptr, table_ptr, p_like, g_like,
    RULE: tl.constexpr, STATES: tl.constexpr, BITS: tl.constexpr, SECOND: tl.constexpr,
    COUNT: tl.constexpr, HALF: tl.constexpr, MASTER: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Pass 2: decode the states, update the parameter, encode them: COUNT blocks a program.

    WHOLE: addresses are aligned, and lengths (rank-1, factored: of rows) whole, as `is_whole` says.
    """
    SIZE: tl.constexpr = 2 * HALF
    tensor = tl.load(programs_ptr + 2 * tl.program_id(0)).to(tl.int64)
    chunk = tl.load(programs_ptr + 2 * tl.program_id(0) + 1)
    first = chunk.to(tl.int64) * (COUNT * SIZE)
    # From here on 32 bits do.
    numel = _unless_refused(table_ptr, tensor, _field(table_ptr, tensor, NUMEL))
    left = tl.minimum(numel - first, COUNT * SIZE).to(tl.int32)
    if WHOLE:
        left = tl.multiple_of(left, 16)
    row, lane = tl.arange(0, COUNT)[:, None], tl.arange(0, HALF)[None, :]
    real = row * SIZE < left
    numbers = _numbers(_floats(table_ptr, tensor, SCALARS))
    p_ptr = _pointer(table_ptr, tensor, P, p_like.dtype.element_ty, WHOLE) + first
    g_ptr = _pointer(table_ptr, tensor, G, g_like.dtype.element_ty, WHOLE) + first
    lost_ptr = _lost(table_ptr, tensor, MASTER, WHOLE) + first

    low_draw = 0
    high_draw = 0
    if MASTER == DRAWN:
        seed = ticked(_field(table_ptr, tensor, SEED), _field(table_ptr, tensor, TICK))
        low_draw, high_draw = draws(seed, chunk, COUNT, HALF)
    # The addresses of states that there are.
    m_low = tl.zeros([COUNT, HALF], dtype=tl.int32)
    m_high, v_low, v_high = m_low, m_low, m_low
    m_state, v_state = (), ()
    at = row * (SIZE if BITS == 8 else HALF) + lane
    if STATES > 0:
        m_state = _state(table_ptr, tensor, FIRST, first, BITS, SIZE, WHOLE)
        if BITS != 32:
            m_low, m_high = _read_codes(m_state, real, at, BITS, HALF)
    if STATES > 1 and SECOND != FACTORED:
        v_state = _state(table_ptr, tensor, SECOND_STATE, first, BITS, SIZE, WHOLE)
        if BITS != 32:
            v_low, v_high = _read_codes(v_state, real, at, BITS, HALF)
    m_scale, v_scale = 0.0, 0.0
    if BITS != 32 and STATES > 0:
        m_scale = tl.load(m_state[1] + row, mask=real, other=0.0)
        if STATES > 1 and SECOND == AS_FIRST:
            v_scale = tl.load(v_state[1] + row, mask=real, other=0.0)
    lines = ()
    if SECOND != AS_FIRST:
        lines = _lines(table_ptr, tensor, chunk, row, SECOND, COUNT, SIZE, WHOLE)

    m_low, v_low = _half(
        p_ptr, g_ptr, lost_ptr, numbers, left, row, lane, m_low, v_low, m_state, v_state,
        m_scale, v_scale, lines, low_draw,
        RULE, STATES, BITS, SECOND, SIZE, MASTER, WHOLE,
    )  # fmt: skip
    m_high, v_high = _half(
        p_ptr, g_ptr, lost_ptr, numbers, left, row, lane + HALF, m_high, v_high, m_state, v_state,
        m_scale, v_scale, lines, high_draw,
        RULE, STATES, BITS, SECOND, SIZE, MASTER, WHOLE,
    )  # fmt: skip
    if STATES > 0 and BITS != 32:
        m_top = _scale(m_low, m_high, m_state, row, real)
        v_top = m_top
        if STATES == 2 and SECOND == AS_FIRST:
            v_top = _scale(v_low, v_high, v_state, row, real)
        least_top = tl.minimum(tl.where(m_top > 0, m_top, TINY), tl.where(v_top > 0, v_top, TINY))
        tiny = tl.min(tl.min(least_top, axis=1), axis=0) < TINY
        _write_codes(m_state, m_top, tiny, real, at, m_low, m_high, True, BITS, HALF)
        if STATES == 2 and SECOND != FACTORED:
            _write_codes(
                v_state, v_top, tiny, real, at, v_low, v_high, SECOND == AS_FIRST, BITS, HALF
            )  # fmt: skip


@triton.jit
def _first_elements(
    table_ptr, tensor, chunk, row, COUNT: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Row and column of the first element of each block, and how many columns there are."""
    cols = _field(table_ptr, tensor, N_COLS)
    if WHOLE:  # a block lies in one row
        each = (cols // SIZE).to(tl.int32)
        block = chunk * COUNT + row
        i = block // each
        j = (block - i * each) * SIZE
    else:
        start = (chunk.to(tl.int64) * COUNT + row) * SIZE
        i = start // cols
        j = (start - i * cols).to(tl.int32)
    return i, j, cols.to(tl.int32)


@triton.jit
def _lines(
    table_ptr, tensor, chunk, row,
    SECOND: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Where rows and columns of blocks are: the first element of each, and their vectors."""
    i, j, cols = _first_elements(table_ptr, tensor, chunk, row, COUNT, SIZE, WHOLE)
    if SECOND == RANK1:
        old_row = _floats(table_ptr, tensor, ROW_OLD)
        old_col = _pointer(table_ptr, tensor, COL_OLD, tl.float32, WHOLE)
        inv_col = _pointer(table_ptr, tensor, COL_INV, tl.float32, WHOLE)
    else:
        old_row = _floats(table_ptr, tensor, ROW_INV)
        old_col = _pointer(table_ptr, tensor, SECOND_STATE + 1, tl.float32, WHOLE)
        inv_col = old_col
    return i, j, cols, _floats(table_ptr, tensor, ROW_INV), old_row, old_col, inv_col


@triton.jit
def _loaded(
    p_ptr, g_ptr, lost_ptr, m_state, v_state, at, inside,
    NUMBERS: tl.constexpr, MASTER: tl.constexpr,
):  # fmt: skip
    p = read_weight(p_ptr, lost_ptr, at, inside, MASTER)
    g = tl.load(g_ptr + at, mask=inside).to(tl.float32)
    m = tl.zeros(at.shape, dtype=tl.float32)
    if NUMBERS > 0:
        m = tl.load(m_state[0] + at, mask=inside)
    v = m
    if NUMBERS > 1:
        v = tl.load(v_state[0] + at, mask=inside)
    return p, g, m, v


@triton.jit
def inputs(
    p_ptr, g_ptr, lost_ptr, m_state, v_state, numbers, at, left, each,
    NUMBERS: tl.constexpr, MASTER: tl.constexpr,
):  # fmt: skip
    """Parameters, gradients as a rule sees them, and the first NUMBERS states, which are numbers.

    Without L2 decay, and where all of a program's `each` elements are there, as nearly always, no
    lane is cleared before it is loaded. What is not `left` is anything.
    """
    l2, sign = numbers[1], numbers[2]
    if (l2 == 0) & (left == each):
        p, g, m, v = _loaded(p_ptr, g_ptr, lost_ptr, m_state, v_state, at, None, NUMBERS, MASTER)
        g = g * sign
    else:
        inside = at < left
        p, g, m, v = _loaded(p_ptr, g_ptr, lost_ptr, m_state, v_state, at, inside, NUMBERS, MASTER)
        g = g * sign
        if l2 != 0:
            g = g + l2 * p
    return p, g, m, v


@triton.jit
def _half(
    p_ptr, g_ptr, lost_ptr, numbers, left, row, lane, m_code, v_code, m_state, v_state,
    m_scale, v_scale, lines, draw,
    RULE: tl.constexpr, STATES: tl.constexpr, BITS: tl.constexpr, SECOND: tl.constexpr,
    SIZE: tl.constexpr, MASTER: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The update of one half of each block: new states (rank-1: times the new reciprocals)."""
    at = row * SIZE + lane
    inside = at < left
    NUMBERS: tl.constexpr = STATES if BITS == 32 else 0
    p, g, m, v = inputs(
        p_ptr, g_ptr, lost_ptr, m_state, v_state, numbers, at, left, row.shape[0] * SIZE,
        NUMBERS, MASTER,
    )  # fmt: skip
    scaling = g
    if NUMBERS == 0 and STATES > 0:
        m = tl.load(m_state[2] + m_code) * m_scale
        v = m
    if SECOND != AS_FIRST:
        first_row, first_col, cols, row_inv, row_old, col_old, col_inv = lines
        if WHOLE:
            i, j = first_row, first_col + lane
            known = row * SIZE < left
        else:
            i, j = first_row + (first_col + lane) // cols, (first_col + lane) % cols
            known = inside
        inv = tl.load(row_inv + i, mask=known, other=0.0)
        if SECOND == RANK1:
            a = tl.load(row_old + i, mask=known, other=0.0)
            b = tl.load(col_old + j, mask=inside, other=0.0)
            v = tl.load(v_state[2] + v_code) * least(a, b)
            scaling = tl.maximum(inv, tl.load(col_inv + j, mask=inside, other=0.0))
        else:
            v = inv * tl.load(col_old + j, mask=inside, other=0.0)
    elif STATES > 1 and NUMBERS == 0:
        v = tl.load(v_state[2] + v_code) * v_scale
    p, m, v = _updated(p, g, m, v, numbers, RULE, SECOND)
    write_weight(p_ptr, lost_ptr, at, inside, p, draw, MASTER)
    if BITS == 32:
        tl.store(m_state[0] + at, m, mask=inside)
        if STATES > 1:
            tl.store(v_state[0] + at, v, mask=inside)
    m, v = tl.where(inside, m, 0.0), tl.where(inside, v, 0.0)
    if SECOND == RANK1:
        v = v * scaling
    return m, v


EXACT = {"enable_fp_fusion": False}
"""Launch options: without contraction the states equal the reference's bit for bit."""


def blocks(bits: int, whole: bool) -> int:
    """Blocks of 128 of a program of the update: what all its elements share is found once.

    Twice as many where the registers are there for 32 elements a thread.

    Args:
        bits: Of the codes; 32 where states are numbers, 0 without any.
        whole: Whether all is aligned.

    Example:
        >>> blocks(4, True), blocks(4, False), blocks(0, True)
        (32, 16, 16)
    """
    return 32 if whole and bits else 16


def update_options(bits: int, second: int, whole: bool) -> dict[str, int]:
    """Launch options of the update, without which ptxas takes a stack.

    Unaligned tensors: rank-1 has each element's row and column in registers, more than a thread of
    4 warps has; of 8 bits, and of numbers that are aligned, ptxas takes too few by itself.

    Args:
        bits: As of `blocks`.
        second: What the second state is: 0 as the first, 1 rank-1, 2 factored.
        whole: Whether all is aligned.

    Example:
        >>> update_options(4, 1, False)
        {'enable_fp_fusion': False, 'num_warps': 16}
        >>> update_options(32, 0, True)
        {'enable_fp_fusion': False, 'maxnreg': 80}
    """
    if whole:
        return EXACT | ({"maxnreg": 80} if bits == 32 else {})
    if second == RANK1.value:
        return EXACT | {"num_warps": 16}
    return EXACT | ({"maxnreg": 168} if bits == 8 else {})


def reduce_options(second: int, whole: bool) -> dict[str, int]:
    """Launch options of the first pass: rank-1 takes more warps for the same reason.

    Args:
        second: As of `update_options`.
        whole: Whether all is aligned.

    Example:
        >>> reduce_options(1, False)
        {'enable_fp_fusion': False, 'num_warps': 16}
    """
    return EXACT | {"num_warps": 16 if second == RANK1.value and not whole else 8}


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
DTYPES = [("*fp32", "*fp32", 0), ("*bf16", "*bf16", 0), ("*fp16", "*fp16", 0)]
DTYPES += [("*bf16", "*fp32", 0), *(("*bf16", "*bf16", master) for master in (1, 8, 16))]
DTYPES += [("*fp16", "*fp16", master) for master in (8, 16)]
# RULE, STATES, BITS, SECOND.
_KINDS = [(0, 2, 32, 0), (0, 2, 4, 0), (0, 2, 4, 1), (0, 2, 4, 2), (0, 2, 8, 0), (0, 2, 8, 2)]
_KINDS += [(rule, 1, bits, 0) for rule in (1, 2) for bits in (4, 8, 32)]
_KINDS += [(1, 0, 0, 0)]
_UPDATES = [
    {
        **dict(zip(("RULE", "STATES", "BITS", "SECOND"), kind, strict=True)),
        "HALF": 128 if kind[2] == 8 else 64,
    }
    for kind in _KINDS
]
_REDUCES = [{"SECOND": second} for second in (1, 2)]


def _launched(form: dict[str, int], whole: bool) -> dict[str, int]:
    second = form["SECOND"]
    if "RULE" not in form:
        return form | reduce_options(second, whole)
    count = blocks(form["BITS"], whole) * 64 // form["HALF"]
    return form | {"COUNT": count} | update_options(form["BITS"], second, whole)


AOT_CASES = [
    (
        kernel,
        {**lists, "p_like": p, "g_like": g},
        {**_launched(form, whole), "MASTER": master, "WHOLE": whole},
    )
    for whole in (True, False)
    for p, g, master in DTYPES
    for kernel, lists, forms in (
        (_update_kernel, _LISTS, _UPDATES),
        (_reduce_kernel, _LISTS | _SCALARS, _REDUCES),
    )
    for form in forms
]
AOT_CASES += [(_mean_kernel, _LISTS, EXACT), (_ratio_kernel, {"table_ptr": "*i64"}, EXACT)]
AOT_CASES += [
    (
        _point_kernel,
        {"column_ptr": "*i64", "stride": "i32", "count": "i32", **dict.fromkeys(_NAMES, dtype)},
        {},
    )
    for dtype in ("*fp32", "*bf16", "*fp16")
]
