"""Min/max group quantisation to 1 to 8 bits, packed to the bit: contract, reference, dispatch."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from memtrain.kernels import cpu
from memtrain.kernels.dispatch import choose, copies, is_plain, readable, register
from memtrain.kernels.packing import bits as bit_codes
from memtrain.kernels.random import philox

MAX_GROUP_SIZE = 16384  # a Triton program keeps a whole group in registers
_LIMIT = 3.3895313892515355e38  # bfloat16's largest finite number
_HALF_LIMIT = 65504.0  # float16's largest number
_TINY = 2.0**-101  # smaller half ranges count as zero: their reciprocal overflows float32
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_READ = {"cpu": (torch.float32, torch.bfloat16), "triton": _FLOATS[:3]}
"""Backend -> dtypes that its kernels read and write; others are cast from and to float32."""


def group_quantize(
    x: Tensor,
    bits: int = 4,
    group_size: int = 256,
    seed: int = 0,
    stochastic: bool = True,
) -> tuple[Tensor, Tensor]:
    """Quantise `x` to `bits` bits between each group's minimum and maximum.

    `x` is read in logical order, in groups of `group_size` elements, a multiple of 8 up to 16384;
    all arithmetic is float32. A group's bounds are first rounded outwards to bfloat16, and then
    used to encode and to decode, so that stochastic rounding is unbiased. (ActNN encodes with
    unrounded bounds, which is biased.) With `step = (hi - lo) / (2**bits - 1)`, `code = floor((x -
    lo) / step + u)`, where `u` is 0.5 (nearest, half up) or uniform with 16 random bits
    (stochastic; see `philox.uniform_pairs`).

    Special values:

    - Halves of the bounds are subtracted, so that no range overflows. A range below 2**-100 counts
      as zero: all its codes are 0 and decode to `lo`. -0 is 0.
    - Bounds are at most bfloat16's largest finite number, 3.39e38. Values beyond decode to it.
    - Bounds are those of the finite elements, so that a NaN or an Inf changes no other element.
      `+Inf` decodes to `hi`, `-Inf` and NaN to `lo`: a gradient that meets them is 0 (a mask) or
      comes from a loss that is not finite. A group without finite elements decodes to NaN.
    - A finite outlier, such as a mask of -1e9, is a bound: the codes of its group stay unbiased,
      with a wide step. If an op does not need the tail, the compressor clamps it (`Group.floor`).

    On CUDA a matrix may have gaps between its rows if rows are whole groups, on a CPU any matrix.
    Other tensors that are not contiguous are copied.

    Returns:
        codes: uint8, [n_groups, group_size * bits / 8], with the layout of `kernels.packing.bits`.
            The padding of the last group has codes 0.
        bounds: (lo, hi) of each group, bfloat16, [n_groups, 2].

    Example:
        >>> codes, bounds = group_quantize(torch.arange(8.0), bits=8, group_size=8)
        >>> codes.shape, bounds.tolist()
        (torch.Size([1, 8]), [[0.0, 7.0]])

    Reference:
        Chen et al., ActNN, ICML 2021, arXiv:2104.14129.
    """
    seed = philox.signed(seed)
    run = _quantize if is_plain(x) else _quantize_op
    return run(x, bits, group_size, seed, stochastic)


def group_dequantize(
    codes: Tensor,
    bounds: Tensor,
    bits: int,
    group_size: int,
    numel: int | torch.Size,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Invert `group_quantize`: `lo + code * step` in float32, then cast to `dtype`.

    The result has `numel` elements, or `numel` as its shape, each within a step of the quantised
    tensor (nearest: half a step). A bound that was rounded outwards may exceed float16's largest
    number, 65504. Larger values decode to 65504.
    """
    if is_plain(codes):
        return _dequantize(codes, bounds, bits, group_size, numel, dtype)
    n = numel if isinstance(numel, int) else numel.numel()
    values = _dequantize_op(codes, bounds, bits, group_size, n, dtype)
    return values if isinstance(numel, int) else values.view(numel)


def quantize_reference(
    x: Tensor, bits: int, group_size: int, seed: int, stochastic: bool
) -> tuple[Tensor, Tensor]:
    """Compute `group_quantize` in plain torch: the definition."""
    flat = x.reshape(-1).float()
    groups = bit_codes.blocks(flat, group_size)
    valid = bit_codes.blocks(torch.ones_like(flat, dtype=torch.bool), group_size)
    bounds = bounds_of(groups, valid & groups.isfinite())
    _, inverse = _steps(bounds, bits)
    if stochastic:
        u = philox.uniform_pairs(groups.shape[0], group_size, seed, x.device)
    else:
        u = torch.full_like(groups, 0.5)
    t = (0.5 * groups - 0.5 * bounds[:, :1]) * inverse + u
    codes = torch.where(valid & (t > 0), t, 0.0).clamp(max=2**bits - 1)  # 0 for NaN
    return bit_codes.pack(codes.to(torch.int64), bits), bounds.bfloat16()


