"""Cross-entropy that never has a log-softmax of the logits' size, nor its gradient.

Plain PyTorch's forward makes the log-softmax beside the logits; its backward holds the log-softmax,
its gradient and the input's at once: three times the logits, which for a small model with many
tokens is the peak of the step. Here rows are worked on in pieces: each piece of the log-softmax is
compressed before the next is made, and becomes its piece of the gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from memtrain.activations.ops.call import HOOKED, as_autocast
from memtrain.activations.ops.context import compressed
from memtrain.activations.ops.once import once_differentiable
from memtrain.activations.saved.flatten import Layout
from memtrain.activations.saved.handles import Shared
from memtrain.compressors import Compressor, Key, Packed

REDUCTIONS = ("mean", "sum", "none")
_NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
_PIECE = 2**22  # elements that are worked on at once


@dataclass(frozen=True)
class Options:
    """The arguments of `F.cross_entropy` that are no tensors."""

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0


@dataclass(frozen=True, eq=False)
class CrossEntropy:
    """A call of cross-entropy with class indices."""

    x: Tensor
    target: Tensor
    weight: Tensor | None
    options: Options
    op: str = "cross_entropy"
    tensor: str = "saved"

    def accepts(self, compressor: Compressor) -> bool:
        """Any that gives back floats of its own, but the identity: plain torch is its twin."""
        return not isinstance(compressor, HOOKED)

    def run(self, compressor: Compressor, key: Key) -> Tensor:
        """The value, with the payload of the log-softmax kept."""
        return cross_entropy(
            self.x, self.target, self.weight, self.options, compressor=compressor, key=key
        )


def recognise(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CrossEntropy | None:
    """`F.cross_entropy` of class indices; None for class probabilities and deprecated arguments."""
    values = dict(zip((*_NAMES, "label_smoothing"), args, strict=False)) | dict(kwargs)
    x, target, weight = (values.pop(key, None) for key in ("input", "target", "weight"))
    old = (values.pop("size_average", None), values.pop("reduce", None))
    if not isinstance(x, Tensor) or not isinstance(target, Tensor) or old != (None, None):
        return None
    options = Options(**values)
    dim = min(x.dim() - 1, 1)
    spread = x.numel() and target.shape == x.shape[:dim] + x.shape[dim + 1 :]
    if not spread or target.is_floating_point() or options.reduction not in REDUCTIONS:
        return None
    if weight is not None and (weight.requires_grad or options.label_smoothing):
        return None
    return CrossEntropy(x, target, weight, options)


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    options: Options = Options(),
    *,
    compressor: Compressor,
    key: Key = Key(),  # noqa: B008 (a frozen value)
) -> Tensor:
    """`F.cross_entropy` of class indices, saving a compressed log-softmax; the value is torch's.

    Args:
        x: Logits, float, [C], [N, C] or [N, C, ...].
        target: Classes, integers, the shape of `x` without C.
        weight: Of each class, [C], or None; it gets no gradient.
        options: What is ignored, how losses are reduced, and label smoothing (not with `weight`).
        compressor: For the log-softmax. The gradient has an exp() of it: 8 bits.
        key: Feeds the compressor's random bits.

    Returns:
        A scalar, or the shape of `target` without reduction.

    Memory:
        Kept for backward: the payload of x's elements, in pieces of 4 Mi elements, and `target` in
        1 to 4 bytes a class. Forward and backward work in two pieces of 16 MiB (a row at least),
        and numbers of `target`'s shape; the backward allocates the gradient besides. A forward with
        weights, smoothing, one row or more dimensions makes the whole log-softmax first.

    Example:
        >>> from memtrain.compressors import Group
        >>> x = torch.randn(8, 256, requires_grad=True)
        >>> cross_entropy(x, torch.arange(8), compressor=Group(bits=8)).shape
        torch.Size([])
    """
    none = target.new_empty(0, dtype=torch.long)
    (x,) = as_autocast(lambda t: functional.cross_entropy(t, none, reduction="sum"), (0, 2), x)
    return _CrossEntropy.apply(x, target, weight, options, compressor, key)  # type: ignore[return-value]


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        target: Tensor,
        weight: Tensor | None,
        options: Options,
        compressor: Compressor,
        key: Key,
    ) -> Tensor:
        ctx.options, ctx.dim, ctx.compressor = options, min(x.dim() - 1, 1), compressor
        ctx.shape = x.shape
        place = _narrow(target.masked_fill(target == options.ignore_index, -1), x.shape[ctx.dim])
        if _splits(x, weight, options):
            loss, parts = _by_pieces(x, target, options, compressor, key)
        else:
            saved = torch.log_softmax(x, ctx.dim)
            loss = _loss(saved, target, weight, options, ctx.dim)
            parts = [compressed(saved, compressor, key)]
        payloads = [t for packed, _ in parts for t in packed.tensors.values()]
        ctx.save_for_backward(*payloads, place, weight)
        ctx.parts = [(p._replace(tensors=dict.fromkeys(p.tensors)), layout) for p, layout in parts]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *saved, place, weight = ctx.saved_tensors
        scale, place = _scale(grads[0], place.long(), weight, ctx.options.reduction)
        scale, place = scale.unsqueeze(ctx.dim), place.unsqueeze(ctx.dim)
        dx, row, payloads = None, 0, iter(saved)
        for packed, layout in ctx.parts:
            tensors = {name: next(payloads) for name in packed.tensors}
            part = Shared(packed._replace(tensors=tensors), ctx.compressor, layout).tensor()
            rows = slice(row, row + len(part)) if len(ctx.parts) > 1 else slice(None)
            _to_gradient(part, scale[rows], place[rows], ctx.dim, ctx.options.label_smoothing)
            if len(ctx.parts) == 1:
                dx = part
                break
            dx = part.new_empty(ctx.shape) if dx is None else dx
            dx[rows], row = part, rows.stop
            del part  # before the next is made
        return dx, None, None, None, None, None


Part = tuple[Packed, Layout | None]
"""A payload of a piece of the log-softmax, and how it lies in memory."""


def _splits(x: Tensor, weight: Tensor | None, options: Options) -> bool:
    """Whether rows can be worked on by pieces: torch's own value comes of the rows' losses."""
    usual = weight is None and not options.label_smoothing
    return usual and x.dim() == 2 and x.is_contiguous() and len(x) > _rows(x)


def _rows(x: Tensor) -> int:
    return max(1, _PIECE // x.shape[1])


def _by_pieces(
    x: Tensor, target: Tensor, options: Options, compressor: Compressor, key: Key
) -> tuple[Tensor, list[Part]]:
    """The loss, and what is kept, of logits whose log-softmax is never there as a whole."""
    losses: list[Tensor] = []
    parts: list[Part] = []
    ignored = options.ignore_index
    for logits, classes in zip(x.split(_rows(x)), target.split(_rows(x)), strict=True):
        saved = torch.log_softmax(logits, 1)
        losses.append(functional.nll_loss(saved, classes, ignore_index=ignored, reduction="none"))
        # Random bits of its own, as each process has for its part of a tensor.
        parts.append(compressed(saved, compressor, key._replace(rank=key.rank + len(parts))))
        del saved  # before the next is made
    # A table of one class, whose losses torch adds up in the order that it always does.
    table, classes = -torch.cat(losses).unsqueeze(1), torch.zeros_like(target)
    classes.masked_fill_(target == ignored, -1)
    return functional.nll_loss(table, classes, ignore_index=-1, reduction=options.reduction), parts


def _loss(
    saved: Tensor, target: Tensor, weight: Tensor | None, options: Options, dim: int
) -> Tensor:
    """Torch's value, of the log-softmax."""
    loss = functional.nll_loss(
        saved, target, weight, ignore_index=options.ignore_index, reduction=options.reduction
    )
    return _smooth(loss, saved, target, options, dim) if options.label_smoothing else loss


