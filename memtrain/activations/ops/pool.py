"""Max-pooling that saves its choices at 1 to 8 bits: which element of its window was greatest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from memtrain.activations.ops.context import order_of
from memtrain.activations.ops.once import once_differentiable
from memtrain.activations.ops.spatial import per_dimension, strides_of
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


class Axis(NamedTuple):
    """Where the windows of one spatial dimension lie in the input."""

    starts: list[int]  # below 0 where a window begins in the padding
    step: int
    count: int  # elements of the widest window


@dataclass(frozen=True)
class Window:
    """Windows of one size, `stride` apart; each field has one number per spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool = False

    def area(self, sizes: Sequence[int]) -> int:
        """Elements of a window."""
        return prod(self.kernel)

    def axes(self, sizes: Sequence[int], outputs: Sequence[int]) -> list[Axis]:
        """The windows per spatial dimension, for that many outputs."""
        return [
            Axis([i * self.stride[d] - self.padding[d] for i in range(n)], self.dilation[d], k)
            for d, (n, k) in enumerate(zip(outputs, self.kernel, strict=True))
        ]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The maxima, and torch's flat index of each in its plane."""
        pool = _aten(f"max_pool{len(self.kernel)}d_with_indices")
        return pool(x, self.kernel, self.stride, self.padding, self.dilation, self.ceil_mode)

    def backward(self, grad: Tensor, indices: Tensor, into: Tensor) -> None:
        """Add up `grad` at `indices`, into a tensor of the input's shape."""
        pool = _aten(f"max_pool{len(self.kernel)}d_with_indices_backward").grad_input
        sizes = (self.kernel, self.stride, self.padding, self.dilation)
        # Torch reads nothing but the input's shape and strides: `into` has them.
        pool(grad, into, *sizes, self.ceil_mode, indices, grad_input=into)


