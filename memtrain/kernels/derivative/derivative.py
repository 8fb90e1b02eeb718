"""Few-bit derivative codes: a forward keeps codes of its input, its backward multiplies by levels.

The side of x is x (parity `"plain"`) or |x| (`"even"`), in float32. Its code is the number of
smaller boundaries, so a value equal to a boundary goes left. Parity `"band"` has two boundaries and
one bit, 1 for low < x <= high. NaN has code 0. Codes are packed in blocks of 256 (layout:
`packing.bits`); the last block is padded with the code of 0.

For C++, everything that is independent of the tensors is cached (`_encoder`, `_decoder`), because a
small tensor costs more around its kernel than in it.

Reference:
    Novikov et al., Few-Bit Backward, ICML 2023, arXiv:2202.00441.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from memtrain.kernels import cpu
from memtrain.kernels.dispatch import choose, is_plain, is_plain_cpu, register
from memtrain.kernels.packing import bits as bit_layout
from memtrain.kernels.strides import memory_order

BLOCK_SIZE = 256
PARITIES = ("plain", "even", "band")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # indices are known in C++
_SIZES = tuple(2**bits for bits in range(1, 9))


def encode(x: Tensor, boundaries: Sequence[float], *, parity: str = "plain") -> Tensor:
    """Pack the code of every element of `x`, in logical order; float64 is rounded to float32 first.

    There are 2**bits - 1 ascending boundaries, 1 to 8 bits, or 2 for a band, rounded to
    float32.

    Returns:
        uint8, [ceil(numel / 256), 32 * bits]. NaN has code 0, -Inf the first code and +Inf the
        last (`"even"`: both the last; `"band"`: both 0, for finite bounds).

    Example:
        >>> codes = encode(torch.tensor([-1.0, 0.0, 2.0]), [0.0])
        >>> codes.shape, decode(codes, [0.0, 1.0], 3)
        (torch.Size([1, 32]), tensor([0., 0., 1.]))
    """
    if is_plain_cpu(x):
        return _encoder(tuple(boundaries), parity, x.dtype)(x.contiguous())
    check_side(x.dtype, boundaries, parity)
    run = _encode if is_plain(x) else _encode_op
    return run(x.contiguous(), boundaries, parity)


def decode(
    codes: Tensor, levels: Sequence[float], n: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the levels of contiguous codes, `dtype` [n].

    Levels are rounded to float32 (not for float64), then to the dtype.
    """
    bits_of(len(levels), 0)
    run = _levels if is_plain(codes) else _levels_op
    return run(codes, levels, None, n, dtype)


def backward(grad: Tensor, codes: Tensor, levels: Sequence[float]) -> Tensor:
    """Return `grad` times the level of each code, in one pass.

    The gradient is dense, with elements in the memory order of the codes. The result has its
    strides. The product is computed in float32 (float64 for float64) and rounded once. NaN and Inf
    in `grad` follow IEEE rules. If the encoded x was NaN, the result is the finite `grad *
    levels[0]`; the forward value is NaN.

    Example:
        >>> codes = encode(torch.tensor([-1.0, 3.0]), [0.0])
        >>> backward(torch.tensor([2.0, 2.0]), codes, [0.25, 0.5])
        tensor([0.5000, 1.0000])
    """
    if is_plain_cpu(grad):
        return _decoder(tuple(levels), grad.dtype)(grad, codes, torch.empty_like(grad))
    check_dtype(grad.dtype)
    bits_of(len(levels), 0)
    run = _levels if is_plain(grad) else _levels_op
    return run(codes, levels, grad, grad.numel(), grad.dtype)


def _encode(x: Tensor, boundaries: Sequence[float], parity: str) -> Tensor:
    choice = choose(x)
    if choice == "reference":
        return encode_reference(x, boundaries, parity)
    if choice == "triton":
        from memtrain.kernels.derivative import derivative_triton

        table = tuple(numbers(tuple(boundaries)).tolist())
        return derivative_triton.encode(x, table, parity)
    return _encoder(tuple(boundaries), parity, x.dtype)(x)


def _levels(
    codes: Tensor, levels: Sequence[float], grad: Tensor | None, n: int, dtype: torch.dtype
) -> Tensor:
    """Return the levels of n codes, times a gradient of that dtype if given."""
    choice, out = choose(codes), _empty_levels(codes, levels, grad, n, dtype)
    if choice == "reference":
        memory_order(out).copy_(levels_reference(codes, levels, grad, n, dtype))
    elif choice == "triton":
        from memtrain.kernels.derivative import derivative_triton

        table = numbers(tuple(levels), wide(dtype))
        derivative_triton.backward(grad, codes, tuple(table.tolist()), out)
    else:
        _decoder(tuple(levels), dtype)(grad, codes, out)
    return out


def _empty_levels(
    codes: Tensor, levels: Sequence[float], grad: Tensor | None, n: int, dtype: torch.dtype
) -> Tensor:
    return codes.new_empty((n,), dtype=dtype) if grad is None else torch.empty_like(grad)


