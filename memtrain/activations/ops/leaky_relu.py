"""Leaky ReLUs whose slope is learned (PReLU) or drawn (RReLU), which keep no input."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain.activations.ops.autograd import autograd_function
from memtrain.activations.ops.call import Call, has_width
from memtrain.activations.saved.flatten import flatten, restore
from memtrain.activations.saved.function_payloads import save_compressed, saved_compressed
from memtrain.compressors import Compressor, Group, Key
from memtrain.kernels.packing.pack import pack_mask, unpack_mask


def recognise(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """`F.prelu`, `torch.prelu` and the method."""
    values = dict(zip(("input", "weight"), args, strict=False)) | dict(kwargs)
    x, weight = values.get("input"), values.get("weight")
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or x.dtype != weight.dtype:
        return None
    return Call("prelu", x, lambda c, key: prelu(x, weight, _groups(c), key), has_width)


def rrelu_call(x: Tensor, lower: float, upper: float, inplace: bool) -> Call:
    """A call of RReLU that draws slopes."""

    def run(compressor: Compressor, key: Key) -> Tensor:
        return rrelu(x, lower, upper, _groups(compressor), key, inplace=inplace)

    return Call("rrelu", x, run, has_width)


def _groups(compressor: Compressor) -> Compressor:
    """Min/max groups of a derivative code's bits."""
    return Group(bits=compressor.bits) if compressor.gives_derivative else compressor


def prelu(x: Tensor, weight: Tensor, compressor: Compressor, key: Key) -> Tensor:
    """`F.prelu(x, weight)`, bit for bit, with a mask and a payload in place of its input.

    Args:
        x: Float, any shape; channels are dimension 1.
        weight: One slope, or one per channel.
        compressor: Of min(x, 0), from which a trained slope gets its gradient: unbiased where its
            rounding is. Not used where `weight` needs no gradient.
        key: Feeds its random bits.

    Returns:
        Like `x`. The gradient of `x` is torch's own, NaN apart: it counts as not above 0.

    Memory:
        1/8 byte per element, and the compressor's payload where the slope is trained.

    Example:
        >>> x = torch.tensor([-2.0, 3.0], requires_grad=True)
        >>> prelu(x, torch.tensor([0.25]), Group(), Key()).sum().backward()
        >>> x.grad
        tensor([0.2500, 1.0000])
    """
    return _prelu(x, weight, compressor, key)


def rrelu(
    x: Tensor,
    lower: float,
    upper: float,
    compressor: Compressor,
    key: Key,
    *,
    inplace: bool = False,
) -> Tensor:
    """`F.rrelu(x, lower, upper, training=True)`, bit for bit, with the slopes' payload alone.

    The slope is 1 above 0 and drawn between the bounds elsewhere: torch keeps it as a whole tensor,
    and the input beside it. A group's maximum is then mostly 1, which bfloat16 holds, so the
    gradient above 0 is mostly exact.

    Args:
        x: Float, any shape.
        lower: Least slope.
        upper: Greatest slope.
        compressor: Of the slopes; the gradient is unbiased where its rounding is.
        key: Feeds its random bits.
        inplace: Write the result over `x`.

    Returns:
        Like `x`.

    Memory:
        The compressor's payload of x's elements (torch: two tensors like x).

    Example:
        >>> x = torch.tensor([2.0, 3.0], requires_grad=True)
        >>> rrelu(x, 0.1, 0.3, Group(), Key()).sum().backward()
        >>> x.grad
        tensor([1., 1.])

    Reference:
        Xu et al., Empirical Evaluation of Rectified Activations, arXiv:1505.00853.
    """
    return _rrelu(x, lower, upper, compressor, key, inplace)


def _prelu_forward(ctx: Any, x: Tensor, weight: Tensor, compressor: Compressor, key: Key) -> Tensor:
    flat, ctx.order = flatten(x > 0)
    mask = pack_mask(flat)
    ctx.trained = ctx.needs_input_grad[1]
    if ctx.trained:
        save_compressed(ctx, x.clamp_max(0), compressor, key, mask, weight)
    else:
        ctx.save_for_backward(mask, weight)
    return torch.prelu(x, weight)


def _prelu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    low = None
    if ctx.trained:
        low, (mask, weight) = saved_compressed(ctx)
    else:
        mask, weight = ctx.saved_tensors
    above = restore(unpack_mask(mask, grad.numel()), ctx.order)
    channels = weight.view(-1, *[1] * (grad.dim() - 2)) if weight.numel() > 1 else weight
    slope = channels if grad.dim() else weight.view(())
    grad_x = torch.where(above, grad, grad * slope) if ctx.needs_input_grad[0] else None
    if low is None:
        return grad_x, None
    product = grad * torch.where(above, 0.0, low)
    others = [d for d in range(grad.dim()) if d != 1]
    total = product.sum(others) if weight.numel() > 1 else product.sum()
    return grad_x, total.view_as(weight)


_prelu = autograd_function(_prelu_forward, _prelu_backward, tensors=2)


def _rrelu_forward(
    ctx: Any,
    x: Tensor,
    lower: float,
    upper: float,
    compressor: Compressor,
    key: Key,
    inplace: bool,
) -> Tensor:
    slopes = torch.empty_like(x)
    y = torch.ops.aten.rrelu_with_noise(x, slopes, lower, upper, True)
    save_compressed(ctx, slopes, compressor, key)
    if not inplace:
        return y
    ctx.mark_dirty(x)
    return x.copy_(y)


def _rrelu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
    slopes, _ = saved_compressed(ctx)
    return (grad * slopes,)


_rrelu = autograd_function(_rrelu_forward, _rrelu_backward)
