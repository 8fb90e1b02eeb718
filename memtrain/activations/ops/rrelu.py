"""RReLU in training: its random slopes at a few bits, unbiased, and never its input."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from memtrain.activations.ops.context import keep, kept
from memtrain.activations.ops.once import once_differentiable
from memtrain.compressors import Compressor, Group, Key


@dataclass(frozen=True, eq=False)
class RReLU:
    """A call of RReLU that draws slopes."""

    x: Tensor
    lower: float
    upper: float
    inplace: bool = False
    op: str = "rrelu"
    tensor: str = "input"

    def accepts(self, compressor: Compressor) -> bool:
        """Derivative codes (their bits serve), or min/max groups."""
        return compressor.gives_derivative or compressor.group_codes(Key()) is not None

    def run(self, compressor: Compressor, key: Key) -> Tensor:
        """The value, with torch's own slopes; the gradient is unbiased."""
        if compressor.gives_derivative:
            compressor = Group(bits=compressor.bits)
        return rrelu(self.x, self.lower, self.upper, compressor, key, inplace=self.inplace)


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
    return _RReLU.apply(x, lower, upper, compressor, key, inplace)  # type: ignore[return-value]


class _RReLU(Function):
    @staticmethod
    def forward(
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
        keep(ctx, slopes, compressor, key)
        if not inplace:
            return y
        ctx.mark_dirty(x)
        return x.copy_(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        slopes, _ = kept(ctx)
        return grads[0] * slopes, None, None, None, None, None