def dequantize_reference(
    codes: Tensor, bounds: Tensor, bits: int, group_size: int, numel: int, dtype: torch.dtype
) -> Tensor:
    """Compute `group_dequantize` in plain torch: the definition."""
    bounds = bounds.float()
    step, _ = _steps(bounds, bits)
    values = 2.0 * (0.5 * bounds[:, :1] + bit_codes.unpack(codes, bits).float() * step)
    return _narrow(values.reshape(-1)[:numel], dtype)


def _narrow(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast float32 values to another dtype; finite values stay finite."""
    if dtype == torch.float16:
        values = values.clamp(-_HALF_LIMIT, _HALF_LIMIT)
    return values.to(dtype)


def bounds_of(groups: Tensor, counts: Tensor, *, wide: bool = False) -> Tensor:
    """Return float32 bounds of the counted elements, rounded outwards unless wide: [n, 2]."""
    if groups.shape[0] == 0:
        return groups.new_zeros(0, 2)
    lo = torch.where(counts, groups, torch.inf).amin(1)
    hi = torch.where(counts, groups, -torch.inf).amax(1)
    if not wide:
        lo, hi = _outward(lo, up=False), _outward(hi, up=True)
    # Adding 0 turns -0 into 0: the minimum of both depends on the order.
    bounds = torch.stack([lo, hi], dim=1).clamp(-_LIMIT, _LIMIT) + 0.0
    return torch.where(counts.any(1, keepdim=True), bounds, torch.nan)


def _outward(x: Tensor, up: bool) -> Tensor:
    """Return the nearest bfloat16 number not below (`up`) or not above `x`, as float32."""
    bits = x.view(torch.int32)
    enlarge = ((bits & 0xFFFF) != 0) & ((bits >= 0) == up)
    # Adding 0x10000 to the bits increases the magnitude for either sign.
    return ((bits & ~0xFFFF) + enlarge.to(torch.int32) * 0x10000).view(torch.float32)


def _steps(bounds: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return half a step, and its reciprocal (0 without a range): [n_groups, 1] each."""
    half = 0.5 * bounds[:, 1:] - 0.5 * bounds[:, :1]
    # A tensor as divisor: CUDA multiplies by the reciprocal of a number, which may lose a bit.
    step = torch.where(half < _TINY, 0.0, half / half.new_full((), 2**bits - 1))
    return step, torch.where(step == 0, 0.0, 1.0 / step)


def check(bits: int, group_size: int, dtype: torch.dtype = torch.float32) -> None:
    """Raise for options of `group_quantize` that are out of range."""
    if not 1 <= bits <= 8:
        raise ValueError(f"bits={bits}; allowed: 1 to 8")
    if group_size % 8 or not 8 <= group_size <= MAX_GROUP_SIZE:
        raise ValueError(
            f"group_size={group_size}; allowed: multiples of 8 from 8 to {MAX_GROUP_SIZE}"
        )
    if dtype not in _FLOATS:
        raise TypeError(f"dtype {dtype}; allowed: {', '.join(map(str, _FLOATS))}")


def _check_payload(codes: Tensor, bounds: Tensor, bits: int, group_size: int, numel: int) -> None:
    n_groups = (numel + group_size - 1) // group_size
    if codes.shape != (n_groups, group_size * bits // 8) or codes.dtype != torch.uint8:
        raise ValueError(
            f"codes are {codes.dtype} {tuple(codes.shape)}; {numel} elements of {bits} bits need "
            f"uint8 {(n_groups, group_size * bits // 8)}"
        )
    if bounds.shape != (n_groups, 2) or bounds.dtype != torch.bfloat16:
        raise ValueError(
            f"bounds are {bounds.dtype} {tuple(bounds.shape)}; {numel} elements need bfloat16 "
            f"{(n_groups, 2)}"
        )


def _empty(
    x: Tensor, bits: int, group_size: int, seed: int, stochastic: bool
) -> tuple[Tensor, Tensor]:
    check(bits, group_size, x.dtype)
    n_groups = (x.numel() + group_size - 1) // group_size
    return (
        x.new_empty(n_groups, group_size * bits // 8, dtype=torch.uint8),
        x.new_empty(n_groups, 2, dtype=torch.bfloat16),
    )


def kernel_of(
    x: Tensor, bits: int, group_size: int, stochastic: bool
) -> tuple[Callable[[Tensor, int], tuple[Tensor, Tensor]], int] | None:
    """Return a specialized `group_quantize` kernel and its payload's bytes, or None.

    The dispatch and the checks of a call take longer than the kernel of a small tensor. `x` is
    dense and read in memory order, or a matrix with gaps between its rows. The kernel takes a
    tensor like `x` and a seed. It is valid while `dispatch.is_ordinary()`.
    """
    chosen = choose(x)
    if chosen == "reference" or not is_plain(x) or _copied(x, chosen, group_size):
        return None
    check(bits, group_size, x.dtype)
    write, rows = _writer(chosen), _rows(x)
    n_groups, width = (x.numel() + group_size - 1) // group_size, group_size * bits // 8

    # Torch reads sizes faster as arguments than in a tuple.
    def quantize(x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        codes = x.new_empty(n_groups, width, dtype=torch.uint8)
        bounds = x.new_empty(n_groups, 2, dtype=torch.bfloat16)
        write(x, codes, bounds, bits, group_size, seed, stochastic, *rows)
        return codes, bounds

    return quantize, n_groups * (width + 4)


def _quantize(
    x: Tensor, bits: int, group_size: int, seed: int, stochastic: bool
) -> tuple[Tensor, Tensor]:
    chosen = choose(x)
    if chosen == "reference":
        check(bits, group_size, x.dtype)
        return quantize_reference(x, bits, group_size, seed, stochastic)
    codes, bounds = _empty(x, bits, group_size, seed, stochastic)
    x = readable(x, *_READ[chosen]) if _copied(x, chosen, group_size) else x
    _writer(chosen)(x, codes, bounds, bits, group_size, seed, stochastic, *_rows(x))
    return codes, bounds


def _writer(chosen: str) -> Callable[..., None]:
    """Return the kernel that writes the codes and bounds of a tensor that it reads in place."""
    if chosen == "cpu":
        return partial(_run_cpp, "mt_group_quantize")
    from memtrain.kernels.group import group_triton

    return group_triton.quantize


def _rows(x: Tensor) -> tuple[int, int]:
    """Return columns and stride of a matrix with gaps between its rows, else zeros."""
    return (0, 0) if x.is_contiguous() else (x.shape[1], x.stride(0))


def _run_cpp(name: str, x: Tensor, codes: Tensor, bounds: Tensor, *options: int) -> None:
    """Call a C++ kernel; options: bits, group size, seed, stochastic, columns and stride."""
    run, pack = cpu.packed(name, "12q")
    values = x.data_ptr(), x.dtype == torch.bfloat16, x.numel()
    run(pack(*values, codes.data_ptr(), bounds.data_ptr(), *options, torch.get_num_threads()))


def _empty_values(
    codes: Tensor,
    bounds: Tensor,
    bits: int,
    group_size: int,
    shape: int | torch.Size,
    dtype: torch.dtype,
) -> Tensor:
    check(bits, group_size, dtype)
    numel = shape if isinstance(shape, int) else shape.numel()
    _check_payload(codes, bounds, bits, group_size, numel)
    return codes.new_empty(shape, dtype=dtype)


def _dequantize(
    codes: Tensor,
    bounds: Tensor,
    bits: int,
    group_size: int,
    shape: int | torch.Size,
    dtype: torch.dtype,
) -> Tensor:
    out, chosen = _empty_values(codes, bounds, bits, group_size, shape, dtype), choose(codes)
    if chosen == "reference":
        values = dequantize_reference(codes, bounds, bits, group_size, out.numel(), dtype)
        return values.view(out.shape)
    if dtype not in _READ[chosen]:
        out = codes.new_empty(shape, dtype=torch.float32)
    codes, bounds = codes.contiguous(), bounds.contiguous()
    if chosen == "triton":
        from memtrain.kernels.group import group_triton

        group_triton.dequantize(codes, bounds, out, bits, group_size)
    else:
        _run_cpp("mt_group_dequantize", out, codes, bounds, bits, group_size, 0, 0, 0, 0)
    return out if out.dtype == dtype else _narrow(out, dtype)


def _copied(x: Tensor, chosen: str, group_size: int) -> int:
    """Return the bytes of the copy that a kernel needs; none of a matrix with gaps between rows."""
    in_rows = x.dim() == 2 and x.stride(1) == 1 and x.dtype in _READ[chosen]
    if chosen == "triton":  # rows must be whole groups
        in_rows = in_rows and x.shape[1] % group_size == 0
    return 0 if in_rows else copies(x, *_READ[chosen])


def _widened(numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of float32 values before the cast; float16's are clamped in a copy."""
    copied = {torch.float16: 2, torch.float64: 1}.get(dtype, 0)
    return 4 * numel * copied


_quantize_op = register(
    "group_quantize(Tensor x, int bits, int group_size, int seed, bool stochastic)"
    " -> (Tensor, Tensor)",
    _quantize,
    _empty,
    inside=lambda x, bits, group_size, *options: _copied(x, "cpu", group_size),
    inside_cuda=lambda x, bits, group_size, *options: _copied(x, "triton", group_size),
)
_dequantize_op = register(
    "group_dequantize(Tensor codes, Tensor bounds, int bits, int group_size, int numel,"
    " ScalarType dtype) -> Tensor",
    _dequantize,
    _empty_values,
    inside=lambda codes, bounds, bits, group_size, numel, dtype: _widened(numel, dtype),
    inside_cuda=lambda *args: 4 * args[4] if args[5] == torch.float64 else 0,
)
