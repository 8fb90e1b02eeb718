"""Convolution whose backward decompresses its input a few samples at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain.activations.ops.autograd import autograd_function
from memtrain.activations.ops.call import Call, gives_floats
from memtrain.activations.ops.spatial import per_dimension
from memtrain.activations.saved.function_payloads import (
    compress,
    decompress,
    save_payloads,
    saved_payloads,
)
from memtrain.compressors import Compressor, Key

NAMES = (*(f"conv{n}d" for n in (1, 2, 3)), *(f"conv_transpose{n}d" for n in (1, 2, 3)))
_FORWARD = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = (*_FORWARD[:5], "output_padding", "groups", "dilation")


def recognise(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], backward_bytes: int | None = None
) -> Call | None:
    """A batched convolution of which backward decompresses so many bytes at once, or one sample.

    None without `backward_bytes` (hooks decompress the whole batch), or where `padding="same"` is
    uneven.
    """
    if backward_bytes is None:
        return None
    if backward_bytes < 1:
        raise ValueError(f"backward_bytes={backward_bytes}; allowed: 1 byte or more, or None")
    transposed, n = "transpose" in name, int(name[-2])
    values = dict(zip(_TRANSPOSED if transposed else _FORWARD, args, strict=False)) | dict(kwargs)
    x, weight = values.get("input"), values.get("weight")
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return None
    if x.dim() != n + 2 or x.numel() == 0:
        return None
    dilation = per_dimension(values.get("dilation", 1), n)
    padding = _padding(values.get("padding", 0), weight.shape[2:], dilation)
    if padding is None:
        return None
    stride = per_dimension(values.get("stride", 1), n)
    output_padding = per_dimension(values.get("output_padding", 0), n)
    groups = values.get("groups", 1)
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    per_sample = x.numel() // len(x) * x.element_size()
    samples = min(max(1, backward_bytes // per_sample), len(x))

    def run(compressor: Compressor, key: Key) -> Tensor:
        return convolution(
            x,
            weight,
            values.get("bias"),
            geometry,
            samples=samples,
            compressor=compressor,
            key=key,
        )

    # Hooks serve where the batch is decompressed whole.
    return Call(name, x, run, lambda c: gives_floats(c) and samples < len(x))


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: tuple[Any, ...],
    *,
    samples: int,
    compressor: Compressor,
    key: Key = Key(),  # noqa: B008 (a frozen value)
) -> Tensor:
    """`torch.convolution`, saving `x` in micro-batches that backward decompresses one by one.

    The value is torch's own; the weight's gradient is added up in float32 over the micro-batches.

    Args:
        x: Float, [N, C, ...].
        weight: As torch's.
        bias: As torch's, or None.
        geometry: torch.convolution's other arguments, in its order: stride, padding, dilation,
            transposed, output padding and groups.
        samples: Of a micro-batch.
        compressor: For `x`; each micro-batch has a payload of its own.
        key: Feeds the compressor's random bits, another for each micro-batch.

    Returns:
        As torch's.

    Memory:
        Kept for backward: the payloads of x. In backward besides: one decompressed micro-batch,
        and one float32 copy of the weight's gradient.

    Reference:
        Chen et al., ActNN, ICML 2021, arXiv:2104.14129: the pipeline of its level L3.1.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        if x.dtype != torch.float64:  # which autocast leaves alone
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
    return _convolution(x, weight, bias, geometry, samples, compressor, key)


def _convolution_forward(  # noqa: PLR0913 (the op's own, and the site's)
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: tuple[Any, ...],
    samples: int,
    compressor: Compressor,
    key: Key,
) -> Tensor:
    ctx.geometry, ctx.samples, ctx.shape = geometry, samples, x.shape
    ctx.bias_sizes = None if bias is None else list(bias.shape)
    # A site's number has 32 bits: the index above them makes another seed.
    payloads = [
        compress(part, compressor, key._replace(site=key.site + (index << 32)))
        for index, part in enumerate(x.split(samples))
    ]
    save_payloads(ctx, payloads, compressor, weight)
    return torch.convolution(x, weight, bias, *geometry)


def _convolution_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    payloads, (weight,) = saved_payloads(ctx)
    wanted = list(ctx.needs_input_grad[:3])
    dx = dw = db = None
    for index, payload in enumerate(payloads):
        first = index * ctx.samples
        grad_part, part = grad[first : first + ctx.samples], decompress(payload, ctx.compressor)
        dx_part, dw_part, db_part = torch.ops.aten.convolution_backward(
            grad_part, part, weight, ctx.bias_sizes, *ctx.geometry, wanted
        )
        if dx_part is not None:
            dx = _joined(dx, dx_part, first, ctx.shape[0])
        dw, db = _added(dw, dw_part), _added(db, db_part)
        del part, dx_part, dw_part, db_part
    return dx, *(None if t is None else t.to(weight.dtype) for t in (dw, db))


_convolution = autograd_function(_convolution_forward, _convolution_backward, tensors=3)


def _joined(whole: Tensor | None, part: Tensor, first: int, n: int) -> Tensor:
    """`part` written into its place among `n` samples."""
    if whole is None:
        whole = part.new_empty((n, *part.shape[1:]))
    whole[first : first + len(part)] = part
    return whole


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """The sum in float32, or wider."""
    if part is None:
        return total
    if total is None:
        return part if part.dtype == torch.float64 else part.float()
    return total.add_(part)


def _padding(
    value: Any, kernel: Sequence[int], dilation: tuple[int, ...]
) -> tuple[int, ...] | None:
    n = len(dilation)
    if value == "valid":
        return (0,) * n
    if value == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return None if any(t % 2 for t in total) else tuple(t // 2 for t in total)
    return per_dimension(value, n)
