"""Linear layers on FP8 GEMMs: operands in torch's 8-bit types, exact where those hold them."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memtrain.kernels.floats.formats import FloatFormat

TYPES = {(4, 3): torch.float8_e4m3fn, (5, 2): torch.float8_e5m2}  # exponent and mantissa bits
MULTIPLE = 16  # of all sizes, on CUDA


class Operand(NamedTuple):
    """`codes` times `inverse` is the tensor; `halved` whether a bit of it may be lost."""

    codes: Tensor
    """float8."""
    inverse: Tensor
    """float32, []: a power of two."""
    halved: Tensor
    """bool, []."""


def operand(x: Tensor, form: FloatFormat) -> Operand:
    """A rounded tensor in torch's type of as many exponent and mantissa bits.

    With a power of two taken out, that type holds all numbers of the format but its largest: of
    `fp8_forward` 30 (480 of e4m3fn, whose largest is 448), of `fp8_backward` the binade from 65536.
    A tensor in which one occurs is halved once more. Numbers under twice `form.min_normal` then
    lose their last bit, to even: an error of `form.min_subnormal` or none. NaN and, in e5m2, Inf
    stay. No number is read from the device.

    Args:
        x: Numbers of `form`; float32, bfloat16 or float16, any shape.
        form: Of 4 exponent and 3 mantissa bits, or 5 and 2.

    Memory:
        1 byte per element, and 5 while it runs.

    Example:
        >>> from memtrain.kernels.floats.formats import FP8_FORWARD
        >>> codes, inverse, halved = operand(torch.tensor([1.125, 28.0]), FP8_FORWARD)
        >>> codes.float() * inverse, halved
        (tensor([ 1.1250, 28.0000]), tensor(False))
        >>> operand(torch.tensor([1.125, 30.0]), FP8_FORWARD).halved
        tensor(True)
    """
    kind = TYPES[form.exponent_bits, form.mantissa_bits]
    scale = 2.0 ** (form.bias or 0)
    whole = x.detach().to(torch.float32)
    magnitude = whole.abs()
    halved = ((magnitude > torch.finfo(kind).max / scale) & (magnitude < torch.inf)).any()
    factor = torch.where(halved, scale / 2, scale)
    return Operand((whole * factor).to(kind), 1 / factor, halved)


def product(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """`a @ b.T` by `torch._scaled_mm`.

    Args:
        a: [m, k], contiguous.
        b: [n, k], contiguous.
        dtype: Of the result.
    """
    return torch._scaled_mm(
        a.codes, b.codes.t(), scale_a=a.inverse, scale_b=b.inverse, out_dtype=dtype
    )


def unfit(x: Tensor, weight: Tensor) -> str:
    """Why no FP8 GEMM takes a linear layer's operands, or an empty string.

    Args:
        x: [..., k].
        weight: [n, k].

    Example:
        >>> unfit(torch.ones(0, 4), torch.ones(8, 4))
        'no elements'
    """
    if weight.dim() != 2 or not x.numel() or not weight.numel():
        return "no elements" if weight.dim() == 2 else "the weight has one row"
    sizes = (x.numel() // x.shape[-1], *weight.shape)
    if x.is_cuda and any(size % MULTIPLE for size in sizes):
        return f"sizes {sizes} are no multiples of {MULTIPLE}"
    return _missing(x.device)


@cache
def _missing(device: torch.device) -> str:
    one = Operand(
        torch.ones(16, 16, device=device).to(torch.float8_e4m3fn),
        torch.ones((), device=device),
        torch.zeros((), dtype=torch.bool, device=device),
    )
    try:
        product(one, one, torch.float32)
    except (RuntimeError, NotImplementedError) as error:
        return f"{device} has no FP8 GEMM ({str(error).splitlines()[0]})"
    return ""


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    form: FloatFormat,
    back: FloatFormat | None,
    halved: Callable[[Tensor], None],
) -> Tensor:
    """A linear layer whose products run in FP8; it saves its input and its weight as others do.

    Args:
        x: [..., k], numbers of `form`.
        weight: [n, k], numbers of `form`.
        bias: [n]; added to the product in its own precision.
        form: Of input and weight.
        back: Of the result's gradient; None: the products of the backward are plain.
        halved: Is told of every operand, forward and backward, whether it was halved.

    Returns:
        [..., n], in the dtype of `x`, or of autocast.

    Memory:
        Nothing beyond its input and weight until the backward.
    """
    return _Linear.apply(x, weight, bias, form, back, halved)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        form: FloatFormat,
        back: FloatFormat | None,
        halved: Callable[[Tensor], None],
    ) -> Tensor:
        given, learnt = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if learnt else None, weight if given else None)
        ctx.like = tuple(None if one is None else one.dtype for one in (x, weight, bias))
        ctx.shape = x.shape
        ctx.form, ctx.back, ctx.halved = form, back, halved
        left, right = operand(_rows(x), form), operand(weight.contiguous(), form)
        halved(left.halved)
        halved(right.halved)
        y = product(left, right, _result(x))
        if bias is not None:
            y += bias.to(y.dtype)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of FP8 GEMMs cannot be differentiated again (create_graph=True); "
                "allowed: precision.fp8_gemm=false"
            )
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.like
        g, dx, dw = _rows(grads[0]), None, None
        if ctx.back is None:
            dx = None if weight is None else (g.to(weight.dtype) @ weight).to(of_x)
            dw = None if x is None else (g.to(x.dtype).t() @ _rows(x)).to(of_weight)
        else:  # the second operand's columns must lie one after another
            left = operand(g, ctx.back)
            ctx.halved(left.halved)
            if weight is not None:
                dx = product(left, _turned(operand(weight, ctx.form)), of_x)
            if x is not None:
                dw = product(_turned(left), _turned(operand(_rows(x), ctx.form)), of_weight)
        db = g.sum(0).to(of_bias) if ctx.needs_input_grad[2] else None
        return None if dx is None else dx.view(ctx.shape), dw, db, None, None, None


def _turned(a: Operand) -> Operand:
    return a._replace(codes=a.codes.t().contiguous())


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _result(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
