"""Triton twin of `blockstep.py`: one launch for each rule, width and pair of dtypes."""

from collections import defaultdict
from typing import Any

import triton
import triton.language as tl

from memtrain.kernels.codebook.block_triton import encode, magnitude
from memtrain.kernels.step import cuda_graph, cuda_graph_triton
from memtrain.kernels.step.adamw_launch import programs
from memtrain.kernels.step.adamw_triton import DTYPES
from memtrain.kernels.step.blockstep import BLOCKS, RULES, table
from memtrain.kernels.step.scalars import is_on_device, together
from memtrain.kernels.step.split_triton import DRAWN, draws, read_weight, ticked, write_weight

FIELDS = tl.constexpr(20)
P, G, M, V, NUMBERS, NUMEL = (tl.constexpr(k) for k in (0, 1, 2, 6, 10, 11))
CORRECTION, TICK, SEED = (tl.constexpr(k) for k in (16, 18, 19))
ADAMW, SGD = tl.constexpr(0), tl.constexpr(1)
ELEMENTS = 1024  # of a program: 8 blocks of 128, or 4 of 256


@triton.jit
def _field(table_ptr, tensor, k):
    return tl.load(table_ptr + tensor * FIELDS + k)


@triton.jit
def _floats(table_ptr, tensor, k):
    return _field(table_ptr, tensor, k).to(tl.pointer_type(tl.float32))


@triton.jit
def _codes(table_ptr, tensor, k):
    return _field(table_ptr, tensor, k).to(tl.pointer_type(tl.uint8))


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
def _encoded(x, bounds_ptr, scale, BITS: tl.constexpr):
    if BITS == 8:
        return _encode8(x, bounds_ptr, scale)
    return encode(x, bounds_ptr, scale)


@triton.jit
def _decoded(table_ptr, tensor, k, block, real, code):
    scale = tl.load(_floats(table_ptr, tensor, k + 1) + block, mask=real, other=0.0)
    return tl.load(_floats(table_ptr, tensor, k + 2) + code) * scale[:, None]


@triton.jit
def _half(
    table_ptr, tensor, p_like, g_like, chunk, block, lane, m_code, v_code,
    RULE: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """The update of one half of each block; gives the new states."""
    numel = _field(table_ptr, tensor, NUMEL)
    numbers = _floats(table_ptr, tensor, NUMBERS)
    p_ptr = _field(table_ptr, tensor, P).to(p_like.dtype)
    g_ptr = _field(table_ptr, tensor, G).to(g_like.dtype)
    at = block[:, None] * SIZE + lane[None, :]
    inside = at < numel
    correction = _field(table_ptr, tensor, CORRECTION)
    p = read_weight(p_ptr, correction, at, inside, KEPT)
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32) * tl.load(numbers + 2)
    l2 = tl.load(numbers + 1)
    g = tl.where(tl.full(at.shape, 0.0, dtype=tl.float32) + l2 != 0, g + l2 * p, g)
    a, b, c = tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5)
    d, e = tl.load(numbers + 6), tl.load(numbers + 7)
    real = block * SIZE < numel
    if BITS == 0:
        m = tl.zeros(at.shape, dtype=tl.float32)
    elif BITS == 32:
        m = tl.load(_floats(table_ptr, tensor, M) + at, mask=inside, other=0.0)
    else:
        m = _decoded(table_ptr, tensor, M, block, real, m_code)
    v = m
    if RULE == ADAMW:
        v = _decoded(table_ptr, tensor, V, block, real, v_code)
        m = m + a * (g - m)
        v = b * v + (c * g) * g
        p = p * tl.load(numbers) - (d * m) / (tl.sqrt(v) + e)
    elif RULE == SGD:
        m = a * m + b * g
        nesterov = tl.full(at.shape, 0.0, dtype=tl.float32) + c != 0
        p = p - d * tl.where(nesterov, g + c * m, m)
    else:
        step = a * m + b * g
        step = tl.where(step > 0, 1.0, tl.where(step < 0, -1.0, step))
        m = c * m + d * g
        p = p * tl.load(numbers) - e * step
    draw = 0
    if KEPT == DRAWN:
        seed = ticked(_field(table_ptr, tensor, SEED), _field(table_ptr, tensor, TICK))
        draw = draws(seed, chunk, lane, at)
    write_weight(p_ptr, correction, at, inside, p, draw, KEPT)
    if BITS == 32:
        tl.store(_floats(table_ptr, tensor, M) + at, m, mask=inside)
    return tl.where(inside, m, 0.0), tl.where(inside, v, 0.0)


@triton.jit
def _keep(table_ptr, tensor, k, block, real, at, low, high, BITS: tl.constexpr, HALF: tl.constexpr):
    """Quantise both halves of the blocks of one state."""
    bounds = _floats(table_ptr, tensor, k + 2) + (1 << BITS)
    top = tl.max(tl.maximum(magnitude(low), magnitude(high)), axis=1)
    scale = top.to(tl.float32, bitcast=True)
    tl.store(_floats(table_ptr, tensor, k + 1) + block, scale, mask=real)
    low_code = _encoded(low, bounds, scale[:, None], BITS)
    high_code = _encoded(high, bounds, scale[:, None], BITS)
    codes = _codes(table_ptr, tensor, k)
    if BITS == 8:
        tl.store(codes + at, low_code.to(tl.uint8), mask=real[:, None])
        tl.store(codes + at + HALF, high_code.to(tl.uint8), mask=real[:, None])
    else:
        tl.store(codes + at, (low_code | (high_code << 4)).to(tl.uint8), mask=real[:, None])


