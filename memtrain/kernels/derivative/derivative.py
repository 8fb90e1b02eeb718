"""Few-bit derivative codes: an activation's forward keeps codes, its backward multiplies by levels.

The side of x is x - shift (parity `"plain"`) or |x - shift| (`"even"`), in float32. Its code is the
number of boundaries below it, so that a value equal to a boundary goes left; with parity `"band"`
there are two boundaries and one bit, 1 where low < x - shift <= high. NaN gets code 0. Codes are
packed in blocks of 256 (layout: `packing.bits`); the last is filled up with the code of 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from memtrain.kernels.derivative import native as in_cpp
from memtrain.kernels.derivative.definition import (
    BLOCK_SIZE,
    backward_reference,
    bits_of,
    check_dtype,
    check_side,
    code_bits,
    decode_reference,
    encode_reference,
    numbers,
    wide,
)
from memtrain.kernels.derivative.definition import DTYPES as DTYPES
from memtrain.kernels.derivative.pointwise import check_function, one_pass, value
from memtrain.kernels.dispatch import choose, is_plain, is_plain_cpu, register
from memtrain.kernels.strides import is_dense, memory_order


def encode(
    x: Tensor, boundaries: Sequence[float], *, parity: str = "plain", shift: float = 0.0
) -> Tensor:
    """Pack the code of every element of `x`.

    Args:
        x: float32, bfloat16, float16 or float64 (rounded to float32 first), any shape; taken in
            logical order, contiguous without a copy.
        boundaries: 2**bits - 1 ascending numbers, 1 to 8 bits; exactly 2 for a band. Rounded to
            float32.
        parity: `"plain"`, `"even"` or `"band"`.
        shift: Subtracted from `x` first; rounded to float32.

    Returns:
        uint8, [ceil(numel / 256), 32 * bits]. NaN has code 0, -Inf the first code and +Inf the
        last (`"even"`: either the last; `"band"`: either 0, where the bounds are finite).

    Raises:
        TypeError: If `x` is no float tensor.
        ValueError: If the parity or the number of boundaries is not allowed.

    Memory:
        bits / 8 bytes per element, padded to whole blocks of 256 elements.

    Example:
        >>> codes = encode(torch.tensor([-1.0, 0.0, 2.0]), [0.0])
        >>> codes.shape, decode(codes, [0.0, 1.0], 3)
        (torch.Size([1, 32]), tensor([0., 0., 1.]))

    Reference:
        Novikov et al., Few-Bit Backward, ICML 2023, arXiv:2202.00441, algorithm 1.
    """
    check_side(x.dtype, boundaries, parity)
    run = _encode if is_plain(x) else _encode_op
    return run(x.contiguous(), boundaries, parity, shift)


def forward(
    x: Tensor,
    function: str,
    boundaries: Sequence[float],
    *,
    parameters: Sequence[float] = (),
    parity: str = "plain",
    shift: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The activation's value and the codes of its input, in one pass where a fused kernel exists.

    Args:
        x: float32, bfloat16, float16 or float64, any shape and strides.
        function: A name in `memtrain.kernels.derivative.pointwise.FUNCTIONS`.
        boundaries: As for `encode`.
        parameters: The function's, in the order of torch's arguments; none for torch's defaults.
        parity: As for `encode`.
        shift: As for `encode`.

    Returns:
        y: What torch's own function gives: equal on the CPU; on CUDA the fused kernels compute in
            float32 and round once. Strides of `x` where it is dense.
        codes: As from `encode`, elements in the memory order of `y`.

    Raises:
        TypeError: If `x` is no float tensor.
        ValueError: If the function or parity is unknown or the number of boundaries not allowed.

    Memory:
        One tensor like `x`, and bits / 8 bytes per element.

    Example:
        >>> y, codes = forward(torch.tensor([-1.0, 2.0]), "relu", [0.0])
        >>> y, backward(torch.ones(2), codes, [0.0, 1.0])
        (tensor([0., 2.]), tensor([0., 1.]))
    """
    if is_plain_cpu(x):
        told = (function, tuple(parameters), tuple(boundaries), parity, shift)
        return in_cpp.encoder(*told, x.dtype).forward(x)
    check_side(x.dtype, boundaries, parity)
    check_function(function)
    run = _forward if is_plain(x) else _forward_op
    return run(x, function, parameters, boundaries, parity, shift)


