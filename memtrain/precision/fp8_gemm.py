"""Linear layers on FP8 GEMMs: operands in torch's float8 types, exact where those hold them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from memtrain.kernels.floats.formats import FloatFormat

TYPES = {(4, 3): torch.float8_e4m3fn, (5, 2): torch.float8_e5m2}  # exponent and mantissa bits
MULTIPLE = 16  # of all sizes, on CUDA


def quantize(x: Tensor, form: FloatFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Convert a rounded tensor to torch's type of as many exponent and mantissa bits.

    With a power of two taken out, that type holds all numbers of the format but its largest: of
    `fp8_forward` 30 (480 of e4m3fn, whose largest is 448), of `fp8_backward` the binade from 65536.
    A tensor in which one occurs is halved once more. Numbers under twice `form.min_normal` then
    lose their last bit, to even: an error of `form.min_subnormal` or none. NaN and, in e5m2, Inf
    stay. No number is read from the device.

    Args:
        x: Numbers of `form`; float32, bfloat16 or float16, any shape.
        form: Of 4 exponent and 3 mantissa bits, or 5 and 2.

    Returns:
        codes: float8, as `x`.
        scale: float32, []: a power of two; `codes` times it is the tensor.
        halved: bool, []: whether a bit of the tensor may be lost.

    Memory:
        1 byte per element, and 5 while it runs.

    Example:
        >>> from memtrain.kernels.floats.formats import FP8_FORWARD
        >>> codes, scale, halved = quantize(torch.tensor([1.125, 28.0]), FP8_FORWARD)
        >>> codes.float() * scale, halved
        (tensor([ 1.1250, 28.0000]), tensor(False))
        >>> quantize(torch.tensor([1.125, 30.0]), FP8_FORWARD)[2]
        tensor(True)
    """
    kind = TYPES[form.exponent_bits, form.mantissa_bits]
    factor = 2.0 ** (form.bias or 0)
    whole = x.detach().to(torch.float32)
    magnitude = whole.abs()
    halved = ((magnitude > torch.finfo(kind).max / factor) & (magnitude < torch.inf)).any()
    factors = torch.where(halved, factor / 2, factor)
    return (whole * factors).to(kind), 1 / factors, halved


def _product(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply [m, k] by the transpose of [n, k], both contiguous."""
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)


def unsupported(x: Tensor, weight: Tensor) -> str:
    """Give the reason why no FP8 GEMM runs a linear layer, or an empty string.

    Args:
        x: [..., k].
        weight: [n, k].

    Example:
        >>> unsupported(torch.ones(0, 4), torch.ones(8, 4))
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
    codes = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn)
    scale = torch.ones((), device=device)
    try:
        _product(codes, scale, codes, scale, torch.float32)
    except (RuntimeError, NotImplementedError) as error:
        return f"{device} has no FP8 GEMM ({str(error).splitlines()[0]})"
    return ""


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    form: FloatFormat,
    back: FloatFormat | None,
    note_forward: Callable[[Tensor], None],
    note_backward: Callable[[Tensor], None],
) -> Tensor:
    """Run a linear layer on FP8 GEMMs; it saves its input and its weight as others do.

    Args:
        x: [..., k], numbers of `form`.
        weight: [n, k], numbers of `form`.
        bias: [n]; added to the product in its own precision.
        form: Of input and weight.
        back: Of the result's gradient; None: the backward runs plain GEMMs.
        note_forward: Called with a bool for input and weight: was it halved.
        note_backward: The same for the result's gradient.

    Returns:
        [..., n], in the dtype of `x`, or of autocast.

    Memory:
        Nothing beyond its input and weight until the backward.
    """
    return _Fp8Linear.apply(x, weight, bias, form, back, note_forward, note_backward)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 - a linear layer's arguments, and what its GEMMs take
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        form: FloatFormat,
        back: FloatFormat | None,
        note_forward: Callable[[Tensor], None],
        note_backward: Callable[[Tensor], None],
    ) -> Tensor:
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None)
        ctx.dtypes = tuple(None if one is None else one.dtype for one in (x, weight, bias))
        ctx.shape = x.shape
        ctx.form, ctx.back, ctx.note_backward = form, back, note_backward
        a, scale_a, halved_a = quantize(_rows(x), form)
        b, scale_b, halved_b = quantize(weight.contiguous(), form)
        note_forward(halved_a)
        note_forward(halved_b)
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        y = _product(a, scale_a, b, scale_b, dtype)
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
        of_x, of_weight, of_bias = ctx.dtypes
        g, dx, dw = _rows(grads[0]), None, None
        if ctx.back is None:
            dx = None if weight is None else (g.to(weight.dtype) @ weight).to(of_x)
            dw = None if x is None else (g.to(x.dtype).t() @ _rows(x)).to(of_weight)
        else:
            a, scale_a, halved = quantize(g, ctx.back)
            ctx.note_backward(halved)
            if weight is not None:
                dx = _product(a, scale_a, *_transposed(weight, ctx.form), of_x)
            if x is not None:
                right = _transposed(_rows(x), ctx.form)
                dw = _product(a.t().contiguous(), scale_a, *right, of_weight)
        db = g.sum(0).to(of_bias) if ctx.needs_input_grad[2] else None
        return None if dx is None else dx.view(ctx.shape), dw, db, None, None, None, None


def _transposed(x: Tensor, form: FloatFormat) -> tuple[Tensor, Tensor]:
    """Quantise the second operand of a backward's GEMM, whose columns must be contiguous."""
    codes, scale, _ = quantize(x, form)
    return codes.t().contiguous(), scale


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()
