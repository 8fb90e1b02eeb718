"""Activations that keep a few bits per element for backward: exact value, stepwise gradient."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from memtrain.compressors.derivative import DerivativeCode
from memtrain.compressors.fewbit_solver import Approximation, solve
from memtrain.kernels import derivative
from memtrain.kernels.strides import is_dense, memory_order

__all__ = ["Approximation", "fewbit", "solve"]


def fewbit(x: Tensor, compressor: DerivativeCode, *, inplace: bool = False) -> Tensor:
    """The activation `compressor.function`, keeping only packed codes of `x` for backward.

    The forward value is torch's own (bit-identical on the CPU); the gradient is `grad * level`
    with the few-bit table's level for f'(x). Where no gradient is wanted it is the plain function
    and nothing is kept. Differentiating twice is an error.

    Args:
        x: float32, bfloat16, float16 or float64, any shape and strides. A dense tensor in any
            order of dimensions is read where it lies; others are copied for the time of the call.
        compressor: Which function, and how many bits.
        inplace: Overwrite `x` with the result, as `F.relu(x, inplace=True)` does.

    Returns:
        f(x): shape, dtype and (where dense) strides of `x`; `x` itself where `inplace`.

    Raises:
        TypeError: If `x` is no float tensor.

    Memory:
        Kept for backward: compressor.bits / 8 bytes per element, padded to blocks of 256.

    Example:
        >>> x = torch.tensor([-1.0, 2.0], requires_grad=True)
        >>> fewbit(x, DerivativeCode(bits=1, function="relu")).sum().backward()
        >>> x.grad
        tensor([0., 1.])

    Reference:
        Novikov et al., Few-Bit Backward, ICML 2023, arXiv:2202.00441, algorithm 1.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _overwrite(x, compressor.function) if inplace else _plain(x, compressor.function)
    operation = _FewBitInPlace if inplace else _FewBit
    return operation.apply(x, compressor)  # type: ignore[return-value]


def _plain(x: Tensor, function: str) -> Tensor:
    return derivative.FUNCTIONS[function](x)


def _overwrite(x: Tensor, function: str) -> Tensor:
    """f(x) written over x, by torch's own in-place op where there is one."""
    if function == "relu":
        return F.relu_(x)
    if function == "silu":
        return F.silu(x, inplace=True)
    return x.copy_(_plain(x, function))


class _FewBit(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, compressor: DerivativeCode) -> Tensor:
        step = compressor.table()
        side = {"parity": step.parity, "shift": step.shift}
        y, codes = derivative.forward(x, compressor.function, step.boundaries, **side)
        ctx.save_for_backward(codes)
        ctx.levels, ctx.shape, ctx.stride = step.levels, y.shape, y.stride()
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _backward(ctx, grads[0])


class _FewBitInPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, compressor: DerivativeCode) -> Tensor:
        step = compressor.table()
        # Codes lie in memory order, as the backward pass expects: a gap-filled clone has one.
        dense = x if is_dense(x) else x.clone()
        flat = memory_order(dense)
        side = {"parity": step.parity, "shift": step.shift}
        ctx.save_for_backward(derivative.encode(flat, step.boundaries, **side))
        ctx.levels, ctx.shape, ctx.stride = step.levels, dense.shape, dense.stride()
        ctx.mark_dirty(x)
        return _overwrite(x, compressor.function)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _backward(ctx, grads[0])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (codes,) = ctx.saved_tensors
    if not _same_order(grad, ctx.shape, ctx.stride):
        other = torch.empty_strided(ctx.shape, ctx.stride, dtype=grad.dtype, device=grad.device)
        grad = other.copy_(grad)
    result = derivative.backward(memory_order(grad), codes, ctx.levels)
    return result.as_strided(ctx.shape, ctx.stride), None


def _same_order(x: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether `x` has these strides; those of dimensions of size 1 do not matter."""
    return all(
        size <= 1 or ours == theirs
        for size, ours, theirs in zip(shape, x.stride(), stride, strict=True)
    )
