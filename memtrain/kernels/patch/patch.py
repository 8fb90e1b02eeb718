"""4x4 patches at 2 bits per value between their own bounds: contract, reference, dispatch."""

from itertools import pairwise

import torch
from torch import Tensor

from memtrain.kernels import cpu
from memtrain.kernels.dispatch import choose, copies, is_plain, readable, register
from memtrain.kernels.group.group import bounds_of
from memtrain.kernels.random import philox

SIDE = 4
_TWO_THIRDS = 0.6666666865348816  # the float32 nearest to 2/3
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def patch_quantize(x: Tensor, seed: int = 0, stochastic: bool = False) -> Tensor:
    """Quantise each 4x4 patch of `x` to four levels, in one 64-bit word per patch.

    The levels of a patch are its minimum, its maximum and two at equal distances between, so a
    value takes 2 bits. Minimum and maximum are first rounded outwards to 16 bits (float16 for
    float16, else bfloat16), which leaves 16-bit input exact. The inner levels are computed in
    float32 and rounded to the dtype that decodes. Nearest takes the nearest of these levels, the
    upper one at a tie. Stochastic takes one of the two neighbouring levels, unbiased, with 16
    random bits. Values equal to a level stay.

    `x` is [outer, rows, columns, inner], contiguous. A map is [rows, columns]; `inner` is 1 for
    NCHW and the number of channels for NHWC. A patch at the edge of the map uses only its own
    values. The result is int64, [outer, ceil(rows / 4), ceil(columns / 4), inner]: a word contains,
    from its lowest bit, 16 bits minimum, 16 bits maximum, and the codes row by row.

    Bounds are those of a patch's finite values, at most bfloat16's largest number: `+Inf` decodes
    to the maximum, `-Inf` and NaN to the minimum, and no other value changes. A patch without
    finite values decodes to NaN. -0 is 0.

    Example:
        >>> x = torch.arange(16.0).view(1, 4, 4, 1)
        >>> words = patch_quantize(x)
        >>> hex(int(words)), patch_dequantize(words, 4, 4).flatten().tolist()[:4]
        ('-0x...', [0.0, 0.0, 0.0, 5.0])

    Reference:
        Liu Liu, 4x4 Patch Tensor Compression, 2020; CCV_NNC_COMPRESSION_LSSC in
        github.com/liuliu/ccv, which rounds against other levels than it decodes.
    """
    seed = philox.signed(seed)
    return (_quantize if is_plain(x) else _quantize_op)(x, seed, stochastic)


