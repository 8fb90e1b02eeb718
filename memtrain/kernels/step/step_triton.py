"""The step of many tensors in one Triton launch: decode states, update the parameter, encode."""

import triton
import triton.language as tl

from memtrain.kernels.codebook.quantize_triton import least
from memtrain.kernels.step.codecs_triton import (
    TINY,
    looked_up,
    read_codes,
    state_at,
    write_codes,
    write_drawn,
    write_scale,
)
from memtrain.kernels.step.split_triton import (
    DRAWN,
    block_order,
    draws,
    read_weight,
    write_weight,
)
from memtrain.kernels.step.table_triton import (
    AS_FIRST,
    COL_INV,
    COL_OLD,
    FACTORED,
    FIRST,
    N_COLS,
    NUMEL,
    RANK1,
    ROW_INV,
    ROW_OLD,
    SCALARS,
    SECOND_STATE,
    SEED,
    G,
    P,
    address,
    corrections,
    field,
    floats,
    read_scalars,
    unless_refused,
)
from memtrain.kernels.step.update_rules_triton import EXACT, drawn, updated


@triton.jit
def _update_kernel(
    programs_ptr, table_ptr, p_like, g_like,
    RULE: tl.constexpr, STATES: tl.constexpr, BITS: tl.constexpr, SECOND: tl.constexpr,
    DRAWS: tl.constexpr, COUNT: tl.constexpr, HALF: tl.constexpr,
    MASTER: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Pass 2: decode the states, update the parameter, encode them: COUNT blocks a program.

    WHOLE: addresses are aligned, and lengths (rank-1, factored: of rows) whole, as `is_whole` says.
    """
    SIZE: tl.constexpr = 2 * HALF
    tensor = tl.load(programs_ptr + 2 * tl.program_id(0)).to(tl.int64)
    chunk = tl.load(programs_ptr + 2 * tl.program_id(0) + 1)
    first = chunk.to(tl.int64) * (COUNT * SIZE)
    # From here on 32 bits do.
    left = tl.minimum(field(table_ptr, tensor, NUMEL) - first, COUNT * SIZE).to(tl.int32)
    if WHOLE:
        left = tl.multiple_of(left, 16)
    left = unless_refused(table_ptr, tensor, left)
    row, lane = block_order(COUNT, HALF, MASTER)[:, None], tl.arange(0, HALF)[None, :]
    real = row * SIZE < left
    numbers = read_scalars(floats(table_ptr, tensor, SCALARS))
    p_ptr = address(table_ptr, tensor, P, p_like.dtype.element_ty, WHOLE) + first
    g_ptr = address(table_ptr, tensor, G, g_like.dtype.element_ty, WHOLE) + first
    lost_ptr = corrections(table_ptr, tensor, MASTER, WHOLE) + first

    seed = 0
    if MASTER == DRAWN:
        seed = field(table_ptr, tensor, SEED)
    # The addresses of states that there are.
    m_low = tl.zeros([COUNT, HALF], dtype=tl.int32)
    m_high, v_low, v_high = m_low, m_low, m_low
    m_state, v_state = (), ()
    at = row * (SIZE if BITS == 8 else HALF) + lane
    if STATES > 0:
        m_state = state_at(table_ptr, tensor, FIRST, first, BITS, SIZE, WHOLE)
        if BITS != 32:
            m_low, m_high = read_codes(m_state, real, at, BITS, HALF)
    if STATES > 1 and SECOND != FACTORED:
        v_state = state_at(table_ptr, tensor, SECOND_STATE, first, BITS, SIZE, WHOLE)
        if BITS != 32:
            v_low, v_high = read_codes(v_state, real, at, BITS, HALF)
    m_scale, v_scale = 0.0, 0.0
    if BITS != 32 and STATES > 0:
        m_scale = tl.load(m_state[1] + row, mask=real, other=0.0)
        if STATES > 1 and SECOND == AS_FIRST:
            v_scale = tl.load(v_state[1] + row, mask=real, other=0.0)
    lines = ()
    if SECOND != AS_FIRST:
        lines = _lines(table_ptr, tensor, chunk, row, SECOND, COUNT, SIZE, WHOLE)

    draw = draws(seed, chunk, False, COUNT, HALF) if MASTER == DRAWN else 0
    m_low, v_low, u_low = _half(
        p_ptr, g_ptr, lost_ptr, numbers, left, row, lane, m_low, v_low, m_state, v_state,
        m_scale, v_scale, lines, draw,
        RULE, STATES, BITS, SECOND, DRAWS, SIZE, MASTER, WHOLE,
    )  # fmt: skip
    draw = draws(seed, chunk, True, COUNT, HALF) if MASTER == DRAWN else 0
    m_high, v_high, u_high = _half(
        p_ptr, g_ptr, lost_ptr, numbers, left, row, lane + HALF, m_high, v_high, m_state, v_state,
        m_scale, v_scale, lines, draw,
        RULE, STATES, BITS, SECOND, DRAWS, SIZE, MASTER, WHOLE,
    )  # fmt: skip
    if STATES > 0 and BITS != 32:
        m_top, m_low, m_high = write_scale(m_low, m_high, m_state, row, real, lane, HALF, True)
        v_top = m_top
        if STATES == 2 and SECOND == AS_FIRST:
            v_top, _, _ = write_scale(v_low, v_high, v_state, row, real, lane, HALF, False)
        least_top = tl.minimum(tl.where(m_top > 0, m_top, TINY), tl.where(v_top > 0, v_top, TINY))
        tiny = tl.min(tl.min(least_top, axis=1), axis=0) < TINY
        if DRAWS:
            write_drawn(m_state, m_top, real, at, m_low, m_high, u_low, u_high)
        else:
            write_codes(m_state, m_top, tiny, real, at, m_low, m_high, True, BITS, HALF)
        if STATES == 2 and SECOND != FACTORED:
            write_codes(
                v_state, v_top, tiny, real, at, v_low, v_high, SECOND == AS_FIRST, BITS, HALF
            )  # fmt: skip


@triton.jit
def first_elements(
    table_ptr, tensor, chunk, row, COUNT: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Row and column of the first element of each block, and how many columns there are."""
    cols = field(table_ptr, tensor, N_COLS)
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
    i, j, cols = first_elements(table_ptr, tensor, chunk, row, COUNT, SIZE, WHOLE)
    if SECOND == RANK1:
        old_row = floats(table_ptr, tensor, ROW_OLD)
        old_col = address(table_ptr, tensor, COL_OLD, tl.float32, WHOLE)
        inv_col = address(table_ptr, tensor, COL_INV, tl.float32, WHOLE)
    else:
        old_row = floats(table_ptr, tensor, ROW_INV)
        old_col = address(table_ptr, tensor, SECOND_STATE + 1, tl.float32, WHOLE)
        inv_col = old_col
    return i, j, cols, floats(table_ptr, tensor, ROW_INV), old_row, old_col, inv_col


@triton.jit
def _loaded(
    p_ptr, g_ptr, lost_ptr, m_state, v_state, m, v, at, inside,
    NUMBERS: tl.constexpr, MASTER: tl.constexpr,
):  # fmt: skip
    p = read_weight(p_ptr, lost_ptr, at, inside, MASTER)
    g = tl.load(g_ptr + at, mask=inside).to(tl.float32)
    if NUMBERS > 0:
        m = tl.load(m_state[0] + at, mask=inside)
    if NUMBERS > 1:
        v = tl.load(v_state[0] + at, mask=inside)
    return p, g, m, v


@triton.jit
def inputs(
    p_ptr, g_ptr, lost_ptr, m_state, v_state, m, v, numbers, at, left, each,
    NUMBERS: tl.constexpr, MASTER: tl.constexpr,
):  # fmt: skip
    """Parameters, gradients as a rule sees them, and states: the first NUMBERS are loaded.

    Where a program's `each` elements are all there, without L2 decay and maximizing, as nearly
    always, no lane is cleared. What is not `left` is anything; 0 where states are codes.
    """
    l2, sign = numbers[1], numbers[2]
    if (l2 == 0) & (sign == 1) & (left == each):
        p, g, m, v = _loaded(
            p_ptr, g_ptr, lost_ptr, m_state, v_state, m, v, at, None, NUMBERS, MASTER
        )
    else:
        inside = at < left
        p, g, m, v = _loaded(
            p_ptr, g_ptr, lost_ptr, m_state, v_state, m, v, at, inside, NUMBERS, MASTER
        )
        g = g * sign
        if l2 != 0:
            g = g + l2 * p
        if NUMBERS == 0:
            g = tl.where(inside, g, 0.0)
            m, v = tl.where(inside, m, 0.0), tl.where(inside, v, 0.0)
    return p, g, m, v


@triton.jit
def _half(
    p_ptr, g_ptr, lost_ptr, numbers, left, row, lane, m_code, v_code, m_state, v_state,
    m_scale, v_scale, lines, draw,
    RULE: tl.constexpr, STATES: tl.constexpr, BITS: tl.constexpr, SECOND: tl.constexpr,
    DRAWS: tl.constexpr, SIZE: tl.constexpr, MASTER: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the new states of one half of each block (rank-1: times the new reciprocals).

    The third result are the numbers that round the first state where DRAWS is true.
    """
    at = row * SIZE + lane
    inside = at < left
    NUMBERS: tl.constexpr = STATES if BITS == 32 else 0
    m = tl.zeros(at.shape, dtype=tl.float32)
    v = m
    if NUMBERS == 0 and STATES > 0:
        m = looked_up(m_state[2], m_code) * m_scale
        if STATES > 1 and SECOND == AS_FIRST:
            v = looked_up(v_state[2], v_code) * v_scale
    p, g, m, v = inputs(
        p_ptr, g_ptr, lost_ptr, m_state, v_state, m, v, numbers, at, left, row.shape[0] * SIZE,
        NUMBERS, MASTER,
    )  # fmt: skip
    scaling = g
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
            v = looked_up(v_state[2], v_code) * least(a, b)
            scaling = tl.maximum(inv, tl.load(col_inv + j, mask=inside, other=0.0))
        else:
            v = inv * tl.load(col_old + j, mask=inside, other=0.0)
    before = p
    p, m, v = updated(p, g, m, v, numbers, RULE, SECOND == FACTORED)
    u = m
    if DRAWS:
        u = tl.where(inside, drawn(m, before), 0.0)
    write_weight(p_ptr, lost_ptr, at, inside, p, draw, MASTER)
    if BITS == 32:
        tl.store(m_state[0] + at, m, mask=inside)
        if STATES > 1:
            tl.store(v_state[0] + at, v, mask=inside)
    if SECOND == RANK1:
        v = v * scaling
    return m, v, u


def update_options(
    bits: int, second: int, whole: bool, narrow: bool, draws: bool
) -> dict[str, int]:
    """Return the launch options of the update, without which ptxas takes a stack.

    Tensors that are not `whole`: rank-1 has each element's row and column in registers, more than a
    thread of 4 warps has. For codes, and for aligned numbers, ptxas takes too few by itself.
    `narrow` weights have two bytes, and `draws` rounds the first state stochastically.
    """
    if whole and second == RANK1.value and draws:
        return EXACT | {"num_warps": 8}
    if whole:
        return EXACT | ({"maxnreg": 128 if narrow else 88} if bits == 32 else {})
    if second == RANK1.value:
        return EXACT | {"num_warps": 16}
    return EXACT | ({"maxnreg": 216 if draws else 192} if bits in (4, 8) else {})
