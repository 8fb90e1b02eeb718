"""Dropout that saves its mask at one bit per element."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from memtrain.activations.ops.autograd import direct
from memtrain.compressors import Compressor, Key
from memtrain.kernels.derivative import derivative
from memtrain.kernels.packing.mask import BLOCK, pack_mask
from memtrain.kernels.strides import in_order, is_dense, memory_order


@dataclass(frozen=True, eq=False)
class Dropout:
    """A call of dropout that draws a mask."""

    x: Tensor
    p: float
    op: str = "dropout"
    tensor: str = "saved"

    def accepts(self, compressor: Compressor) -> bool:
        """Any but the identity: the mask is packed without loss."""
        return not compressor.is_identity

    def run(self, compressor: Compressor, key: Key) -> Tensor:
        """The value; torch's own random stream draws the mask."""
        return dropout(self.x, self.p)


def recognise(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Dropout | None:
    """`F.dropout` and `torch.dropout` in training, out of place; None otherwise."""
    values = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | dict(kwargs)
    training = values.pop("train", values.get("training", True))
    x, p = values.get("input"), values.get("p", 0.5)
    if not isinstance(x, Tensor) or not training or values.get("inplace") or not 0 < p < 1:
        return None
    if name.endswith("_") or x.dtype not in derivative.DTYPES:
        return None
    return Dropout(x, float(p))


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        x = x if is_dense(x) else x.clone()
        # Each device draws as its own F.dropout does, so the random stream is plain PyTorch's.
        if x.is_cuda:
            y, mask = torch.native_dropout(x, p, True)
        else:
            y, mask = None, torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
        flat = mask if mask.is_contiguous() else memory_order(mask)
        packed, factor = pack_mask(flat), _factor(p, x.dtype)
        ctx.save_for_backward(packed)
        ctx.told = factor, x.shape, x.stride()
        return _times(x, packed, factor) if y is None else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (packed,), (factor, *order), (grad,) = ctx.saved_tensors, ctx.told, grads
        if torch.is_grad_enabled():
            return _Times.apply(grad, packed, factor, *order), None  # type: ignore[return-value]
        return _times(in_order(grad, *order), packed, factor), None


_dropout = direct(_Dropout)


class _Times(Function):
    """`x` times the factor where the mask is 1, times 0 elsewhere: its own derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, factor: float, *order: Any) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.factor, ctx.order = factor, order
        return _times(in_order(x, *order), packed, factor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        return _Times.apply(grads[0], packed, ctx.factor, *ctx.order), None, None, None, None  # type: ignore[return-value]


def _times(x: Tensor, packed: Tensor, factor: float) -> Tensor:
    # A mask is a code of one bit, and the levels are 0 and the factor.
    return derivative.backward(x, packed.view(-1, BLOCK // 8), (0.0, factor))


@cache
def _factor(p: float, dtype: torch.dtype) -> float:
    """1 / (1 - p) as torch rounds it."""
    return float(torch.tensor(1.0, dtype=dtype, device="cpu") / (1 - p))


def dropout(x: Tensor, p: float) -> Tensor:
    """`F.dropout(x, p)` in training, bit for bit, saving one bit per element for backward.

    Args:
        x: float32, bfloat16, float16 or float64, any shape.
        p: Probability of a zero, in (0, 1).

    Returns:
        Shape and dtype of `x`.

    Memory:
        1/8 byte per element saved (torch: 4 on a CPU, 1 on CUDA).
    """
    return _dropout(x, p)
