"""Cross-entropy that never has a log-softmax of the logits' size, nor its gradient.

Plain PyTorch's forward makes the log-softmax beside the logits; its backward holds the log-softmax,
its gradient and the input's at once: three times the logits, which for a small model with many
tokens is the peak of the step. Here rows are worked on in pieces: each piece of the log-softmax is
compressed before the next is made, and becomes its piece of the gradient.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from memtrain.activations.ops.autograd import autograd_function
from memtrain.activations.ops.call import Call, autocast_widens, gives_floats
from memtrain.activations.saved.function_payloads import (
    Payload,
    compress,
    decompress,
    save_payloads,
    saved_payloads,
)
from memtrain.compressors import Compressor, Key
from memtrain.compressors.log_group import cut_
from memtrain.kernels.dispatch import is_for_cuda, is_simulated
from memtrain.kernels.group import softmax_gradient

REDUCTIONS = ("mean", "sum", "none")
_NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
_PIECE = 2**22  # elements that are worked on at once
_PIECE_CUDA = 2**26  # at most, where launches cost; a step predicted for CUDA has them too
_PIECES_CUDA = 8  # of smaller logits, whose pieces would else take as much as all of them


def recognise(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """`F.cross_entropy` of class indices; None for class probabilities and deprecated arguments."""
    values = dict(zip((*_NAMES, "label_smoothing"), args, strict=False)) | dict(kwargs)
    x, target, weight = (values.pop(key, None) for key in ("input", "target", "weight"))
    old = (values.pop("size_average", None), values.pop("reduce", None))
    if not isinstance(x, Tensor) or not isinstance(target, Tensor) or old != (None, None):
        return None
    smoothing, reduction = values.get("label_smoothing", 0.0), values.get("reduction", "mean")
    dim = min(x.dim() - 1, 1)
    classes = x.numel() and target.shape == x.shape[:dim] + x.shape[dim + 1 :]
    if not classes or target.is_floating_point() or reduction not in REDUCTIONS:
        return None
    if weight is not None and (weight.requires_grad or smoothing):
        return None

    def run(compressor: Compressor, key: Key) -> Tensor:
        return cross_entropy(x, target, weight, **values, compressor=compressor, key=key)

    return Call("cross_entropy", x, run, gives_floats, "saved")


def cross_entropy(  # noqa: PLR0913 (torch's own, and the site's)
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    compressor: Compressor,
    key: Key = Key(),  # noqa: B008 (a frozen value)
) -> Tensor:
    """`F.cross_entropy` of class indices, saving a compressed log-softmax; the value is torch's.

    Args:
        x: Logits, float, [C], [N, C] or [N, C, ...].
        target: Classes, integers, the shape of `x` without C.
        weight: Of each class, [C], or None; it gets no gradient.
        ignore_index: The class whose rows count for nothing.
        reduction: One of `REDUCTIONS`.
        label_smoothing: The share of the uniform distribution in the target; not with `weight`.
        compressor: For the log-softmax. The gradient has an exp() of it: 8 bits.
        key: Feeds the compressor's random bits.

    Returns:
        A scalar, or the shape of `target` without reduction.

    Memory:
        Kept for backward: the payload of x's elements, in pieces of 4 Mi elements, and `target` in
        1 to 4 bytes a class. Forward and backward work in two pieces of 16 MiB (a row at least),
        and numbers of `target`'s shape; the backward allocates the gradient besides. On CUDA an
        eighth of the logits is a piece, of up to 64 Mi elements, since launches cost; there the
        backward of min/max groups has none.
        Where autocast asks for float32, pieces are cast, never the whole. A forward with weights,
        smoothing, one row or more dimensions makes the whole log-softmax first.

    Example:
        >>> from memtrain.compressors import Group
        >>> x = torch.randn(8, 256, requires_grad=True)
        >>> cross_entropy(x, torch.arange(8), compressor=Group(bits=8)).shape
        torch.Size([])
    """
    none = target.new_empty(0, dtype=torch.long)
    wide = x.dtype in (torch.float16, torch.bfloat16) and autocast_widens(
        lambda t: functional.cross_entropy(t, none, reduction="sum"), (0, 2), x
    )
    options = (ignore_index, reduction, label_smoothing)
    return _cross_entropy(x, target, weight, options, wide, compressor, key)


Options = tuple[int, str, float]
"""`F.cross_entropy`'s `ignore_index`, `reduction` and `label_smoothing`."""


