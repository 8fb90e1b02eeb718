"""The second pass of AdamW with a 2-bit first moment: `codebook.lloyd_max` in a fused step."""

import triton
import triton.language as tl

from memtrain.kernels.codebook import lloyd_max
from memtrain.kernels.step.split_triton import DRAWN, block_order, draws, write_weight
from memtrain.kernels.step.step_triton import first_elements, inputs
from memtrain.kernels.step.table_triton import (
    COL_INV,
    COL_OLD,
    FIRST,
    NUMEL,
    ROW_INV,
    ROW_OLD,
    SCALARS,
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
from memtrain.kernels.step.update_rules_triton import EXACT, quotient

SMALL, LARGE = tl.constexpr(lloyd_max.SMALL), tl.constexpr(lloyd_max.LARGE)
BOUND = tl.constexpr(lloyd_max.BOUND)
RESIDUAL = tl.constexpr(8)  # place of `residual_size` among the scalars


@triton.jit
def _update_kernel(
    programs_ptr, table_ptr, p_like, g_like,
    COUNT: tl.constexpr, HALF: tl.constexpr, MASTER: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Pass 2: decode the moment, update the parameter, encode it: COUNT blocks a program.

    Every 32nd code of a block shares a byte. The vectors of rows and columns are roots of factors:
    those of the moment that is kept in its state, the new ones and their reciprocals in the table.
    """
    SIZE: tl.constexpr = 2 * HALF
    QUARTER: tl.constexpr = HALF // 2
    tensor = tl.load(programs_ptr + 2 * tl.program_id(0)).to(tl.int64)
    chunk = tl.load(programs_ptr + 2 * tl.program_id(0) + 1)
    first = chunk.to(tl.int64) * (COUNT * SIZE)
    left = tl.minimum(field(table_ptr, tensor, NUMEL) - first, COUNT * SIZE).to(tl.int32)
    if WHOLE:
        left = tl.multiple_of(left, 16)
    left = unless_refused(table_ptr, tensor, left)
    row, lane = block_order(COUNT, HALF, MASTER)[:, None], tl.arange(0, HALF)[None, :]
    real = row * SIZE < left
    scalars = floats(table_ptr, tensor, SCALARS)
    numbers, residual = read_scalars(scalars), tl.load(scalars + RESIDUAL)
    p_ptr = address(table_ptr, tensor, P, p_like.dtype.element_ty, WHOLE) + first
    g_ptr = address(table_ptr, tensor, G, g_like.dtype.element_ty, WHOLE) + first
    lost_ptr = corrections(table_ptr, tensor, MASTER, WHOLE) + first
    seed = 0
    if MASTER == DRAWN:
        seed = field(table_ptr, tensor, SEED)

    codes_ptr = address(table_ptr, tensor, FIRST, tl.uint8, WHOLE) + first // 4
    scale_ptr = address(table_ptr, tensor, FIRST + 1, tl.bfloat16, False) + first // SIZE
    byte = tl.load(codes_ptr + row * QUARTER + lane % QUARTER, mask=real, other=0).to(tl.int32)
    shift = lane // QUARTER * 2
    scale = tl.load(scale_ptr + row, mask=real, other=0.0).to(tl.float32)
    i, j, cols = first_elements(table_ptr, tensor, chunk, row, COUNT, SIZE, WHOLE)
    place = (table_ptr, tensor, i, j, cols)

    low_p, low_m, low_y, low_x = _moment(
        p_ptr, g_ptr, lost_ptr, numbers, left, row, lane, (byte >> shift) & 3, scale, place,
        SIZE, MASTER, WHOLE,
    )  # fmt: skip
    high_p, high_m, high_y, high_x = _moment(
        p_ptr, g_ptr, lost_ptr, numbers, left, row, lane + HALF, (byte >> (shift + 4)) & 3, scale,
        place, SIZE, MASTER, WHOLE,
    )  # fmt: skip

    count = tl.minimum(tl.maximum(left - row * SIZE, 1), SIZE).to(tl.float32)
    low_square, high_square = low_x * low_x, high_x * high_x
    bound = BOUND * (tl.sum(low_square + high_square, axis=1)[:, None] / count)
    low_large, high_large = low_square > bound, high_square > bound
    low_size, high_size = tl.abs(low_x), tl.abs(high_x)
    larges = low_large.to(tl.float32) + high_large.to(tl.float32)
    large_sizes = tl.where(low_large, low_size, 0.0) + tl.where(high_large, high_size, 0.0)
    length = SMALL * tl.sum(low_size + high_size, axis=1) + (LARGE - SMALL) * tl.sum(
        large_sizes, axis=1
    )
    larges = tl.sum(larges, axis=1)[:, None]
    whole = (LARGE * LARGE) * larges + (SMALL * SMALL) * (count - larges)
    bits = (length[:, None] / whole).to(tl.int32, bitcast=True) & -65536
    bits = tl.where((bits & 0x7F800000) == 0x7F800000, 0, bits)  # no finite number
    scale = bits.to(tl.float32, bitcast=True)
    tl.store(scale_ptr + row, scale.to(tl.bfloat16), mask=real)

    draw = draws(seed, chunk, False, COUNT, HALF) if MASTER == DRAWN else 0
    low_code = _write(
        p_ptr, lost_ptr, numbers, residual, left, row, lane, low_p, low_m, low_y, low_x, low_large,
        scale, draw, SIZE, MASTER,
    )  # fmt: skip
    draw = draws(seed, chunk, True, COUNT, HALF) if MASTER == DRAWN else 0
    high_code = _write(
        p_ptr, lost_ptr, numbers, residual, left, row, lane + HALF, high_p, high_m, high_y, high_x,
        high_large, scale, draw, SIZE, MASTER,
    )  # fmt: skip
    codes = tl.reshape((low_code | (high_code << 4)) << shift, (COUNT, 2, QUARTER))
    codes = tl.sum(codes, axis=1)
    tl.store(
        codes_ptr + row * QUARTER + tl.arange(0, QUARTER)[None, :], codes.to(tl.uint8), mask=real
    )


@triton.jit
def _moment(
    p_ptr, g_ptr, lost_ptr, numbers, left, row, lane, code, scale, place,
    SIZE: tl.constexpr, MASTER: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Of half of each block: the parameter, the new moment, the root, and one over the other."""
    at = row * SIZE + lane
    inside = at < left
    table_ptr, tensor, i, j, cols = place
    if WHOLE:
        j += lane
        known = row * SIZE < left
    else:
        i, j = i + (j + lane) // cols, (j + lane) % cols
        known = inside
    old = tl.load(floats(table_ptr, tensor, FIRST + 2) + i, mask=known, other=0.0)
    old_col = address(table_ptr, tensor, FIRST + 3, tl.float32, WHOLE)
    old = old * tl.load(old_col + j, mask=inside, other=0.0)
    size = tl.where((code == 0) | (code == 3), LARGE, SMALL) * scale
    p, g, _, _ = inputs(
        p_ptr, g_ptr, lost_ptr, (), (), old, old, numbers, at, left, row.shape[0] * SIZE, 0, MASTER
    )
    m = tl.where(code > 1, size, -size) * old
    m = m + numbers[3] * (g - m)
    y = tl.load(floats(table_ptr, tensor, ROW_INV) + i, mask=known, other=0.0)
    col = address(table_ptr, tensor, COL_OLD, tl.float32, WHOLE)
    y = y * tl.load(col + j, mask=inside, other=0.0)
    x = m * tl.load(floats(table_ptr, tensor, ROW_OLD) + i, mask=known, other=0.0)
    inv_col = address(table_ptr, tensor, COL_INV, tl.float32, WHOLE)
    x = x * tl.load(inv_col + j, mask=inside, other=0.0)
    return p, m, y, tl.where(inside, x, 0.0)


@triton.jit
def _write(
    p_ptr, lost_ptr, numbers, residual, left, row, lane, p, m, y, x, large, scale, draw,
    SIZE: tl.constexpr, MASTER: tl.constexpr,
):  # fmt: skip
    """Write the parameters of one half of each block, with what is lost; the codes."""
    at = row * SIZE + lane
    minus = x.to(tl.int32, bitcast=True) < 0
    size = tl.where(large, LARGE, SMALL) * scale
    stored = tl.where(minus, -size, size) * y
    step = numbers[6] * m + residual * (m - stored)
    p = p * numbers[0] - quotient(step, y + numbers[7])
    write_weight(p_ptr, lost_ptr, at, at < left, p, draw, MASTER)
    return tl.where(minus, 1 - large.to(tl.int32), 2 + large.to(tl.int32))


def options(whole: bool, master: int, float16: bool) -> dict[str, int]:
    """Return launch options: random bits, float16, and rows that are not whole take registers."""
    if whole:
        return EXACT | {"num_warps": 8 if float16 or master == DRAWN.value else 4}
    return EXACT | {"num_warps": 16, "maxnreg": 96}
