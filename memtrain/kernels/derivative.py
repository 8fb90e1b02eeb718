"""Few-bit derivative codes: an activation's forward keeps codes, its backward multiplies by levels.

The code of x is the number of boundaries below x (below |x| for an even derivative), compared in
float32, so that a value equal to a boundary goes left; NaN gets code 0. Codes are packed in blocks
of 256 (layout: `memtrain.kernels.bits`); the last block is filled up with the code of 0.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from memtrain.kernels import bits as bit_layout
from memtrain.kernels import cpu
from memtrain.kernels.dispatch import choose, register
from memtrain.kernels.strides import is_dense, memory_order

BLOCK_SIZE = 256

# What each name computes, exactly as torch does.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "mish": F.mish,
    "elu": F.elu,
    "selu": F.selu,
    "hardswish": F.hardswish,
}
_FUSED = ("gelu", "gelu_tanh", "silu", "relu")  # value and codes in one Triton pass
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float64: "f64"}  # of C++ symbols
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def encode(x: Tensor, boundaries: list[float], *, even: bool = False) -> Tensor:
    """Pack the code of every element of `x`.

    Args:
        x: float32, bfloat16, float16 or float64 (rounded to float32 first), any shape; taken in
            logical order, contiguous without a copy.
        boundaries: 1, 3, 7 or 15 ascending numbers, rounded to float32.
        even: Compare |x| instead of x.

    Returns:
        uint8, [ceil(numel / 256), 32 * bits]. NaN has code 0, -Inf the first code and +Inf the
        last (|Inf| the last where `even`).

    Raises:
        TypeError: If `x` is no float tensor.
        ValueError: If the number of boundaries is not allowed.

    Memory:
        bits / 8 bytes per element, padded to whole blocks of 256 elements.

    Example:
        >>> codes = encode(torch.tensor([-1.0, 0.0, 2.0]), [0.0])
        >>> codes.shape, decode(codes, [0.0, 1.0], 3)
        (torch.Size([1, 32]), tensor([0., 0., 1.]))

    Reference:
        Novikov et al., Few-Bit Backward, ICML 2023, arXiv:2202.00441, algorithm 1.
    """
    _check_input(x, boundaries)
    return _encode_op(x.reshape(-1).contiguous(), boundaries, even)


def forward(
    x: Tensor, function: str, boundaries: list[float], *, even: bool = False
) -> tuple[Tensor, Tensor]:
    """The activation's value and the codes of its input, in one pass where a fused kernel exists.

    Args:
        x: float32, bfloat16, float16 or float64, any shape and strides.
        function: A name in `FUNCTIONS`.
        boundaries: As for `encode`.
        even: As for `encode`.

    Returns:
        y: What torch's own function gives: the same bits on the CPU; on CUDA the fused kernels
            compute in float32 and round once. Strides of `x` where it is dense.
        codes: As from `encode`, elements in the memory order of `y`.

    Raises:
        TypeError: If `x` is no float tensor.
        ValueError: If the function is unknown or the number of boundaries not allowed.

    Memory:
        One tensor like `x`, and bits / 8 bytes per element.

    Example:
        >>> y, codes = forward(torch.tensor([-1.0, 2.0]), "relu", [0.0])
        >>> y, backward(torch.ones(2), codes, [0.0, 1.0])
        (tensor([0., 2.]), tensor([0., 1.]))
    """
    _check_input(x, boundaries)
    if function not in FUNCTIONS:
        raise ValueError(f"function {function!r} is unknown; allowed: {', '.join(FUNCTIONS)}")
    return _forward_op(x, function, boundaries, even)


def decode(
    codes: Tensor, levels: list[float], n: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The derivative's levels that the codes stand for.

    Args:
        codes: uint8 from `encode`, contiguous.
        levels: 2, 4, 8 or 16 numbers, rounded to float32.
        n: How many elements were encoded.
        dtype: Of the result; levels are rounded to it.

    Returns:
        [n], of `dtype`.

    Raises:
        ValueError: If the number of levels is not allowed.

    Example:
        >>> decode(encode(torch.tensor([-1.0, 3.0]), [0.0]), [0.25, 0.5], 2)
        tensor([0.2500, 0.5000])
    """
    _bits_of(levels, extra=0)
    return _decode_op(codes, levels, n, dtype)


