"""Cross-entropy whose backward turns what it saved into the gradient, in place.

Plain PyTorch's backward holds the log-softmax, its gradient and the input's at once: three times
the logits, which for a small model with many tokens is the peak of the step. Here the decompressed
log-softmax becomes the gradient piece by piece, and nothing else of its size exists.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from memtrain.activations.once import once_differentiable
from memtrain.activations.ops.norm import as_autocast
from memtrain.activations.ops.norm_calls import HOOKED
from memtrain.activations.ops.payload import keep, kept
from memtrain.compressors import Compressor, Key

REDUCTIONS = ("mean", "sum", "none")
_NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
_PIECE = 2**22  # elements that the backward works on at once


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
        Kept for backward: the payload of x's elements, and `target` in 1 to 4 bytes a class. The
        backward allocates the gradient, a piece of at most 16 MiB, and numbers of `target`'s shape.

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
        ctx.options, ctx.dim = options, min(x.dim() - 1, 1)
        saved = torch.log_softmax(x, ctx.dim)
        loss = functional.nll_loss(
            saved,
            target,
            weight,
            ignore_index=options.ignore_index,
            reduction=options.reduction,
        )
        if options.label_smoothing:
            loss = _smooth(loss, saved, target, options, ctx.dim)
        place = _narrow(
            target.masked_fill(target == options.ignore_index, -1), saved.shape[ctx.dim]
        )
        keep(ctx, saved, compressor, key, place, weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, (place, weight) = kept(ctx)
        scale, place = _scale(grads[0], place.long(), weight, ctx.options.reduction)
        scale, place = scale.unsqueeze(ctx.dim), place.unsqueeze(ctx.dim)
        smoothing = ctx.options.label_smoothing
        each = smoothing / dx.shape[ctx.dim]
        rows = max(1, _PIECE // max(1, dx[:1].numel())) if ctx.dim else dx.shape[0]
        for part, s, p in zip(*(t.split(rows) for t in (dx, scale, place)), strict=True):
            # Halves are rounded once, when all is done; for wider ones `wide` is `part` itself.
            wide = part if part.dtype == torch.float64 else part.float()
            wide.exp_().mul_(s.to(wide.dtype))
            if smoothing:
                wide.sub_(s * each)
            wide.scatter_add_(ctx.dim, p, (s * (smoothing - 1)).to(wide.dtype))
            if wide is not part:
                part.copy_(wide)
        return dx, None, None, None, None, None


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
