"""Activations that keep a few bits per element for backward: exact value, stepwise gradient."""

from typing import Any

import torch
from torch import Tensor

from memtrain.activations.ops.autograd import autograd_function
from memtrain.compressors.derivative import DerivativeCode
from memtrain.compressors.fewbit.register import registered
from memtrain.kernels.derivative import derivative, pointwise
from memtrain.kernels.strides import in_order, is_dense, memory_order

Value = tuple[str, tuple[float, ...]]


def fewbit(
    x: Tensor,
    compressor: DerivativeCode,
    *,
    inplace: bool = False,
    value: Value | None = None,
    waits: bool = False,
) -> Tensor:
    """Return the activation `compressor.function`, keeping only packed codes of `x` for backward.

    The forward value is torch's own; the gradient is `grad * level`
    with the few-bit table's level for f'(x). Where no gradient is wanted it is the plain function
    and nothing is kept. Differentiating twice is an error.

    `x` is float32, bfloat16, float16 or float64. A dense tensor, in any order of dimensions, is
    read where it lies; others are copied for the call. `value` has the name in
    `pointwise.FUNCTIONS` and the parameters of the function whose value is wanted, where the table
    is of another one. If `waits`, the node keeps the input, and the gradient is exact, unless
    `encode` is called.

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
    wanted = value or (compressor.function, compressor.parameters)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _overwrite(x, wanted) if inplace else _plain(x, wanted)
    return _fewbit(x, compressor, wanted, inplace, waits)


def _plain(x: Tensor, wanted: Value) -> Tensor:
    function, parameters = wanted
    if function not in pointwise.FUNCTIONS:
        return registered(function).plain(x)
    return pointwise.value(function, x, parameters)


def _overwrite(x: Tensor, wanted: Value) -> Tensor:
    """f(x) written over x, by torch's own in-place op where there is one."""
    function, parameters = wanted
    if function not in pointwise.FUNCTIONS:
        return x.copy_(_plain(x, wanted))
    return pointwise.overwrite(function, x, parameters)


def _fewbit_forward(
    ctx: Any, x: Tensor, compressor: DerivativeCode, wanted: Value, inplace: bool, waits: bool
) -> Tensor:
    # Codes lie in memory order, as the backward pass expects: a gap-filled clone has one.
    dense = x if is_dense(x) else x.clone()
    ctx.code, ctx.wanted, ctx.waits = compressor, wanted, waits
    ctx.geometry = dense.shape, dense.stride()
    if waits:
        ctx.save_for_backward(x.clone() if inplace else x)
    else:
        ctx.save_for_backward(_codes(dense, compressor))
    if inplace:
        ctx.mark_dirty(x)
        return _overwrite(x, wanted)
    y = _plain(x, wanted)  # of `x`: the last bit depends on the strides
    return y if y.stride() == dense.stride() else torch.empty_like(dense).copy_(y)


def _fewbit_backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
    (saved,) = ctx.saved_tensors
    if ctx.waits:
        with torch.enable_grad():
            x = saved.detach().requires_grad_()
            y = _plain(x, ctx.wanted)
        return torch.autograd.grad(y, x, grad)
    grad = in_order(grad, *ctx.geometry)
    return (derivative.backward(grad, saved, ctx.code.table().levels),)


def encode(node: Any, x: Tensor) -> Tensor:
    """Return the codes that take the place of the input of a node that waits."""
    node.waits = False
    with torch.no_grad():
        return _codes(x if is_dense(x) else x.clone(), node.code)


def _codes(x: Tensor, code: DerivativeCode) -> Tensor:
    step = code.table()
    return derivative.encode(memory_order(x), step.boundaries, parity=step.parity)


_fewbit = autograd_function(_fewbit_forward, _fewbit_backward)
