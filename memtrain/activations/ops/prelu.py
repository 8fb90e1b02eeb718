"""PReLU: a 1-bit mask for the input's gradient, min(x, 0) at a few bits for the slope's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from memtrain.activations.ops.context import keep, kept
from memtrain.activations.ops.once import once_differentiable
from memtrain.activations.saved.flatten import flatten, restore
from memtrain.compressors import Compressor, Group, Key
from memtrain.kernels.packing.mask import pack_mask, unpack_mask


@dataclass(frozen=True, eq=False)
class PReLU:
    """A call of PReLU with one slope, or one per channel."""

    x: Tensor
    weight: Tensor
    op: str = "prelu"
    tensor: str = "input"

    def accepts(self, compressor: Compressor) -> bool:
        """Derivative codes, or min/max groups for the slope's gradient."""
        return compressor.gives_derivative or compressor.group_codes(Key()) is not None

    def run(self, compressor: Compressor, key: Key) -> Tensor:
        """The value; the input's gradient is exact, the slope's unbiased."""
        if compressor.gives_derivative:
            compressor = Group(bits=compressor.bits)
        return prelu(self.x, self.weight, compressor, key)


def recognise(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PReLU | None:
    """`F.prelu`, `torch.prelu` and the method."""
    values = dict(zip(("input", "weight"), args, strict=False)) | dict(kwargs)
    x, weight = values.get("input"), values.get("weight")
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or x.dtype != weight.dtype:
        return None
    return PReLU(x, weight)


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
    return _PReLU.apply(x, weight, compressor, key)  # type: ignore[return-value]


class _PReLU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, compressor: Compressor, key: Key) -> Tensor:
        flat, ctx.order = flatten(x > 0)
        mask = pack_mask(flat)
        ctx.trained = ctx.needs_input_grad[1]
        if ctx.trained:
            keep(ctx, x.clamp_max(0), compressor, key, mask, weight)
        else:
            ctx.save_for_backward(mask, weight)
        return torch.prelu(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad, low = grads[0], None
        if ctx.trained:
            low, (mask, weight) = kept(ctx)
        else:
            mask, weight = ctx.saved_tensors
        above = restore(unpack_mask(mask, grad.numel()), ctx.order)
        channels = weight.view(-1, *[1] * (grad.dim() - 2)) if weight.numel() > 1 else weight
        slope = channels if grad.dim() else weight.view(())
        grad_x = torch.where(above, grad, grad * slope) if ctx.needs_input_grad[0] else None
        if low is None:
            return grad_x, None, None, None
        product = grad * torch.where(above, 0.0, low)
        others = [d for d in range(grad.dim()) if d != 1]
        total = product.sum(others) if weight.numel() > 1 else product.sum()
        return grad_x, total.view_as(weight), None, None