def _empty_codes(x: Tensor, boundaries: Sequence[float], parity: str) -> Tensor:
    width = BLOCK_SIZE // 8 * code_bits(boundaries, parity)
    n_blocks = (x.numel() + BLOCK_SIZE - 1) // BLOCK_SIZE
    return torch.empty((n_blocks, width), dtype=torch.uint8, device=x.device)


@cache
def _encoder(
    boundaries: tuple[float, ...], parity: str, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """Return the kernel that encodes contiguous tensors of one dtype."""
    check_side(dtype, boundaries, parity)
    bits, table = code_bits(boundaries, parity), numbers(boundaries).data_ptr()
    settings = table, DTYPES.index(dtype), bits, PARITIES.index(parity)
    width, (kernel, pack) = BLOCK_SIZE // 8 * bits, cpu.packed("mt_derivative_encode", "9q")

    def run(x: Tensor) -> Tensor:
        n = x.numel()
        codes = x.new_empty((n + BLOCK_SIZE - 1) // BLOCK_SIZE, width, dtype=torch.uint8)
        pointers = x.data_ptr(), codes.data_ptr(), 0
        kernel(pack(*settings, *pointers, n, torch.get_num_threads()))
        return codes

    return run


@cache
def _decoder(
    levels: tuple[float, ...], dtype: torch.dtype
) -> Callable[[Tensor | None, Tensor, Tensor], Tensor]:
    """Return the kernel that writes levels of one dtype, times a gradient if given."""
    check_dtype(dtype)
    bits, table = bits_of(len(levels), 0), numbers(levels, wide(dtype)).data_ptr()
    settings = table, DTYPES.index(dtype), bits, 0
    kernel, pack = cpu.packed("mt_derivative_decode", "9q")

    def run(grad: Tensor | None, codes: Tensor, out: Tensor) -> Tensor:
        pointers = 0 if grad is None else grad.data_ptr(), codes.data_ptr(), out.data_ptr()
        kernel(pack(*settings, *pointers, out.numel(), torch.get_num_threads()))
        return out

    return run


def check_dtype(dtype: torch.dtype) -> None:
    """Raise TypeError for dtypes without codes."""
    if dtype not in DTYPES:
        raise TypeError(f"dtype {dtype} is not allowed; allowed: {', '.join(map(str, DTYPES))}")


def check_side(dtype: torch.dtype, boundaries: Sequence[float], parity: str) -> None:
    """Raise for arguments of `encode` that are not allowed."""
    check_dtype(dtype)
    if parity not in PARITIES:
        raise ValueError(f"parity {parity!r} is unknown; allowed: {', '.join(PARITIES)}")
    code_bits(boundaries, parity)


def code_bits(boundaries: Sequence[float], parity: str) -> int:
    """Return the bits of codes for boundaries."""
    if parity != "band":
        return bits_of(len(boundaries), 1)
    if len(boundaries) != 2:
        raise ValueError(f"{len(boundaries)} boundaries given; allowed with parity 'band': 2")
    return 1


def bits_of(count: int, missing: int) -> int:
    """Return the bits of codes for 2**bits - `missing` numbers."""
    if count + missing not in _SIZES:
        allowed = ", ".join(str(size - missing) for size in _SIZES)
        raise ValueError(f"{count} boundaries or levels given; allowed: {allowed}")
    return (count + missing).bit_length() - 1


@cache
def numbers(values: tuple[float, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a table on the CPU; subnormals become 0, so that every unit agrees."""
    table = torch.tensor(values, dtype=dtype, device="cpu")
    return torch.where(table.abs() < torch.finfo(torch.float32).tiny, 0.0, table)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of products with a tensor of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def encode_reference(x: Tensor, boundaries: Sequence[float], parity: str) -> Tensor:
    """Return the codes of `x`, in logical order."""
    side = bit_layout.blocks(x.float(), BLOCK_SIZE)
    side = side.abs() if parity == "even" else side
    table = numbers(tuple(boundaries)).tolist()
    if parity == "band":
        codes = ((side > table[0]) & (side <= table[1])).long()
    else:
        codes = torch.zeros_like(side, dtype=torch.int64)
        for boundary in table:
            codes += side > boundary
    return bit_layout.pack(codes, code_bits(boundaries, parity))


def levels_reference(
    codes: Tensor, levels: Sequence[float], grad: Tensor | None, n: int, dtype: torch.dtype
) -> Tensor:
    """Return the level of each code, times a gradient if given, in the order of the codes."""
    index = bit_layout.unpack(codes, bits_of(len(levels), 0)).view(-1)[:n]
    level = numbers(tuple(levels), wide(dtype)).to(codes.device)[index]
    return (level if grad is None else memory_order(grad).to(level.dtype) * level).to(dtype)


_encode_op = register(
    "derivative_encode(Tensor x, float[] boundaries, str parity) -> Tensor",
    _encode,
    _empty_codes,
)
_levels_op = register(
    "derivative_levels(Tensor codes, float[] levels, Tensor? grad, SymInt n, ScalarType dtype)"
    " -> Tensor",
    _levels,
    _empty_levels,
)