def _to_gradient(x: Tensor, scale: Tensor, place: Tensor, dim: int, smoothing: float) -> None:
    """Turn a log-softmax into the gradient of the logits, in place, a piece at a time."""
    each = smoothing / x.shape[dim]
    rows = max(1, _PIECE // max(1, x[:1].numel())) if dim else x.shape[0]
    for part, s, p in zip(*(t.split(rows) for t in (x, scale, place)), strict=True):
        # Halves are rounded once, when all is done; for wider ones `wide` is `part` itself.
        wide = part if part.dtype == torch.float64 else part.float()
        wide.exp_().mul_(s.to(wide.dtype))
        if smoothing:
            wide.sub_(s * each)
        wide.scatter_add_(dim, p, (s * (smoothing - 1)).to(wide.dtype))
        if wide is not part:
            part.copy_(wide)


def _smooth(loss: Tensor, saved: Tensor, target: Tensor, options: Options, dim: int) -> Tensor:
    """The loss with label smoothing, in torch's own order of operations."""
    ignored = target == options.ignore_index
    smooth = -saved.sum(dim)
    smooth.masked_fill_(ignored, 0)
    if options.reduction == "mean":
        smooth = smooth.sum() / (ignored.numel() - ignored.sum())
    elif options.reduction == "sum":
        smooth = smooth.sum()
    share = options.label_smoothing
    return (1 - share) * loss + smooth * (share / saved.shape[dim])


def _narrow(place: Tensor, classes: int) -> Tensor:
    """Classes, and -1, in the narrowest type that holds them."""
    types = (torch.int8, torch.int16, torch.int32, torch.int64)
    return place.to(next(t for t in types if classes - 1 <= torch.iinfo(t).max))


def _scale(
    grad: Tensor, place: Tensor, weight: Tensor | None, reduction: str
) -> tuple[Tensor, Tensor]:
    """What the softmax of each row is multiplied with, and the place of its class."""
    ignored, place = place < 0, place.clamp(min=0)
    wide = grad if grad.dtype == torch.float64 else grad.float()
    each = torch.ones_like(place, dtype=wide.dtype) if weight is None else weight.to(wide)[place]
    each = each.masked_fill(ignored, 0)
    if reduction == "mean":
        wide = wide / each.sum()
    return (each * wide).masked_fill(ignored, 0), place
