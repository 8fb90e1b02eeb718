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
from memtrain.activations.saved.known_ops import LOG_SOFTMAX
from memtrain.activations.saved.payload import (
    Payload,
    compress,
    decompress,
    save_payloads,
    saved_payloads,
)
from memtrain.compressors import Compressor, Key
from memtrain.compressors.log_group import cut_, of_logarithms
from memtrain.kernels.dispatch import is_for_cuda, is_simulated

_NAMED = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
_PIECE = 2**22  # elements that are worked on at once
_PIECE_CUDA = 2**26  # at most, where launches cost; a step predicted for CUDA has them too
_PIECES_CUDA = 8  # of smaller logits, whose pieces would else take as much as all of them


def recognise(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """`F.cross_entropy` of a contiguous matrix of logits and class indices; None for other calls.

    With weights, label smoothing, class probabilities or more dimensions torch's own op runs, whose
    log-softmax is compressed as a saved tensor.
    """
    values = dict(zip((*_NAMED, "label_smoothing"), args, strict=False)) | dict(kwargs)
    x, target = values.get("input"), values.get("target")
    others = (values.get(key) for key in ("weight", "size_average", "reduce"))
    if any(other is not None for other in others) or values.get("label_smoothing"):
        return None
    if not isinstance(x, Tensor) or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    if x.dim() != 2 or not x.is_contiguous() or not x.numel() or target.shape != x.shape[:1]:
        return None
    ignored, reduction = values.get("ignore_index", -100), values.get("reduction", "mean")
    if reduction not in ("mean", "sum", "none") or not isinstance(ignored, int):
        return None

    def run(compressor: Compressor, key: Key) -> Tensor:
        return cross_entropy(x, target, ignored, reduction, compressor=compressor, key=key)

    return Call("cross_entropy", x, run, gives_floats, "saved")


def cross_entropy(
    x: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    *,
    compressor: Compressor,
    key: Key = Key(),  # noqa: B008 (a frozen value)
) -> Tensor:
    """`F.cross_entropy` of class indices, saving a compressed log-softmax; the value is torch's.

    Logits are float, [N, C], contiguous; classes are integers, [N]. The gradient has an exp() of
    the log-softmax: `compressor` has 8 bits.

    Memory:
        Kept for backward: the payload of x's elements, in pieces of 4 Mi elements, and `target` in
        1 to 4 bytes a class. Forward and backward work in two pieces of 16 MiB (a row at least),
        and numbers of `target`'s shape; the backward allocates the gradient besides. On CUDA an
        eighth of the logits is a piece, of up to 64 Mi elements, since launches cost.
        Where autocast asks for float32, pieces are cast, never the whole.
    """
    none = target.new_empty(0, dtype=torch.long)
    wide = x.dtype in (torch.float16, torch.bfloat16) and autocast_widens(
        lambda t: functional.cross_entropy(t, none, reduction="sum"), (0, 2), x
    )
    return _cross_entropy(x, target, ignore_index, reduction, wide, compressor, key)


def _cross_entropy_forward(  # noqa: PLR0913 (torch's own, and the site's)
    ctx: Any,
    x: Tensor,
    target: Tensor,
    ignored: int,
    reduction: str,
    wide: bool,  # logits are cast to float32, a piece at a time
    compressor: Compressor,
    key: Key,
) -> Tensor:
    ctx.reduction, ctx.shape, ctx.dtype = reduction, x.shape, x.dtype
    ctx.rows = max(1, _piece(x) // x.shape[1])
    # Without labels that are ignored: -1 in their place.
    known = target.masked_fill(target == ignored, -1)
    losses: list[Tensor] = []
    payloads: list[Payload] = []
    pieces = [*zip(x.split(ctx.rows), target.split(ctx.rows), strict=True)]
    differing = {*_differing(len(pieces))}
    for index, (logits, classes) in enumerate(pieces):
        if index not in differing:
            losses.append(torch.empty_like(losses[0]))
            payloads.append(_empty_like(payloads[0]))
            continue
        saved = torch.log_softmax(logits.float() if wide else logits, 1)
        losses.append(functional.nll_loss(saved, classes, ignore_index=ignored, reduction="none"))
        cut_(saved, compressor)
        # Random bits of its own, as each process has for its part of a tensor.
        payloads.append(compress(saved, compressor, key._replace(rank=key.rank + len(payloads))))
        del saved  # before the next is made
    save_payloads(ctx, payloads, of_logarithms(compressor), _narrow(known, x.shape[1]))
    # A matrix of one class, whose losses torch adds up in the order that it always does.
    column, classes = -torch.cat(losses).unsqueeze(1), known.clamp(max=0)
    return functional.nll_loss(column, classes, ignore_index=-1, reduction=reduction)


def _cross_entropy_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    payloads, (classes,) = saved_payloads(ctx)
    scale, classes = _scale(grad, classes.long(), ctx.reduction)
    if len(payloads) == 1:
        return _gradient(ctx, payloads[0], scale, classes).to(ctx.dtype), None
    dx = scale.new_empty(ctx.shape, dtype=ctx.dtype)
    for index in _differing(len(payloads)):
        rows = slice(index * ctx.rows, (index + 1) * ctx.rows)
        dx[rows] = _gradient(ctx, payloads[index], scale[rows], classes[rows])
    return dx, None


_cross_entropy = autograd_function(
    _cross_entropy_forward, _cross_entropy_backward, tensors=2, like=LOG_SOFTMAX
)


def _gradient(ctx: Any, payload: Payload, scale: Tensor, classes: Tensor) -> Tensor:
    """Return the gradient of the logits, in float32 or wider, from their log-softmax."""
    x = decompress(payload, ctx.compressor)
    x = x if x.dtype == torch.float64 else x.float()
    scale = scale.to(x.dtype).unsqueeze(1)
    return x.exp_().mul_(scale).scatter_add_(1, classes.unsqueeze(1), -scale)


def _piece(x: Tensor) -> int:
    if not is_for_cuda(x):
        return _PIECE
    return min(max(_PIECE, x.numel() // _PIECES_CUDA), _PIECE_CUDA)


def _differing(count: int) -> Sequence[int]:
    """Return the pieces to compute: without data, all but the first and the last two are equal."""
    return [0, *range(max(1, count - 2), count)] if is_simulated() else range(count)


def _empty_like(payload: Payload) -> Payload:
    packed, layout = payload
    tensors = {name: torch.empty_like(x) for name, x in packed.tensors.items()}
    return packed._replace(tensors=tensors), layout


def _narrow(classes: Tensor, count: int) -> Tensor:
    """Classes, and -1, in the narrowest type that holds them."""
    types = (torch.int8, torch.int16, torch.int32, torch.int64)
    return classes.to(next(t for t in types if count - 1 <= torch.iinfo(t).max))


def _scale(grad: Tensor, classes: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
    """Return the factor of each row's softmax in the gradient, and the row's class."""
    wide = grad if grad.dtype == torch.float64 else grad.float()
    counts = (classes >= 0).to(wide.dtype)
    if reduction == "mean":
        wide = wide / counts.sum()
    return (counts * wide).masked_fill(classes < 0, 0), classes.clamp(min=0)