def patch_dequantize(
    words: Tensor, rows: int, columns: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Invert `patch_quantize`: return each value's level, [outer, rows, columns, inner].

    The dtype is that of the quantised tensor. A value is within a third of its patch's range
    (nearest: a sixth) of the quantised one.
    """
    run = _dequantize if is_plain(words) else _dequantize_op
    return run(words, rows, columns, dtype)


def quantize_reference(x: Tensor, seed: int, stochastic: bool) -> Tensor:
    """Compute `patch_quantize` in plain torch: the definition."""
    patches = _patches(x if x.dtype in cpu.FLOAT_TYPES else x.float())
    n, kind = patches.shape[:-1], _kind(x.dtype)
    values = patches.float().reshape(-1, SIDE * SIDE)
    bounds = bounds_of(values, values.isfinite(), wide=kind != torch.float32)
    level = _levels(bounds, kind)
    u = _uniform(len(values), seed, x.device) if stochastic else torch.full_like(values, 0.5)
    codes = torch.zeros_like(values, dtype=torch.int64)
    # Halves, since a difference may overflow.
    for below, above in pairwise(level):
        codes += 0.5 * values - 0.5 * below >= u * (0.5 * above - 0.5 * below)
    lo, hi = _bits(bounds, kind).unbind(1)
    shift = torch.arange(32, 64, 2, device=x.device)
    return (lo | hi << 16 | (codes << shift).sum(1)).view(n)


def dequantize_reference(words: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Compute `patch_dequantize` in plain torch: the definition."""
    outer, down, across, inner = words.shape
    flat, kind = words.reshape(-1, 1), _kind(dtype)
    bits = torch.cat([flat, flat >> 16], dim=1).to(torch.int16)
    level = torch.cat(_levels(bits.view(_half(kind)).float(), kind))
    codes = flat >> torch.arange(32, 64, 2, device=words.device) & 3
    index = torch.arange(len(flat), device=words.device).unsqueeze(1)
    values = level.view(4, -1)[codes, index].to(dtype)
    cells = values.view(outer, down, across, inner, SIDE, SIDE).permute(0, 1, 4, 2, 5, 3)
    whole = cells.reshape(outer, down * SIDE, across * SIDE, inner)
    return whole[:, :rows, :columns].contiguous()


def _kind(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the computation: float64 is cast from float32."""
    return torch.float32 if dtype == torch.float64 else dtype


def _half(kind: torch.dtype) -> torch.dtype:
    """Return the dtype of the bounds."""
    return torch.float16 if kind == torch.float16 else torch.bfloat16


def _patches(x: Tensor) -> Tensor:
    """Return [outer, down, across, inner, 16]; missing cells repeat the first row or column."""
    for dim in (1, 2):
        size = x.shape[dim]
        index = torch.arange(-(-size // SIDE) * SIDE, device=x.device)
        x = x.index_select(dim, torch.where(index < size, index, index // SIDE * SIDE))
    outer, rows, columns, inner = x.shape
    cells = x.reshape(outer, rows // SIDE, SIDE, columns // SIDE, SIDE, inner)
    return cells.permute(0, 1, 3, 5, 2, 4).flatten(4)


def _bits(bounds: Tensor, kind: torch.dtype) -> Tensor:
    """Return the bounds' 16 bits as int64, with one pattern for NaN, unlike torch's casts."""
    bits = bounds.to(_half(kind)).view(torch.int16).long() & 0xFFFF
    return torch.where(bounds.isnan(), 0x7E00 if kind == torch.float16 else 0x7FC0, bits)


def _levels(bounds: Tensor, kind: torch.dtype) -> list[Tensor]:
    """Return the four levels as float32, [n, 1] each; from halves, since the range may overflow."""
    lo, hi = bounds.split(1, dim=1)
    third = (0.5 * hi - 0.5 * lo) * _TWO_THIRDS
    return [lo, (lo + third).to(kind).float(), (hi - third).to(kind).float(), hi]


def _uniform(n: int, seed: int, device: torch.device) -> Tensor:
    """Return a uniform number in (0, 1) for each of n x 16 values, from 16 random bits each.

    Patch p draws counter p for its upper two rows and n + p for its lower two. Word w of a draw
    gives values 2w (low half) and 2w + 1 (high half).
    """
    counter = torch.arange(2 * n, device=device)
    halves = [half for word in philox.philox(counter, seed) for half in (word & 0xFFFF, word >> 16)]
    draws = torch.stack(halves, dim=1)
    return (torch.cat([draws[:n], draws[n:]], dim=1).float() + 0.5) * 2.0**-16


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in _FLOATS:
        raise TypeError(f"dtype {dtype}; allowed: {', '.join(map(str, _FLOATS))}")


def _empty(x: Tensor, seed: int, stochastic: bool) -> Tensor:
    _check_dtype(x.dtype)
    if x.dim() != 4:
        raise ValueError(f"x has {x.dim()} dimensions; allowed: 4 (outer, rows, columns, inner)")
    outer, rows, columns, inner = x.shape
    words = x.new_empty((outer, -(-rows // SIDE), -(-columns // SIDE), inner), dtype=torch.int64)
    if words.numel() > 2**31:
        raise ValueError(f"x has {words.numel()} patches; allowed: up to 2**31")
    return words


def _quantize(x: Tensor, seed: int, stochastic: bool) -> Tensor:
    words = _empty(x, seed, stochastic)
    if choose(x) != "triton":
        return quantize_reference(x, seed, stochastic)
    from memtrain.kernels.patch import patch_triton

    patch_triton.quantize(readable(x, *cpu.FLOAT_TYPES), words, seed, stochastic)
    return words


def _empty_values(words: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    _check_dtype(dtype)
    down, across = -(-rows // SIDE), -(-columns // SIDE)
    if words.dim() != 4 or words.shape[1:3] != (down, across) or words.dtype != torch.int64:
        raise ValueError(
            f"words are {words.dtype} {tuple(words.shape)}; maps of {rows} x {columns} need int64 "
            f"(outer, {down}, {across}, inner)"
        )
    return words.new_empty((words.shape[0], rows, columns, words.shape[3]), dtype=dtype)


def _dequantize(words: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    out = _empty_values(words, rows, columns, _kind(dtype))
    if choose(words) != "triton":
        return dequantize_reference(words, rows, columns, dtype)
    from memtrain.kernels.patch import patch_triton

    patch_triton.dequantize(words.contiguous(), out)
    return out.to(dtype)


def _in_torch(numel: int, *, back: bool) -> int:
    """Return the largest bytes of the reference's intermediates, on the CPU."""
    return int((17.5 if back else 35) * numel)


def _widened(words: Tensor, rows: int, columns: int, dtype: torch.dtype) -> int:
    """Return the bytes of float32 values before a cast."""
    return 0 if _kind(dtype) == dtype else 4 * len(words) * rows * columns * words.shape[3]


_quantize_op = register(
    "patch_quantize(Tensor x, int seed, bool stochastic) -> Tensor",
    _quantize,
    _empty,
    inside=lambda x, *options: _in_torch(x.numel(), back=False),
    inside_cuda=lambda x, *options: copies(x, *cpu.FLOAT_TYPES),
)
_dequantize_op = register(
    "patch_dequantize(Tensor words, SymInt rows, SymInt columns, ScalarType dtype) -> Tensor",
    _dequantize,
    _empty_values,
    inside=lambda words, rows, columns, dtype: (
        _widened(words, rows, columns, dtype)
        + _in_torch(len(words) * rows * columns * words.shape[3], back=True)
    ),
    inside_cuda=_widened,
)
