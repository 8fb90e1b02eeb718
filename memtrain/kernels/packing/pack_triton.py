"""Triton kernels of `pack.py` (layout: `bits.py`)."""

import triton
import triton.language as tl

from memtrain.kernels.device_guard import launch
from memtrain.kernels.packing.bits import lanes

TILE = 16  # blocks of 256 elements per program


@triton.jit
def _pack_kernel(
    x_ptr, packed_ptr, n, BITS: tl.constexpr, LANES: tl.constexpr, N_BLOCKS: tl.constexpr
):
    WIDTH: tl.constexpr = 256 // LANES
    block = tl.program_id(0).to(tl.int64) * N_BLOCKS + tl.arange(0, N_BLOCKS)[:, None]
    position = tl.arange(0, WIDTH)[None, :]
    # Codes enter above the `lane * BITS % 8` bits of an incomplete byte; complete bytes are stored.
    pending = tl.zeros((N_BLOCKS, WIDTH), dtype=tl.int32)
    for lane in tl.static_range(LANES):
        at = block * 256 + lane * WIDTH + position
        x = tl.load(x_ptr + at, mask=at < n, other=0).to(tl.int32)
        pending |= (x & ((1 << BITS) - 1)) << (lane * BITS % 8)
        if lane * BITS % 8 + BITS >= 8:
            to = block * (32 * BITS) + lane * BITS // 8 * WIDTH + position
            tl.store(packed_ptr + to, (pending & 0xFF).to(tl.uint8), mask=block * 256 < n)
            pending = pending >> 8


@triton.jit
def _unpack_kernel(
    packed_ptr, x_ptr, n, BITS: tl.constexpr, LANES: tl.constexpr, N_BLOCKS: tl.constexpr
):
    WIDTH: tl.constexpr = 256 // LANES
    block = tl.program_id(0).to(tl.int64) * N_BLOCKS + tl.arange(0, N_BLOCKS)[:, None]
    position = tl.arange(0, WIDTH)[None, :]
    inside = (block * 256 < n) & (position < WIDTH)
    # After `lane` lanes (lane * BITS + 7) // 8 bytes have been read; `pending` contains their
    # remaining bits.
    pending = tl.zeros((N_BLOCKS, WIDTH), dtype=tl.int32)
    for lane in tl.static_range(LANES):
        if (lane * BITS + 7) // 8 < ((lane + 1) * BITS + 7) // 8:
            at = block * (32 * BITS) + (lane * BITS + 7) // 8 * WIDTH + position
            byte = tl.load(packed_ptr + at, mask=inside, other=0).to(tl.int32)
            pending |= byte << ((lane * BITS + 7) // 8 * 8 - lane * BITS)
        to = block * 256 + lane * WIDTH + position
        tl.store(x_ptr + to, (pending & ((1 << BITS) - 1)).to(tl.uint8), mask=to < n)
        pending = pending >> BITS


def pack(x, packed, bits):
    n = x.numel()
    if n:
        grid = (triton.cdiv(n, 256 * TILE),)
        launch(_pack_kernel, grid, x, packed, n, BITS=bits, LANES=lanes(bits), N_BLOCKS=TILE)


def unpack(packed, x, bits):
    n = x.numel()
    if n:
        grid = (triton.cdiv(n, 256 * TILE),)
        launch(_unpack_kernel, grid, packed, x, n, BITS=bits, LANES=lanes(bits), N_BLOCKS=TILE)