def backward(grad: Tensor, codes: Tensor, levels: list[float]) -> Tensor:
    """`grad` times the level of each code, in one pass that reads nothing else.

    Args:
        grad: float32, bfloat16, float16 or float64, contiguous, elements in the order of the codes.
        codes: uint8 from `encode`, contiguous.
        levels: 2, 4, 8 or 16 numbers, rounded to float32.

    Returns:
        Like `grad`. The product is taken in float32 (float64 for float64) and rounded once. NaN
        and Inf in `grad` follow IEEE rules (Inf times level 0 is NaN), element by element. Where
        the encoded x was NaN the result is the finite `grad * levels[0]`: it is the forward value
        that carries the NaN.

    Raises:
        TypeError: If `grad` is no float tensor.
        ValueError: If the number of levels is not allowed.

    Memory:
        One tensor like `grad`.

    Example:
        >>> codes = encode(torch.tensor([-1.0, 3.0]), [0.0])
        >>> backward(torch.tensor([2.0, 2.0]), codes, [0.25, 0.5])
        tensor([0.5000, 1.0000])
    """
    _check_dtype(grad)
    _bits_of(levels, extra=0)
    return _backward_op(grad, codes, levels)


def _check_dtype(x: Tensor) -> None:
    if x.dtype not in _FLOATS:
        raise TypeError(f"dtype {x.dtype} is not allowed; allowed: {', '.join(map(str, _FLOATS))}")


def _check_input(x: Tensor, boundaries: list[float]) -> None:
    _check_dtype(x)
    _bits_of(boundaries, extra=1)


def _bits_of(numbers: list[float], extra: int) -> int:
    """Bits of the codes behind 2**bits - `extra` numbers."""
    count = len(numbers) + extra
    if count not in (2, 4, 8, 16):
        allowed = ", ".join(str(size - extra) for size in (2, 4, 8, 16))
        raise ValueError(f"{len(numbers)} boundaries or levels given; allowed: {allowed}")
    return count.bit_length() - 1


@cache
def _numbers(values: tuple[float, ...]) -> Tensor:
    """A table in float32 on the CPU; subnormals become 0, so that no unit can flush them."""
    table = torch.tensor(values, dtype=torch.float32, device="cpu")
    return torch.where(table.abs() < torch.finfo(torch.float32).tiny, 0.0, table)


def _encode_reference(x: Tensor, boundaries: list[float], even: bool) -> Tensor:
    value = bit_layout.blocks(x.float(), BLOCK_SIZE)
    side = value.abs() if even else value
    codes = torch.zeros_like(side, dtype=torch.int64)
    for boundary in _numbers(tuple(boundaries)).tolist():
        codes += side > boundary
    return bit_layout.pack(codes, _bits_of(boundaries, extra=1))


def _encode(x: Tensor, boundaries: list[float], even: bool) -> Tensor:
    choice = choose(x)
    if choice == "triton":
        from memtrain.kernels import derivative_triton

        return derivative_triton.encode(x, tuple(_numbers(tuple(boundaries)).tolist()), even)
    if choice == "reference":
        return _encode_reference(x, boundaries, even)
    codes = _empty_codes(x, boundaries)
    table = _numbers(tuple(boundaries))
    source, suffix = (x, "bf16") if x.dtype == torch.bfloat16 else (x.float(), "f32")
    cpu.call(f"mt_derivative_encode_{suffix}", source, table, codes, x.numel(), len(table), even)
    return codes


