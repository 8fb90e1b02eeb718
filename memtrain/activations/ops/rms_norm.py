"""RMS norms, torch's own and those that models write out, that save a compressed x / rms(x)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from memtrain.activations.ops.call import as_autocast
from memtrain.activations.ops.context import keep, kept
from memtrain.activations.ops.fused_norm import fused
from memtrain.activations.ops.once import once_differentiable
from memtrain.compressors import Compressor, Key


def rms_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    form: str = "torch",
    *,
    compressor: Compressor,
    key: Key = Key(),  # noqa: B008 (a frozen value)
) -> Tensor:
    """`F.rms_norm`, or a form of it that a model writes out, saving a compressed `x_hat`.

    The value is that of the form, bit for bit; where x_hat is quantised in the same pass
    (`ops.fused_norm`), up to the rounding of its sums. The gradient is computed in float32
    (float64 for float64) and then rounded: `dx = rstd * (g - x_hat * mean(g * x_hat))`, with
    g = dy * weight.

    Args:
        x: Float, any shape that ends in `shape`.
        shape: The dimensions that are normalised together.
        weight: Of `shape`; None with the form `"torch"` only.
        eps: Added to the mean square; None stands for the arithmetic's epsilon.
        form: A name in `FORMS`: how dtypes and the weight are handled.
        compressor: For `x_hat`, which has mean square 1 per row and the dtype of `x`.
        key: Feeds the compressor's random bits.

    Returns:
        Shape of `x`.

    Raises:
        ValueError: If `form` is unknown, or needs a weight that is not there.

    Memory:
        Kept for backward: the payload of x's elements, and one number per row.

    Example:
        >>> from memtrain.compressors import Group
        >>> x = torch.randn(4, 256, requires_grad=True)
        >>> rms_norm(x, (256,), compressor=Group(bits=4)).shape
        torch.Size([4, 256])

    Reference:
        Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    if form not in FORMS:
        raise ValueError(f"form={form!r}; allowed: {', '.join(FORMS)}")
    if weight is None and form != "torch":
        raise ValueError(f"weight=None; allowed with form='torch' only, not with {form!r}")
    size = list(shape)
    if form == "torch":
        x, weight = as_autocast(lambda t: torch.rms_norm(t, size), (0, *size), x, weight)
    return _RMSNorm.apply(x, weight, size, eps, form, compressor, key)  # type: ignore[return-value]


def _llama(x_hat: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight * x_hat.to(dtype)


def _cast_last(x_hat: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return (weight.float() * x_hat).to(dtype)


def _gemma(x_hat: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return (x_hat * (1.0 + weight.float())).to(dtype)


def _t5(x_hat: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    half = weight.dtype in (torch.float16, torch.bfloat16)
    return weight * (x_hat.to(weight.dtype) if half else x_hat)


# How a form makes its value of x_hat, the weight and x's dtype; None: torch's own function.
FORMS: dict[str, Callable[[Tensor, Tensor, torch.dtype], Tensor] | None] = {
    "torch": None,
    "llama": _llama,
    "cast_last": _cast_last,
    "gemma": _gemma,
    "t5": _t5,
}


class _RMSNorm(Function):
    @staticmethod
    def forward(  # noqa: PLR0913 (the norm's own, and the site's)
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        shape: list[int],
        eps: float | None,
        form: str,
        compressor: Compressor,
        key: Key,
    ) -> Tensor:
        make = FORMS[form]
        double = make is None and x.dtype == torch.float64
        arithmetic = torch.float64 if double else torch.float32
        added = torch.finfo(arithmetic).eps if eps is None else eps
        ctx.dims, ctx.plus = list(range(-len(shape), 0)), 1.0 if form == "gemma" else 0.0
        if _keeps_dtype(form, x.dtype, weight):
            ctx.output = partial(_scaled, form, x.dtype, x.dtype)
            scale = None if weight is None or not ctx.plus else ctx.plus + weight.float()
            how: dict[str, Any] = {"scale": scale, "narrow": form in ("llama", "t5")}
            site = (added, compressor, key)
            y = fused(ctx, x, shape, weight, None, *site, centred=False, **how)
            if y is not None:
                return y
        wide = x.to(arithmetic)
        rstd = torch.rsqrt(wide.pow(2).mean(ctx.dims, keepdim=True) + added)
        x_hat = wide * rstd
        if make is None or weight is None:  # others than torch's form have a weight
            y = torch.rms_norm(x, shape, weight, eps)
        else:
            y = make(x_hat, weight, x.dtype)
        keep(ctx, x_hat.to(x.dtype), compressor, key, rstd, weight)
        ctx.output = partial(_scaled, form, x.dtype, y.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x_hat, (rstd, weight) = kept(ctx)
        dtype, grad, x_hat = x_hat.dtype, _wide(grads[0]), _wide(x_hat)
        dx = dw = None
        if weight is not None and ctx.needs_input_grad[1]:
            dw = (grad * x_hat).sum_to_size(weight.shape).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            g = grad if weight is None else grad * (_wide(weight) + ctx.plus)
            projection = (g * x_hat).mean(ctx.dims, keepdim=True)
            dx = torch.addcmul(g, x_hat, projection, value=-1).mul_(rstd).to(dtype)
        return dx, dw, None, None, None, None, None


def _keeps_dtype(form: str, dtype: torch.dtype, weight: Tensor | None) -> bool:
    """Whether the value of a form has the dtype of `x`, as one pass makes it."""
    if weight is None or form in ("cast_last", "gemma"):
        return True
    if form == "t5":
        return weight.dtype == dtype
    return torch.promote_types(weight.dtype, dtype) == dtype


def _scaled(
    form: str,
    dtype: torch.dtype,
    result: torch.dtype,
    x_hat: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
) -> Tensor:
    """The output from the normalised input."""
    make, x_hat = FORMS[form], _wide(x_hat)
    if weight is None or make is None:
        return (x_hat if weight is None else x_hat * weight).to(result)
    return make(x_hat, weight, dtype)


def _wide(x: Tensor) -> Tensor:
    """In the arithmetic's dtype: float32, or float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()