def decode(
    codes: Tensor, levels: Sequence[float], n: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The derivative's levels that the codes stand for.

    Args:
        codes: uint8 from `encode`, contiguous.
        levels: 2**bits numbers.
        n: How many elements were encoded.
        dtype: Of the result; levels are rounded to float32 (not for float64), then to it.

    Returns:
        [n], of `dtype`.

    Raises:
        ValueError: If the number of levels is not allowed.

    Example:
        >>> decode(encode(torch.tensor([-1.0, 3.0]), [0.0]), [0.25, 0.5], 2)
        tensor([0.2500, 0.5000])
    """
    bits_of(len(levels), 0)
    run = _decode if is_plain(codes) else _decode_op
    return run(codes, levels, n, dtype)


def backward(grad: Tensor, codes: Tensor, levels: Sequence[float]) -> Tensor:
    """`grad` times the level of each code, in one pass that reads nothing else.

    Args:
        grad: float32, bfloat16, float16 or float64, dense, elements in memory in the order of the
            codes.
        codes: uint8 from `encode`, contiguous.
        levels: 2**bits numbers, rounded to float32 (not for float64).

    Returns:
        Like `grad`, strides too. The product is taken in float32 (float64 for float64) and rounded
        once. NaN and Inf in `grad` follow IEEE rules (Inf times level 0 is NaN), element by
        element. Where the encoded x was NaN the result is the finite `grad * levels[0]`: it is the
        forward value that carries the NaN.

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
    if is_plain_cpu(grad):
        return in_cpp.decoder(tuple(levels), grad.dtype).backward(grad, codes)
    check_dtype(grad.dtype)
    bits_of(len(levels), 0)
    run = _backward if is_plain(grad) else _backward_op
    return run(grad, codes, levels)


def _encode(x: Tensor, boundaries: Sequence[float], parity: str, shift: float) -> Tensor:
    choice = choose(x)
    if choice == "reference":
        return encode_reference(x, boundaries, parity, shift)
    if choice == "triton":
        from memtrain.kernels.derivative import forward_triton as kernels

        table = tuple(numbers(tuple(boundaries)).tolist())
        return kernels.encode(x, table, parity, shift)
    return in_cpp.encoder("", (), tuple(boundaries), parity, shift, x.dtype).codes(x)


def _forward(
    x: Tensor,
    function: str,
    parameters: Sequence[float],
    boundaries: Sequence[float],
    parity: str,
    shift: float,
) -> tuple[Tensor, Tensor]:
    choice = choose(x)
    if choice == "cpu":
        told = (function, tuple(parameters), tuple(boundaries), parity, shift)
        return in_cpp.encoder(*told, x.dtype).forward(x)
    dense = x if is_dense(x) else x.clone()
    if choice == "triton" and x.dtype != torch.float64:
        from memtrain.kernels.derivative import forward_triton as kernels

        if function in kernels.FUSED:
            scalars = one_pass(function, parameters, x.dtype)
            table = tuple(numbers(tuple(boundaries)).tolist())
            y = torch.empty_like(dense)
            codes = kernels.forward(dense, y, (function, *scalars), table, (parity, shift))
            return y, codes
    y = value(function, x, parameters)
    if y.stride() != dense.stride():
        y = torch.empty_like(dense).copy_(y)
    flat = dense if dense.is_contiguous() else memory_order(dense)
    return y, _encode(flat, boundaries, parity, shift)


def _decode(codes: Tensor, levels: Sequence[float], n: int, dtype: torch.dtype) -> Tensor:
    choice = choose(codes)
    if choice == "reference":
        return decode_reference(codes, levels, n, dtype)
    return _to_levels(choice, None, codes, levels, codes.new_empty(n, dtype=dtype))


def _backward(grad: Tensor, codes: Tensor, levels: Sequence[float]) -> Tensor:
    choice, out = choose(codes), torch.empty_like(grad)
    if choice == "reference":
        memory_order(out).copy_(backward_reference(memory_order(grad), codes, levels))
        return out
    return _to_levels(choice, grad, codes, levels, out)


def _to_levels(
    choice: str, grad: Tensor | None, codes: Tensor, levels: Sequence[float], out: Tensor
) -> Tensor:
    """The levels, times `grad` where there is one, written to `out`."""
    if choice == "triton":
        from memtrain.kernels.derivative import backward_triton as kernels

        table = numbers(tuple(levels), wide(out.dtype))
        return kernels.backward(grad, codes, tuple(table.tolist()), out)
    return in_cpp.decoder(tuple(levels), out.dtype).write(grad, codes, out)


def _empty_codes(x: Tensor, boundaries: Sequence[float], parity: str) -> Tensor:
    width = BLOCK_SIZE // 8 * code_bits(boundaries, parity)
    n_blocks = (x.numel() + BLOCK_SIZE - 1) // BLOCK_SIZE
    return torch.empty((n_blocks, width), dtype=torch.uint8, device=x.device)


_encode_op = register(
    "derivative_encode(Tensor x, float[] boundaries, str parity, float shift) -> Tensor",
    _encode,
    lambda x, boundaries, parity, shift: _empty_codes(x, boundaries, parity),
)
_forward_op = register(
    "derivative_forward(Tensor x, str function, float[] parameters, float[] boundaries, "
    "str parity, float shift) -> (Tensor, Tensor)",
    _forward,
    lambda x, f, p, boundaries, parity, s: (
        torch.empty_like(x),
        _empty_codes(x, boundaries, parity),
    ),
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
