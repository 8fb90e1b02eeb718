"""Triton twin of `kernels.split`, for bfloat16 weights."""

import torch
import triton
import triton.language as tl

_WIDTH = tl.constexpr(128)  # an eighth of a block of `split.BLOCK` elements
_BLOCKS = tl.constexpr(4)
_TILE = tl.constexpr(2048)


@triton.jit
def _rounded(magnitude, KEPT: tl.constexpr):
    LOST: tl.constexpr = 16 - KEPT
    rounded = magnitude
    if LOST > 0:
        rounded = (magnitude + ((1 << (LOST - 1)) - 1) + ((magnitude >> LOST) & 1)) >> LOST
    return rounded


@triton.jit
def _split_kernel(master_ptr, weight_ptr, correction_ptr, n, KEPT: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * _TILE + tl.arange(0, _TILE)
    inside = at < n
    bits = tl.load(master_ptr + at, mask=inside, other=0).to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    nan = magnitude > 0x7F800000
    rounded = _rounded(magnitude, KEPT)
    upper = (rounded + ((1 << KEPT) >> 1)) >> KEPT
    if KEPT:
        difference = rounded.to(tl.int32) - (upper << KEPT).to(tl.int32)
        difference = tl.where(nan, 0, difference).to(correction_ptr.dtype.element_ty)
        tl.store(correction_ptr + at, difference, mask=inside)
    upper = tl.where(nan, 0x7FC0, upper)
    tl.store(weight_ptr + at, (((bits >> 16) & 0x8000) | upper).to(tl.int16), mask=inside)


@triton.jit
def _stochastic_kernel(master_ptr, weight_ptr, n, n_blocks, seed):
    block = tl.program_id(0).to(tl.int64) * _BLOCKS + tl.arange(0, _BLOCKS)[:, None]
    column = tl.arange(0, _WIDTH)[None, :]
    w0, w1, w2, w3 = tl.randint4x(seed, (block * _WIDTH + column).to(tl.uint32))
    words = (w0, w1, w2, w3)
    for s in tl.static_range(8):
        at = (block * 8 + s) * _WIDTH + column
        inside = (block < n_blocks) & (at < n)
        bits = tl.load(master_ptr + at, mask=inside, other=0).to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        draw = (words[s // 2].to(tl.uint32) >> (s % 2 * 16)) & 0xFFFF
        upper = tl.where(magnitude > 0x7F800000, 0x7FC0, (magnitude + draw) >> 16)
        tl.store(weight_ptr + at, (((bits >> 16) & 0x8000) | upper).to(tl.int16), mask=inside)


@triton.jit
def _merge_kernel(weight_ptr, correction_ptr, master_ptr, n, KEPT: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * _TILE + tl.arange(0, _TILE)
    inside = at < n
    word = tl.load(weight_ptr + at, mask=inside, other=0).to(tl.int32) << 16
    if KEPT:
        difference = tl.load(correction_ptr + at, mask=inside, other=0).to(tl.int32)
        word += difference << (16 - KEPT)
    tl.store(master_ptr + at, word, mask=inside)


def split(master, weight, correction, *, seed, stochastic):
    n, bits, out = weight.numel(), master.view(torch.int32), weight.view(torch.int16)
    if stochastic:
        n_blocks = triton.cdiv(n, 8 * _WIDTH.value)
        grid = (triton.cdiv(n_blocks, _BLOCKS.value),)
        _stochastic_kernel[grid](bits, out, n, n_blocks, seed)
        return
    grid = (triton.cdiv(n, _TILE.value),)
    _split_kernel[grid](bits, out, out if correction is None else correction, n, _kept(correction))


def merge(weight, correction, master):
    n, bits = weight.numel(), weight.view(torch.int16)
    grid = (triton.cdiv(n, _TILE.value),)
    given = bits if correction is None else correction
    _merge_kernel[grid](bits, given, master.view(torch.int32), n, _kept(correction))


def _kept(correction):
    return 0 if correction is None else 8 * correction.element_size()


_FORMS = ((0, "*i16"), (8, "*i8"), (16, "*i16"))
_WEIGHT, _MASTER = {"weight_ptr": "*i16"}, {"master_ptr": "*i32"}
AOT_CASES = [
    *(
        (kernel, _WEIGHT | _MASTER | {"correction_ptr": dtype, "n": "i32"}, {"KEPT": kept})
        for kernel in (_split_kernel, _merge_kernel)
        for kept, dtype in _FORMS
    ),
    (
        _stochastic_kernel,
        _WEIGHT | _MASTER | {"n": "i32", "n_blocks": "i32", "seed": "i64"},
        {},
    ),
]
