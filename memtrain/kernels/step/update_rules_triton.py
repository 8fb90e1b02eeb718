"""The rules of `update_rules.py` in Triton."""

import triton
import triton.language as tl

from memtrain.kernels.ptx import PTX

ADAMW, SGD, LION = (tl.constexpr(k) for k in range(3))  # as in `update_rules.RULES`
EXACT = {"enable_fp_fusion": False}
"""Launch options: without contraction the states equal the reference's bit for bit."""


@triton.jit
def quotient(x, y):
    """A quotient within 1.5 units in the last place; y is 0, or neither subnormal nor over 2**126.

    `/` scales both before, which takes six instructions more.
    """
    if PTX:
        return x * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return x / y


@triton.jit
def drawn(m, p):
    """Return what `update_rules.drawn` returns."""
    h = (_bits(m) ^ _bits(p) >> 16) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return ((h >> 16).to(tl.float32) + 0.5) * (1.0 / 65536)


@triton.jit
def _bits(x):
    return x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def updated(p, g, m, v, numbers, RULE: tl.constexpr, FACTORED: tl.constexpr):
    """A rule's update, as `update_rules.py` has it: the new parameter and states."""
    decay, _, _, a, b, c, d, e = numbers
    if RULE == ADAMW:
        m = m + a * (g - m)
        if not FACTORED:
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
