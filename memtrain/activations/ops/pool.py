"""Max-pooling that saves an argmax index within each window, at 1 to 8 bits."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memtrain.activations.ops.autograd import autograd_function
from memtrain.activations.ops.call import Call, is_lossy
from memtrain.activations.ops.spatial import memory_format_of, per_dimension, strides_of
from memtrain.activations.saved.flatten import flatten, restore
from memtrain.compressors import Compressor, Key
from memtrain.kernels.packing.pack import pack_codes, unpack_codes

NAMES = tuple(
    f"{kind}max_pool{n}d{suffix}"
    for kind in ("", "adaptive_")
    for n in (1, 2, 3)
    for suffix in ("", "_with_indices")
)
MAX_WINDOW = 256  # elements that a code of 8 bits tells apart
_FIXED = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_ADAPTIVE = ("input", "output_size", "return_indices")


class Starts(NamedTuple):
    """Where the windows of one spatial dimension start: `i * times // over - less`, i from 0."""

    count: int
    times: int
    over: int = 1
    less: int = 0

    def on(self, device: torch.device) -> Tensor:
        """int64, [count]: made on the device, so that no call copies and no graph holds a copy."""
        return torch.arange(self.count, device=device) * self.times // self.over - self.less


Axis = tuple[Starts, int, int]
"""The windows of one spatial dimension: where each starts in the input (below 0 where it starts in
the padding), the step between its elements, and how many elements the widest has."""


def recognise(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """`F.max_pool1d` to `3d` and `F.adaptive_max_pool1d` to `3d`, with or without indices.

    Windows of more than 256 elements are left alone: a code has 8 bits. So are `torch`'s own
    adaptive functions, which always return indices.
    """
    base = name.removesuffix("_with_indices")
    adaptive = base.startswith("adaptive")
    if adaptive and "return_indices" not in kwargs:
        return None
    values = dict(zip(_ADAPTIVE if adaptive else _FIXED, args, strict=False)) | dict(kwargs)
    x = values.get("input")
    n = int(base[-2])
    if not isinstance(x, Tensor) or x.dim() not in (n + 1, n + 2) or x.numel() == 0:
        return None
    sizes = x.shape[x.dim() - n :]
    flat = n == 1  # one spatial dimension is run as two, as torch does
    aten, pool_args = _adaptive(values, sizes) if adaptive else _fixed(values, n)
    if _area(aten, pool_args, (1, *sizes) if flat else sizes) > MAX_WINDOW:
        return None

    def run(compressor: Compressor, key: Key) -> Tensor | tuple[Tensor, Tensor]:
        y, indices = max_pool(x.unsqueeze(-2) if flat else x, aten, pool_args)
        if flat:
            y, indices = y.squeeze(-2), indices.squeeze(-2)
        return (y, indices) if base != name or values.get("return_indices") else y

    # The indices are packed without loss, whatever the compressor.
    return Call(base, x, run, is_lossy, "saved")


def max_pool(x: Tensor, aten: str, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Max-pooling over two or three spatial dimensions; value and gradient are torch's own.

    Torch saves the input and 8 bytes of index per output; this saves the argmax index within each
    window, from which the backward pass rebuilds torch's: ties and NaN go where torch sends them.

    Args:
        x: Float, [N, C, H, W], [N, C, D, H, W] or without N.
        aten: `max_pool2d_with_indices`, `adaptive_max_pool2d`, or these in 3d.
        args: Its other arguments: kernel, stride, padding and dilation, one number per spatial
            dimension each, and ceil_mode; or the output's size. Windows have up to 256 elements.

    Returns:
        The maxima, and torch's int64 indices of their shape.

    Raises:
        ValueError: If a window has more than 256 elements.

    Memory:
        Kept for backward: ceil(log2(elements of a window)) / 8 bytes per output.

    Example:
        >>> x = torch.tensor([[[1.0, 3.0], [2.0, 0.0]]], requires_grad=True)
        >>> args = ((2, 2), (2, 2), (0, 0), (1, 1), False)
        >>> max_pool(x, "max_pool2d_with_indices", args)[0].sum().backward()
        >>> x.grad
        tensor([[[0., 1.],
                 [0., 0.]]])

    Reference:
        Chen et al., ActNN, ICML 2021, arXiv:2104.14129: the index inside the window.
    """
    area = _area(aten, args, x.shape[-len(args[0]) :])
    if area > MAX_WINDOW:
        raise ValueError(f"a window has {area} elements; allowed: up to {MAX_WINDOW}")
    if not (torch.is_grad_enabled() and x.requires_grad):
        return getattr(torch.ops.aten, aten)(x, *args)
    return _max_pool(x, aten, args)


