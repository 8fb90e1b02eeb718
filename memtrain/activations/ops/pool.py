"""Max-pooling that saves the position of each maximum within its window, at 1 to 8 bits.

Torch saves the input and 8 bytes of index per output. Here the backward computes torch's indices
from the positions: ties and NaN go where torch sends them. Values and gradients are torch's own. A
position takes ceil(log2(elements of a window)) bits.

Reference:
    Chen et al., ActNN, ICML 2021, arXiv:2104.14129: the index inside the window.
"""

from collections.abc import Mapping, Sequence
from math import prod
from operator import index
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from memtrain.activations.ops.autograd import autograd_function
from memtrain.activations.ops.call import Call, is_lossy
from memtrain.activations.saved.flatten import flatten, memory_format_of, restore
from memtrain.compressors import Compressor, Key
from memtrain.kernels.packing.pack import pack_codes, unpack_codes

NAMES = tuple(f"max_pool{n}d{suffix}" for n in (1, 2, 3) for suffix in ("", "_with_indices"))
MAX_WINDOW = 256  # elements that an 8-bit code can index
_NAMED = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")


def recognise(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """`F.max_pool1d` to `3d`, with or without indices; None for windows above 256 elements."""
    base = name.removesuffix("_with_indices")
    values = dict(zip(_NAMED, args, strict=False)) | dict(kwargs)
    x, n = values.get("input"), int(base[-2])
    if not isinstance(x, Tensor) or x.dim() not in (n + 1, n + 2) or x.numel() == 0:
        return None
    kernel = _per_dimension(values["kernel_size"], n)
    stride = values.get("stride")
    if stride is None or (isinstance(stride, list | tuple) and not stride):
        stride = kernel
    sizes = [kernel, _per_dimension(stride, n)]
    sizes += [_per_dimension(values.get(k, d), n) for k, d in (("padding", 0), ("dilation", 1))]
    if prod(kernel) > MAX_WINDOW or any(len(size) != n for size in sizes):
        return None
    flat = n == 1  # one spatial dimension is run as two, as torch does
    if flat:
        sizes = [(fill, *size) for fill, size in zip((1, 1, 0, 1), sizes, strict=True)]
    pool_args: tuple[Any, ...] = (*sizes, bool(values.get("ceil_mode", False)))

    def run(compressor: Compressor, key: Key) -> Tensor | tuple[Tensor, Tensor]:
        y, indices = _max_pool(x.unsqueeze(-2) if flat else x, pool_args)
        if flat:
            y, indices = y.squeeze(-2), indices.squeeze(-2)
        return (y, indices) if base != name or values.get("return_indices") else y

    # The positions are packed without loss, whatever the compressor.
    return Call(base, x, run, is_lossy, "saved")


def _max_pool_forward(ctx: Any, x: Tensor, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    n = len(args[0])
    y, indices = getattr(torch.ops.aten, f"max_pool{n}d_with_indices")(x, *args)
    ctx.mark_non_differentiable(indices)
    ctx.args, ctx.shape, ctx.format = args, x.shape, memory_format_of(x)
    ctx.bits = max(1, (prod(args[0]) - 1).bit_length())
    starts, offsets = _windows(args, x.shape[-n:], indices)
    inside, ctx.layout = flatten(indices - starts)
    codes = torch.searchsorted(offsets, inside, out_int32=True).to(torch.uint8)
    ctx.save_for_backward(pack_codes(codes, ctx.bits))
    return y, indices


def _max_pool_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor]:
    (packed,), n = ctx.saved_tensors, len(ctx.args[0])
    codes = unpack_codes(packed, ctx.bits, grad.numel())
    starts, offsets = _windows(ctx.args, ctx.shape[-n:], grad)
    indices = restore(offsets.index_select(0, codes.int()), ctx.layout).add_(starts)
    into = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=ctx.format)
    backward = getattr(torch.ops.aten, f"max_pool{n}d_with_indices_backward")
    # Torch reads nothing but the input's shape and strides: `into` has them.
    return (backward.grad_input(grad, into, *ctx.args, indices, grad_input=into),)


_max_pool = autograd_function(_max_pool_forward, _max_pool_backward)


def _per_dimension(value: Any, n: int) -> tuple[int, ...]:
    """One number, also NumPy's or a tensor's, or a sequence of one, for each of `n` dimensions."""
    if isinstance(value, SupportsIndex):
        return (index(value),) * n
    return tuple(value) * (n if len(value) == 1 else 1)


def _windows(args: tuple[Any, ...], sizes: Sequence[int], y: Tensor) -> tuple[Tensor, Tensor]:
    """Where the window of each output of `y` starts, and the distances of its elements, ascending.

    Both are numbers of elements in a plane with these `sizes`. A start in the padding may be below
    0, and where a window is wider than the plane, equal distances have one code.
    """
    kernel, stride, padding, dilation, _ = args
    starts: Any = 0
    offsets = torch.zeros(1, dtype=torch.int64, device=y.device)
    for d, count in enumerate(kernel):
        step = prod(sizes[d + 1 :])
        first = torch.arange(y.shape[d - len(kernel)], device=y.device) * stride[d] - padding[d]
        starts = starts + (first * step).view(-1, *[1] * (len(kernel) - 1 - d))
        inside = torch.arange(count, device=y.device) * (dilation[d] * step)
        offsets = (offsets[:, None] + inside).view(-1)
    return starts, offsets.sort().values
