"""Dropout that saves its mask at one bit per element."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from memtrain.compressors import Compressor, Identity, Key
from memtrain.kernels.mask import pack_mask, unpack_mask


@dataclass(frozen=True, eq=False)
class Dropout:
    """A call of dropout that draws a mask."""

    x: Tensor
    p: float
    op: str = "dropout"
    tensor: str = "saved"

    def accepts(self, compressor: Compressor) -> bool:
        """Any but the identity: the mask is packed without loss."""
        return not isinstance(compressor, Identity)

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
    return None if name.endswith("_") else Dropout(x, float(p))


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        # Each device draws as its own F.dropout does, so the random stream is plain PyTorch's.
        if x.is_cuda:
            y, mask = torch.native_dropout(x, p, True)
        else:
            noise = torch.empty_like(x).bernoulli_(1 - p)
            mask = noise.bool()
            y = x * noise.div_(1 - p)
        ctx.save_for_backward(pack_mask(mask))
        ctx.p, ctx.shape = p, x.shape
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (packed,) = ctx.saved_tensors
        (grad,) = grads
        mask = unpack_mask(packed, grad.numel()).view(ctx.shape)
        return grad * mask.to(grad.dtype).div_(1 - ctx.p), None


def dropout(x: Tensor, p: float) -> Tensor:
    """`F.dropout(x, p)` in training, bit for bit, saving one bit per element for backward.

    Args:
        x: Float, any shape.
        p: Probability of a zero, in (0, 1).

    Returns:
        Shape and dtype of `x`.

    Memory:
        1/8 byte per element saved (torch: 4 on a CPU, 1 on CUDA).
    """
    return _Dropout.apply(x, p)  # type: ignore[return-value]
