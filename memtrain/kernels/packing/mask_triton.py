"""Triton twin of `kernels.packing.mask`."""

import triton
import triton.language as tl

BLOCKS = 32  # blocks of 256 elements per program


@triton.jit
def _pack_kernel(x_ptr, packed_ptr, n, N_BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * N_BLOCKS + tl.arange(0, N_BLOCKS)[:, None]
    lane = tl.arange(0, 32)[None, :]
    byte = tl.zeros((N_BLOCKS, 32), dtype=tl.int32)
    for i in tl.static_range(8):
        at = block * 256 + i * 32 + lane
        x = tl.load(x_ptr + at, mask=at < n, other=0)
        byte |= (x != 0).to(tl.int32) << i
    tl.store(packed_ptr + block * 32 + lane, byte.to(tl.uint8), mask=block * 256 < n)


@triton.jit
def _unpack_kernel(packed_ptr, x_ptr, n, N_BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * N_BLOCKS + tl.arange(0, N_BLOCKS)[:, None]
    lane = tl.arange(0, 32)[None, :]
    inside = (block * 256 < n) & (lane < 32)
    byte = tl.load(packed_ptr + block * 32 + lane, mask=inside, other=0).to(tl.int32)
    for i in tl.static_range(8):
        at = block * 256 + i * 32 + lane
        tl.store(x_ptr + at, ((byte >> i) & 1).to(tl.uint8), mask=at < n)


def pack(x, packed):
    n = x.numel()
    if n:
        _pack_kernel[(triton.cdiv(n, 256 * BLOCKS),)](x, packed, n, N_BLOCKS=BLOCKS)


def unpack(packed, x):
    n = x.numel()
    if n:
        _unpack_kernel[(triton.cdiv(n, 256 * BLOCKS),)](packed, x, n, N_BLOCKS=BLOCKS)


AOT_CASES = [
    (kernel, {"x_ptr": "*u8", "packed_ptr": "*u8", "n": "i32"}, {"N_BLOCKS": BLOCKS})
    for kernel in (_pack_kernel, _unpack_kernel)
]