def _forward(
    x: Tensor, function: str, boundaries: list[float], even: bool
) -> tuple[Tensor, Tensor]:
    dense = x if is_dense(x) else x.clone()
    flat = memory_order(dense)
    if choose(x) == "triton" and function in _FUSED and x.dtype != torch.float64:
        from memtrain.kernels import derivative_triton

        numbers = tuple(_numbers(tuple(boundaries)).tolist())
        y, codes = derivative_triton.forward(flat, function, numbers, even)
        return y.as_strided(dense.shape, dense.stride()), codes
    y = FUNCTIONS[function](x)
    if y.stride() != dense.stride():
        y = torch.empty_like(dense).copy_(y)
    return y, _encode(flat, boundaries, even)


def _backward_reference(grad: Tensor, codes: Tensor, levels: list[float]) -> Tensor:
    level = _decode_reference(codes, levels, grad.numel()).view_as(grad)
    if grad.dtype == torch.float64:
        return grad * level.double()
    return (grad.float() * level).to(grad.dtype)


def _decode_reference(codes: Tensor, levels: list[float], n: int) -> Tensor:
    index = bit_layout.unpack(codes, _bits_of(levels, extra=0)).view(-1)[:n]
    return _numbers(tuple(levels)).to(codes.device)[index]


def _decode(codes: Tensor, levels: list[float], n: int, dtype: torch.dtype) -> Tensor:
    choice = choose(codes)
    if choice == "triton":
        from memtrain.kernels import derivative_triton

        return derivative_triton.decode(codes, tuple(_numbers(tuple(levels)).tolist()), n, dtype)
    if choice == "reference":
        return _decode_reference(codes, levels, n).to(dtype)
    out = torch.empty(n, dtype=torch.float32)
    table = _numbers(tuple(levels))
    cpu.call("mt_derivative_decode", codes, table, out, n, len(table))
    return out.to(dtype)


def _backward(grad: Tensor, codes: Tensor, levels: list[float]) -> Tensor:
    choice = choose(grad)
    if choice == "triton":
        from memtrain.kernels import derivative_triton

        return derivative_triton.backward(grad, codes, tuple(_numbers(tuple(levels)).tolist()))
    if choice == "reference":
        return _backward_reference(grad, codes, levels)
    source = grad.float() if grad.dtype == torch.float16 else grad
    out = torch.empty_like(source)
    table = _numbers(tuple(levels))
    name = f"mt_derivative_backward_{_SUFFIX[source.dtype]}"
    cpu.call(name, source, codes, table, out, grad.numel(), len(table))
    return out.to(grad.dtype)


def _empty_codes(x: Tensor, boundaries: list[float]) -> Tensor:
    width = BLOCK_SIZE // 8 * _bits_of(boundaries, extra=1)
    n_blocks = (x.numel() + BLOCK_SIZE - 1) // BLOCK_SIZE
    return torch.empty((n_blocks, width), dtype=torch.uint8, device=x.device)


_encode_op = register(
    "derivative_encode(Tensor x, float[] boundaries, bool even) -> Tensor",
    _encode,
    lambda x, boundaries, even: _empty_codes(x, boundaries),
)
_forward_op = register(
    "derivative_forward(Tensor x, str function, float[] boundaries, bool even) -> (Tensor, Tensor)",
    _forward,
    lambda x, function, boundaries, even: (torch.empty_like(x), _empty_codes(x, boundaries)),
)
_decode_op = register(
    "derivative_decode(Tensor codes, float[] levels, SymInt n, ScalarType dtype) -> Tensor",
    _decode,
    lambda codes, levels, n, dtype: codes.new_empty((n,), dtype=dtype),
)
_backward_op = register(
    "derivative_backward(Tensor grad, Tensor codes, float[] levels) -> Tensor",
    _backward,
    lambda grad, codes, levels: torch.empty_like(grad),
)
