"""Ops that are replaced whole: nonlinearities by derivative codes, dropout by a 1-bit mask."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from memtrain.activations.fewbit import fewbit
from memtrain.compressors import DerivativeCode
from memtrain.kernels.mask import pack_mask, unpack_mask

# Modules that write a nonlinearity out in several ops, each of which saves a tensor.
COMPOSITES = {
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
}


class Nonlinearity(NamedTuple):
    """A call of a nonlinearity: which, on what, in place or not."""

    function: str
    x: Tensor
    inplace: bool


def nonlinearity(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Nonlinearity | None:
    """Recognise a call of `gelu`, `silu` or `relu` as function, method or in-place form.

    Args:
        name: The function's `__name__`.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The call, or None if it is another op.
    """
    base = name.rstrip("_")
    if base not in ("gelu", "silu", "relu"):
        return None
    values = dict(zip(("input", "option"), args, strict=False)) | dict(kwargs)
    x = values.get("input")
    if not isinstance(x, Tensor):
        return None
    if base == "gelu":
        approximate = values.get("approximate", values.get("option", "none"))
        return Nonlinearity("gelu_tanh" if approximate == "tanh" else "gelu", x, name != base)
    inplace = name != base or bool(values.get("inplace", values.get("option", False)))
    return Nonlinearity(base, x, inplace)


def apply_nonlinearity(call: Nonlinearity, code: DerivativeCode) -> Tensor:
    """Run the call with derivative codes in place of its saved tensors."""
    # A piecewise-linear function is exact with one bit.
    bits = 1 if call.function == "relu" else code.bits
    return fewbit(call.x, replace(code, function=call.function, bits=bits), inplace=call.inplace)


class DropoutCall(NamedTuple):
    """A call of dropout that draws a mask."""

    x: Tensor
    p: float


def dropout_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> DropoutCall | None:
    """Recognise `F.dropout` and `torch.dropout` in training, out of place; None otherwise."""
    values = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | dict(kwargs)
    training = values.pop("train", values.get("training", True))
    x, p = values.get("input"), values.get("p", 0.5)
    if not isinstance(x, Tensor) or not training or values.get("inplace") or not 0 < p < 1:
        return None
    return DropoutCall(x, float(p))


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