def _max_pool_forward(
    ctx: Any, x: Tensor, aten: str, args: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    y, indices = getattr(torch.ops.aten, aten)(x, *args)
    ctx.mark_non_differentiable(indices)
    n = len(args[0])
    ctx.aten, ctx.args, ctx.shape, ctx.format = aten, args, x.shape, memory_format_of(x)
    ctx.axes = _axes(aten, args, x.shape[-n:], y.shape[-n:])
    ctx.bits = _bits(ctx.axes)
    codes, ctx.layout = flatten(_within_windows(indices, ctx.axes, x.shape[-n:]))
    ctx.save_for_backward(pack_codes(codes, ctx.bits))
    return y, indices


def _max_pool_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor]:
    (packed,) = ctx.saved_tensors
    codes = unpack_codes(packed, ctx.bits, grad.numel())
    offsets, starts = _within_planes(ctx.axes, ctx.shape[-len(ctx.axes) :], grad.device)
    indices = restore(offsets.index_select(0, codes.int()), ctx.layout).add_(starts)
    into = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=ctx.format)
    args = () if _is_adaptive(ctx.aten) else ctx.args
    backward = getattr(torch.ops.aten, f"{ctx.aten}_backward")
    # Torch reads nothing but the input's shape and strides: `into` has them.
    return (backward.grad_input(grad, into, *args, indices, grad_input=into),)


_max_pool = autograd_function(_max_pool_forward, _max_pool_backward)


def _is_adaptive(aten: str) -> bool:
    return aten.startswith("adaptive")


def _axes(
    aten: str, args: tuple[Any, ...], sizes: Sequence[int], outputs: Sequence[int]
) -> list[Axis]:
    """The windows of a pool with that many outputs per spatial dimension."""
    if _is_adaptive(aten):
        return [_even(size, n) for size, n in zip(sizes, outputs, strict=True)]
    kernel, stride, padding, dilation, _ = args
    return [
        (Starts(n, stride[d], less=padding[d]), dilation[d], kernel[d])
        for d, n in enumerate(outputs)
    ]


def _even(size: int, n: int) -> Axis:
    """As many windows as outputs are asked for, as even as they can be."""
    count = max((-((i + 1) * size // -n) - i * size // n for i in range(n)), default=1)
    return Starts(n, size, over=max(n, 1)), 1, count


def _area(aten: str, args: tuple[Any, ...], sizes: Sequence[int]) -> int:
    """Elements of the widest window."""
    if not _is_adaptive(aten):
        return prod(args[0])
    return prod(_even(size, n)[2] for size, n in zip(sizes, args[0], strict=True))


def _bits(axes: Sequence[Axis]) -> int:
    return max(1, (prod(count for _, _, count in axes) - 1).bit_length())


def _within_windows(indices: Tensor, axes: Sequence[Axis], sizes: Sequence[int]) -> Tensor:
    """The argmax index within its window of each index of a plane, uint8."""
    rest = indices.int() if prod(sizes) < 2**31 else indices
    codes, weight = torch.zeros_like(indices, dtype=torch.uint8), 1
    for d in reversed(range(len(axes))):
        starts, step, count = axes[d]
        above = rest // sizes[d] if d else rest
        at = rest - above * sizes[d] if d else rest
        at = at - _along(starts, d, len(axes), at)
        codes += ((at // step if step > 1 else at) * weight).to(torch.uint8)
        rest, weight = above, weight * count
    return codes


def _within_planes(
    axes: Sequence[Axis], sizes: Sequence[int], device: torch.device
) -> tuple[Tensor, Any]:
    """The distance from its window's start for each index within a window, and the starts."""
    offsets, first = torch.zeros(1, dtype=torch.int64, device=device), 0
    for d, (starts, step, count) in enumerate(axes):
        stride = prod(sizes[d + 1 :])
        inside = torch.arange(count, device=device) * (step * stride)
        offsets = (offsets[:, None] + inside).view(-1)
        first = first + _along(starts, d, len(axes), offsets) * stride
    return offsets, first


def _along(starts: Starts, d: int, n: int, like: Tensor) -> Tensor:
    """One number per output along spatial dimension `d` of `n`, in the dtype of `like`."""
    flat = starts.on(like.device).to(like.dtype)
    return flat.view(-1, *[1] * (n - 1 - d))


def _fixed(values: Mapping[str, Any], n: int) -> tuple[str, tuple[Any, ...]]:
    kernel = per_dimension(values["kernel_size"], n)
    sizes = [kernel, strides_of(values.get("stride"), kernel)]
    sizes += [per_dimension(values.get(k, d), n) for k, d in (("padding", 0), ("dilation", 1))]
    if n == 1:
        sizes = [(fill, *size) for fill, size in zip((1, 1, 0, 1), sizes, strict=True)]
    return f"max_pool{max(n, 2)}d_with_indices", (*sizes, bool(values.get("ceil_mode", False)))


def _adaptive(values: Mapping[str, Any], sizes: Sequence[int]) -> tuple[str, tuple[Any, ...]]:
    n = len(sizes)
    asked = per_dimension(values["output_size"], n)
    outputs = tuple(s if o is None else o for o, s in zip(asked, sizes, strict=True))
    return f"adaptive_max_pool{max(n, 2)}d", ((1, *outputs) if n == 1 else outputs,)
