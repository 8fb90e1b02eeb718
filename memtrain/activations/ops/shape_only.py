"""Ops whose backward needs nothing of their input but its shape, yet which torch lets keep it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain.activations.ops.autograd import autograd_function
from memtrain.activations.ops.call import Call, is_lossy
from memtrain.activations.ops.spatial import memory_format_of, per_dimension, strides_of

# Of torch 2.13's ops that pool, pad, resize or reduce, these keep their input; interpolate,
# constant and circular padding, mean and sum keep nothing.
NAMES = (
    *(f"avg_pool{n}d" for n in (1, 2, 3)),
    *(f"adaptive_avg_pool{n}d" for n in (1, 2, 3)),
    "pad",
    "interpolate",
)
_PADS = {"reflect": "reflection_pad", "replicate": "replication_pad"}
_POOL = (
    "input",
    "kernel_size",
    "stride",
    "padding",
    "ceil_mode",
    "count_include_pad",
    "divisor_override",
)


def _call(op: str, x: Tensor, aten: str, args: tuple[Any, ...], *, flat: bool = False) -> Call:
    return Call(op, x, lambda compressor, key: shape_only(x, aten, args, flat=flat), is_lossy)


def shape_only(x: Tensor, aten: str, args: tuple[Any, ...], *, flat: bool = False) -> Tensor:
    """`torch.ops.aten.<aten>(x, *args)`, keeping the shape of `x` for backward and not `x`.

    Value and gradient are torch's own, by its own kernels.

    Args:
        x: Float, of the shape that the op takes.
        aten: An op with a backward `<aten>_backward(grad, x, *args)` that reads x's shape only.
        args: Its other arguments.
        flat: Give `x` another spatial dimension, of size 1, and take it from the result.

    Returns:
        The op's result.

    Memory:
        Kept for backward: nothing.

    Example:
        >>> x = torch.ones(1, 2, 4, 4, requires_grad=True)
        >>> shape_only(x, "avg_pool2d", ((2, 2), (2, 2), (0, 0), False, True, None)).shape
        torch.Size([1, 2, 2, 2])
    """
    y = _shape_only(x.unsqueeze(-2) if flat else x, aten, args)
    return y.squeeze(-2) if flat else y


def _shape_only_forward(ctx: Any, x: Tensor, aten: str, args: tuple[Any, ...]) -> Tensor:
    ctx.aten, ctx.args, ctx.shape, ctx.format = aten, args, x.shape, memory_format_of(x)
    return getattr(torch.ops.aten, aten)(x, *args)


def _shape_only_backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
    into = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=ctx.format)
    backward = getattr(torch.ops.aten, f"{ctx.aten}_backward")
    if "adaptive" in ctx.aten:  # without its size, and with an out argument of another name
        return (backward.out(grad, into, out=into),)
    # Torch reads nothing but the input's shape and strides: `into` has them.
    return (backward.grad_input(grad, into, *ctx.args, grad_input=into),)


_shape_only = autograd_function(_shape_only_forward, _shape_only_backward)


def recognise(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """Average pools, reflecting and replicating pads, interpolation by area; None otherwise."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, Tensor) or x.numel() == 0:
        return None
    if name == "pad":
        return _pad(x, dict(zip(("input", "pad", "mode"), args, strict=False)) | dict(kwargs))
    if name == "interpolate":
        return _area(x, args, kwargs)
    n = int(name[-2])
    if x.dim() not in (n + 1, n + 2):
        return None
    if name.startswith("adaptive"):
        outputs = per_dimension(args[1] if len(args) > 1 else kwargs["output_size"], n)
        return _adaptive(name, x, outputs)
    return _average(name, x, dict(zip(_POOL, args, strict=False)) | dict(kwargs))


def _average(op: str, x: Tensor, values: dict[str, Any]) -> Call:
    n = int(op[-2])
    kernel = per_dimension(values["kernel_size"], n)
    strides = strides_of(values.get("stride"), kernel)
    sizes = [kernel, strides, per_dimension(values.get("padding", 0), n)]
    if n == 1:
        sizes = [(fill, *size) for fill, size in zip((1, 1, 0), sizes, strict=True)]
    options = (values.get("ceil_mode", False), values.get("count_include_pad", True))
    arguments = (*sizes, *options, values.get("divisor_override"))
    return _call(op, x, f"avg_pool{max(n, 2)}d", arguments, flat=n == 1)


def _adaptive(op: str, x: Tensor, outputs: tuple[int | None, ...]) -> Call | None:
    n = len(outputs)
    sizes = x.shape[x.dim() - n :]
    outputs = tuple(s if o is None else o for o, s in zip(outputs, sizes, strict=True))
    if all(size == 1 for size in outputs):
        return None  # torch takes a mean, which keeps nothing
    outputs = (1, *outputs) if n == 1 else outputs
    return _call(op, x, f"_adaptive_avg_pool{max(n, 2)}d", (outputs,), flat=n == 1)


def _pad(x: Tensor, values: dict[str, Any]) -> Call | None:
    kind, pad = _PADS.get(values.get("mode", "constant")), tuple(values.get("pad", ()))
    n = len(pad) // 2
    if kind is None or n not in (1, 2, 3) or x.dim() not in (n + 1, n + 2):
        return None
    return _call("pad", x, f"{kind}{n}d", (pad,))


def _area(x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    size = args[1] if len(args) > 1 else kwargs.get("size")
    n = x.dim() - 2
    if kwargs.get("mode") != "area" or size is None or n not in (1, 2, 3):
        return None
    if any(kwargs.get(other) for other in ("scale_factor", "antialias")) or (
        kwargs.get("align_corners") is not None
    ):
        return None  # torch says what is wrong
    return _adaptive("interpolate", x, per_dimension(size, n))