@dataclass(frozen=True)
class Adaptive:
    """As many windows as outputs are asked for, as even as they can be; None: the input's size."""

    outputs: tuple[int | None, ...]

    def area(self, sizes: Sequence[int]) -> int:
        """Elements of the widest window."""
        outputs = [n or size for n, size in zip(self.outputs, sizes, strict=True)]
        return prod(axis.count for axis in self.axes(sizes, outputs))

    def axes(self, sizes: Sequence[int], outputs: Sequence[int]) -> list[Axis]:
        """The windows per spatial dimension, for that many outputs."""
        axes = []
        for size, n in zip(sizes, outputs, strict=True):
            starts = [i * size // n for i in range(n)]
            ends = [-((i + 1) * size // -n) for i in range(n)]
            count = max((end - start for start, end in zip(starts, ends, strict=True)), default=1)
            axes.append(Axis(starts, 1, count))
        return axes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The maxima, and torch's flat index of each in its plane."""
        sizes = x.shape[-len(self.outputs) :]
        outputs = [size if n is None else n for n, size in zip(self.outputs, sizes, strict=True)]
        return _aten(f"adaptive_max_pool{len(outputs)}d")(x, outputs)

    def backward(self, grad: Tensor, indices: Tensor, into: Tensor) -> None:
        """Add up `grad` at `indices`, into a tensor of the input's shape."""
        pool = _aten(f"adaptive_max_pool{len(self.outputs)}d_backward").grad_input
        pool(grad, into, indices, grad_input=into)


@dataclass(frozen=True, eq=False)
class MaxPool:
    """A call of max-pooling; `flat`: one spatial dimension, run as two, as torch does."""

    op: str
    x: Tensor
    window: Window | Adaptive
    flat: bool
    return_indices: bool
    tensor: str = "saved"

    def accepts(self, compressor: Compressor) -> bool:
        """Any but the identity: the choices are packed without loss."""
        return not compressor.is_identity

    def run(self, compressor: Compressor, key: Key) -> Tensor | tuple[Tensor, Tensor]:
        """The maxima, with torch's indices where they are asked for."""
        x = self.x.unsqueeze(-2) if self.flat else self.x
        y, indices = _pool(x, self.window)
        if self.flat:
            y, indices = y.squeeze(-2), indices.squeeze(-2)
        return (y, indices) if self.return_indices else y


def recognise(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MaxPool | None:
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
    window = _adaptive(values, n) if adaptive else _fixed(values, n)
    sizes = x.shape[x.dim() - n :]
    area = window.area((1, *sizes) if n == 1 else sizes)
    if area > MAX_WINDOW:
        return None
    return MaxPool(base, x, window, n == 1, base != name or bool(values.get("return_indices")))


def max_pool(
    x: Tensor, window: Window | Adaptive, *, return_indices: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Max-pooling over two or three spatial dimensions; value and gradient are torch's own.

    Torch saves the input and 8 bytes of index per output; this saves which element of its window
    was taken, from which the backward pass rebuilds the index: ties and NaN go where torch sends
    them.

    Args:
        x: Float, [N, C, H, W], [N, C, D, H, W] or without N.
        window: The windows, of at most 256 elements.
        return_indices: Whether to return torch's indices, too.

    Returns:
        The maxima; with `return_indices` also int64 indices of their shape.

    Raises:
        ValueError: If a window has more than 256 elements.

    Memory:
        Kept for backward: ceil(log2(elements of a window)) / 8 bytes per output.

    Example:
        >>> x = torch.tensor([[[1.0, 3.0], [2.0, 0.0]]], requires_grad=True)
        >>> max_pool(x, Window((2, 2), (2, 2), (0, 0), (1, 1))).sum().backward()
        >>> x.grad
        tensor([[[0., 1.],
                 [0., 0.]]])

    Reference:
        Chen et al., ActNN, ICML 2021, arXiv:2104.14129: the index inside the window.
    """
    area = window.area(x.shape[-_spatial(window) :])
    if area > MAX_WINDOW:
        raise ValueError(f"a window has {area} elements; allowed: up to {MAX_WINDOW}")
    y, indices = _pool(x, window)
    return (y, indices) if return_indices else y


def _pool(x: Tensor, window: Window | Adaptive) -> tuple[Tensor, Tensor]:
    if not (torch.is_grad_enabled() and x.requires_grad):
        return window.forward(x)
    return _MaxPool.apply(x, window)  # type: ignore[return-value]


class _MaxPool(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window | Adaptive) -> tuple[Tensor, Tensor]:
        y, indices = window.forward(x)
        ctx.mark_non_differentiable(indices)
        n = _spatial(window)
        ctx.window, ctx.shape, ctx.format = window, x.shape, order_of(x)
        ctx.axes = window.axes(x.shape[-n:], y.shape[-n:])
        ctx.bits = _bits(ctx.axes)
        codes, ctx.layout = flatten(_choices(indices, ctx.axes, x.shape[-n:]))
        ctx.save_for_backward(pack_codes(codes, ctx.bits))
        return y, indices

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (packed,), grad = ctx.saved_tensors, grads[0]
        codes = unpack_codes(packed, ctx.bits, grad.numel())
        sizes = ctx.shape[-len(ctx.axes) :]
        table, bases = _places(ctx.axes, sizes, grad.device)
        indices = restore(table.index_select(0, codes.int()), ctx.layout).add_(bases)
        into = torch.empty(
            ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=ctx.format
        )
        ctx.window.backward(grad, indices, into)
        return into, None


def _spatial(window: Window | Adaptive) -> int:
    return len(window.outputs if isinstance(window, Adaptive) else window.kernel)


def _bits(axes: Sequence[Axis]) -> int:
    return max(1, (prod(axis.count for axis in axes) - 1).bit_length())


def _choices(indices: Tensor, axes: Sequence[Axis], sizes: Sequence[int]) -> Tensor:
    """The place inside its window of each index of a plane, uint8."""
    rest = indices.int() if prod(sizes) < 2**31 else indices
    codes, weight = torch.zeros_like(indices, dtype=torch.uint8), 1
    for d in reversed(range(len(axes))):
        above = rest // sizes[d] if d else rest
        at = rest - above * sizes[d] if d else rest
        at = at - _along(axes[d].starts, d, len(axes), at)
        codes += ((at // axes[d].step if axes[d].step > 1 else at) * weight).to(torch.uint8)
        rest, weight = above, weight * axes[d].count
    return codes


def _places(axes: Sequence[Axis], sizes: Sequence[int], device: torch.device) -> tuple[Tensor, Any]:
    """For a place inside its window the distance from the window's start, and the starts."""
    table, bases = torch.zeros(1, dtype=torch.int64, device=device), 0
    for d, axis in enumerate(axes):
        stride = prod(sizes[d + 1 :])
        inside = torch.arange(axis.count, device=device) * (axis.step * stride)
        table = (table[:, None] + inside).view(-1)
        bases = bases + _along(axis.starts, d, len(axes), table) * stride
    return table, bases


def _along(values: list[int], d: int, n: int, like: Tensor) -> Tensor:
    """One number per output along spatial dimension `d` of `n`, in the dtype of `like`."""
    flat = torch.tensor(values, dtype=like.dtype, device=like.device)
    return flat.view(-1, *[1] * (n - 1 - d))


def _fixed(values: Mapping[str, Any], n: int) -> Window:
    kernel = per_dimension(values["kernel_size"], n)
    strides = strides_of(values.get("stride"), kernel)
    ceil = bool(values.get("ceil_mode", False))
    padding, dilation = (
        per_dimension(values.get(k, d), n) for k, d in (("padding", 0), ("dilation", 1))
    )
    if n == 1:
        return Window((1, *kernel), (1, *strides), (0, *padding), (1, *dilation), ceil)
    return Window(kernel, strides, padding, dilation, ceil)


def _adaptive(values: Mapping[str, Any], n: int) -> Adaptive:
    outputs = per_dimension(values["output_size"], n)
    return Adaptive((1, *outputs) if n == 1 else outputs)


def _aten(name: str) -> Any:
    return getattr(torch.ops.aten, name)
