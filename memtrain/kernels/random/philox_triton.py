"""Philox4x32-10 in Triton: the words of `philox.py`, in fewer instructions than `tl.randint4x`."""

import triton
import triton.language as tl

from memtrain.kernels.ptx import PTX

_M0, _M1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_W0, _W1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)


@triton.jit
def _product(x, factor):
    """Return both halves of a product by one instruction, where `tl.randint4x` takes two."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 product; mul.wide.u32 product, $2, $3; mov.b64 {$0, $1}, product; }",
            "=r,=r,r,r", [x, factor], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        product = x.to(tl.uint64) * factor.to(tl.uint64)
        return (product & 0xFFFFFFFF).to(tl.uint32), (product >> 32).to(tl.uint32)


@triton.jit
def philox(seed, counter):
    """Return four uint32 words per counter, those of `philox.philox` and `tl.randint4x`."""
    key = seed.to(tl.uint64)
    k0, k1 = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    c0 = counter.to(tl.uint32)
    c1 = tl.zeros(c0.shape, dtype=tl.uint32)
    c2, c3 = c1, c1
    m0, m1 = tl.full([], _M0, tl.uint32), tl.full([], _M1, tl.uint32)
    for _ in tl.static_range(10):
        low0, high0 = _product(c0, m0)
        low1, high1 = _product(c2, m1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _W0, k1 + _W1
    return c0, c1, c2, c3