def _cross_entropy_forward(  # noqa: PLR0913 (torch's own, and the site's)
    ctx: Any,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: Options,
    wide: bool,  # logits are cast to float32, a piece at a time
    compressor: Compressor,
    key: Key,
) -> Tensor:
    ctx.options, ctx.dim, ctx.shape, ctx.dtype = options, min(x.dim() - 1, 1), x.shape, x.dtype
    classes = _narrow(target.masked_fill(target == options[0], -1), x.shape[ctx.dim])
    # Torch's own value comes of the rows' losses: these can be worked on by pieces.
    usual = weight is None and not options[2] and x.dim() == 2 and x.is_contiguous()
    ctx.piece = _piece(x)
    codes = compressor.group_codes(Key())
    ctx.fits = codes is not None and softmax_gradient.fits(x, codes.group_size)
    ctx.rows = max(1, ctx.piece // x.shape[ctx.dim]) if usual else len(x)
    if usual and len(x) > ctx.rows:
        loss, payloads = _by_pieces(x, target, options, ctx.rows, wide, compressor, key)
    else:
        saved = torch.log_softmax(x.float() if wide else x, ctx.dim)
        loss = _loss(saved, target, weight, options, ctx.dim)
        cut_(saved, compressor)
        payloads = [compress(saved, compressor, key)]
    save_payloads(ctx, payloads, compressor, classes, weight)
    return loss


def _cross_entropy_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    payloads, (classes, weight) = saved_payloads(ctx)
    _, reduction, smoothing = ctx.options
    scale, classes = _scale(grad, classes.long(), weight, reduction)
    if _is_one_pass(ctx, payloads, scale):
        dx = scale.new_empty(ctx.shape, dtype=ctx.dtype)
        width = ctx.compressor.bits, ctx.compressor.group_size
        for place in _differing(len(payloads)):
            rows, parts = (
                slice(place * ctx.rows, (place + 1) * ctx.rows),
                payloads[place][0].tensors,
            )
            given = dx[rows], parts["codes"], parts["bounds"], scale[rows], classes[rows]
            softmax_gradient.softmax_gradient(*given, *width, smoothing)
        return dx, None, None
    scale, classes = scale.unsqueeze(ctx.dim), classes.unsqueeze(ctx.dim)
    if len(payloads) == 1:
        part = decompress(payloads[0], ctx.compressor)
        _to_gradient(ctx, part, scale, classes)
        return part.to(ctx.dtype), None, None
    dx = scale.new_empty(ctx.shape, dtype=ctx.dtype)
    for place in _differing(len(payloads)):
        part = decompress(payloads[place], ctx.compressor)
        rows = slice(place * ctx.rows, place * ctx.rows + len(part))
        _to_gradient(ctx, part, scale[rows], classes[rows])
        dx[rows] = part
        del part  # before the next is made
    return dx, None, None


_cross_entropy = autograd_function(_cross_entropy_forward, _cross_entropy_backward, tensors=3)


def _piece(x: Tensor) -> int:
    """Elements that are worked on at once."""
    if not is_for_cuda(x):
        return _PIECE
    return min(max(_PIECE, x.numel() // _PIECES_CUDA), _PIECE_CUDA)


def _is_one_pass(ctx: Any, payloads: Sequence[Payload], scale: Tensor) -> bool:
    """Whether a kernel serves: min/max groups of a matrix in row-major order."""
    layout = payloads[0][1]
    return (
        ctx.fits
        and layout is not None
        and (layout.order, layout.expanded) == ((0, 1), (False, False))
        and ctx.dtype in softmax_gradient.DTYPES
        and scale.dtype == torch.float32
    )


def _differing(count: int) -> Sequence[int]:
    """Pieces that are worked on: without data all are alike but the first and the last two."""
    return [0, *range(max(1, count - 2), count)] if is_simulated() else range(count)


def _by_pieces(
    x: Tensor,
    target: Tensor,
    options: Options,
    rows: int,
    wide: bool,
    compressor: Compressor,
    key: Key,
) -> tuple[Tensor, list[Payload]]:
    """The loss, and what is kept, of logits whose log-softmax is never there as a whole."""
    losses: list[Tensor] = []
    payloads: list[Payload] = []
    ignored, reduction, _ = options
    pieces = [*zip(x.split(rows), target.split(rows), strict=True)]
    differing = {*_differing(len(pieces))}
    for place, (logits, classes) in enumerate(pieces):
        if place not in differing:
            losses.append(torch.empty_like(losses[0]))
            payloads.append(_empty_like(payloads[0]))
            continue
        saved = torch.log_softmax(logits.float() if wide else logits, 1)
        losses.append(functional.nll_loss(saved, classes, ignore_index=ignored, reduction="none"))
        cut_(saved, compressor)
        # Random bits of its own, as each process has for its part of a tensor.
        payloads.append(compress(saved, compressor, key._replace(rank=key.rank + len(payloads))))
        del saved  # before the next is made
    # A matrix of one class, whose losses torch adds up in the order that it always does.
    column, classes = -torch.cat(losses).unsqueeze(1), torch.zeros_like(target)
    classes.masked_fill_(target == ignored, -1)
    return functional.nll_loss(column, classes, ignore_index=-1, reduction=reduction), payloads


def _empty_like(payload: Payload) -> Payload:
    packed, layout = payload
    tensors = {name: torch.empty_like(x) for name, x in packed.tensors.items()}
    return packed._replace(tensors=tensors), layout


def _loss(
    saved: Tensor, target: Tensor, weight: Tensor | None, options: Options, dim: int
) -> Tensor:
    """Torch's value, of the log-softmax, in torch's own order of operations."""
    ignored, reduction, smoothing = options
    loss = functional.nll_loss(saved, target, weight, ignore_index=ignored, reduction=reduction)
    if not smoothing:
        return loss
    left_out = target == ignored
    smooth = -saved.sum(dim)
    smooth.masked_fill_(left_out, 0)
    if reduction == "mean":
        smooth = smooth.sum() / (left_out.numel() - left_out.sum())
    elif reduction == "sum":
        smooth = smooth.sum()
    return (1 - smoothing) * loss + smooth * (smoothing / saved.shape[dim])


def _to_gradient(ctx: Any, x: Tensor, scale: Tensor, classes: Tensor) -> None:
    """Turn a log-softmax into the gradient of the logits, in place, a piece at a time."""
    dim, smoothing = ctx.dim, ctx.options[2]
    each = smoothing / x.shape[dim]
    rows = max(1, ctx.piece // max(1, x[:1].numel())) if dim else x.shape[0]
    for part, s, c in zip(*(t.split(rows) for t in (x, scale, classes)), strict=True):
        # Halves are rounded once, when all is done; for wider ones `wide` is `part` itself.
        wide = part if part.dtype == torch.float64 else part.float()
        wide.exp_().mul_(s.to(wide.dtype))
        if smoothing:
            wide.sub_(s * each)
        wide.scatter_add_(dim, c, (s * (smoothing - 1)).to(wide.dtype))
        if wide is not part:
            part.copy_(wide)


def _narrow(classes: Tensor, count: int) -> Tensor:
    """Classes, and -1, in the narrowest type that holds them."""
    types = (torch.int8, torch.int16, torch.int32, torch.int64)
    return classes.to(next(t for t in types if count - 1 <= torch.iinfo(t).max))


def _scale(
    grad: Tensor, classes: Tensor, weight: Tensor | None, reduction: str
) -> tuple[Tensor, Tensor]:
    """The factor of each row's softmax in the gradient, and the row's class."""
    ignored, classes = classes < 0, classes.clamp(min=0)
    wide = grad if grad.dtype == torch.float64 else grad.float()
    ones = torch.ones_like(classes, dtype=wide.dtype)
    each = ones if weight is None else weight.to(wide)[classes]
    each = each.masked_fill(ignored, 0)
    if reduction == "mean":
        wide = wide / each.sum()
    return (each * wide).masked_fill(ignored, 0), classes