@triton.jit
def _both(table_ptr, tensor, k, real, at, BITS: tl.constexpr, HALF: tl.constexpr):
    """The codes of both halves of the blocks of one state."""
    codes = _codes(table_ptr, tensor, k)
    byte = tl.load(codes + at, mask=real[:, None], other=0).to(tl.int32)
    if BITS == 8:
        high = tl.load(codes + at + HALF, mask=real[:, None], other=0).to(tl.int32)
        return byte, high
    return byte & 15, byte >> 4


@triton.jit
def _step_kernel(
    programs_ptr, table_ptr, p_like, g_like, RULE: tl.constexpr, BITS: tl.constexpr,
    COUNT: tl.constexpr, HALF: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Decode the states, update the parameter, encode them: COUNT blocks a program."""
    tensor = tl.load(programs_ptr + 2 * tl.program_id(0)).to(tl.int64)
    chunk = tl.load(programs_ptr + 2 * tl.program_id(0) + 1).to(tl.int64)
    block = chunk * COUNT + tl.arange(0, COUNT)
    real = block * (2 * HALF) < _field(table_ptr, tensor, NUMEL)
    lane = tl.arange(0, HALF)
    at = block[:, None] * (2 * HALF if BITS == 8 else HALF) + lane[None, :]
    m_low = tl.zeros([COUNT, HALF], dtype=tl.int32)
    m_high, v_low, v_high = m_low, m_low, m_low
    if (BITS == 4) | (BITS == 8):
        m_low, m_high = _both(table_ptr, tensor, M, real, at, BITS, HALF)
    if RULE == ADAMW:
        v_low, v_high = _both(table_ptr, tensor, V, real, at, BITS, HALF)
    m_low, v_low = _half(
        table_ptr, tensor, p_like, g_like, chunk, block, lane, m_low, v_low,
        RULE, BITS, 2 * HALF, KEPT,
    )  # fmt: skip
    m_high, v_high = _half(
        table_ptr, tensor, p_like, g_like, chunk, block, lane + HALF, m_high, v_high,
        RULE, BITS, 2 * HALF, KEPT,
    )  # fmt: skip
    if (BITS == 4) | (BITS == 8):
        _keep(table_ptr, tensor, M, block, real, at, m_low, m_high, BITS, HALF)
    if RULE == ADAMW:
        _keep(table_ptr, tensor, V, block, real, at, v_low, v_high, BITS, HALF)


launch: Any = _step_kernel  # launches take a grid that no signature shows


class Launch:
    """The pass over contiguous parameters of one kind and dtype.

    Args:
        entries: As `blockstep.block_step` takes them; their gradients are contiguous.
    """

    def __init__(self, entries):
        first = entries[0]
        self.device, size = first.param.device, BLOCKS.get(first.bits, 128)
        rows, (self.numbers, *_) = table(entries, on_device=True)
        self.table = rows.to(self.device)
        counts = tuple(triton.cdiv(entry.param.numel(), ELEMENTS) for entry in entries)
        self.programs = programs(counts, self.device)
        number = list(RULES).index(first.rule)
        self.form = (number, first.bits, ELEMENTS // size, size // 2, first.beside.form)

    def renew(self, entries):
        """For another step of entries that hold the same tensors, but for gradients."""
        self.numbers.copy_(together([entry.numbers for entry in entries], self.device))
        cuda_graph_triton.point(self.table, G.value, [entry.grad for entry in entries])

    def update(self, entries):
        """Decode, step, encode."""
        like = entries[0].param, entries[0].grad
        launch[(len(self.programs),)](self.programs, self.table, *like, *self.form)


def step(entries, kept=None):
    """`blockstep.block_step` for contiguous parameters: one launch for each kind of them."""
    groups = defaultdict(list)
    for entry in entries:
        kinds = (entry.rule, entry.bits, entry.beside.form, entry.param.dtype, entry.grad.dtype)
        groups[entry.param.device, *kinds, is_on_device(entry.numbers)].append(entry)
    for alike, group in groups.items():
        own = kept if is_on_device(group[0].numbers) else None
        cuda_graph.launch_of(Launch, group, (alike, *map(_held, group)), own).update(group)


def _held(entry):
    tensors = [entry.param, *(part for state in entry.states for part in state.values())]
    return cuda_graph.held(entry, tensors, entry.maps)


_LISTS = {"programs_ptr": "*i32", "table_ptr": "*i64"}
_FORMS = [(0, 8), (1, 4), (1, 8), (1, 32), (1, 0), (2, 4), (2, 8), (2, 32)]
AOT_CASES = [
    (
        _step_kernel,
        {**_LISTS, "p_like": p, "g_like": g},
        {
            "RULE": rule,
            "BITS": bits,
            "COUNT": ELEMENTS // BLOCKS.get(bits, 128),
            "HALF": BLOCKS.get(bits, 128) // 2,
            "KEPT": kept,
        },
    )
    for p, g, kept in DTYPES
    for rule, bits in _FORMS
]
