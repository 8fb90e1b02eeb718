"""Linear layers and embeddings whose weight's gradient may be made a few rows at a time."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from memtrain.activations.ops.autograd import autograd_function, is_batched
from memtrain.activations.saved.known_ops import LINEAR, LOSSLESS, KnownOp, SavedBy
from memtrain.activations.saved.origin import PLAIN, in_transform
from memtrain.kernels.step.row_pieces import Make
from memtrain.optim.wrappers.release import ReleaseGradients, released_by
from memtrain.optim.wrappers.row_gradients import RowGradients
from memtrain.optim.wrappers.wrapper import WeakRef

_Owner = Callable[[], ReleaseGradients | None]


def in_rows(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A torch function's form that leaves its weight's gradient to who steps it, for one call.

    Its value, and what it saves and gives, are torch's own.

    Args:
        func: `torch.nn.functional.linear`, `embedding`, or another.
        args: Of the call.
        kwargs: Of the call.

    Returns:
        A function of the same arguments; `func` itself where the gradient is to be whole.
    """
    form = _FORMS.get(func)
    given: Any = (*args, *(kwargs.get(name) for name in ("input", "weight")[len(args) :]))
    x, weight, *_ = given
    if form is None or not torch.is_grad_enabled() or in_transform():
        return func
    usual = type(x) in PLAIN and type(weight) in PLAIN and weight.requires_grad
    owner: _Owner = released_by(weight) if usual else WeakRef()
    release = owner()
    if release is None or not release.rows.takes(weight):
        return func
    return partial(form, owner, release.rows)


def _linear_in_rows(
    owner: _Owner, rows: RowGradients, input: Any, weight: Any, bias: Any = None
) -> Any:
    dtype, width = _autocast(input), weight.shape[1]
    # Of as many tokens as features the output is as large as the gradient, and the loss, which has
    # more than one tensor of that size, holds the peak: pieces would take time for nothing.
    few = 0 < input.numel() < width * width
    if not few or dtype not in (None, weight.dtype):
        return functional.linear(input, weight, bias)
    if dtype is not None:
        input = input.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    rows.used(weight)
    return _linear(input, weight, bias, rows.probe, owner)


def _autocast(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _linear_forward(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, probe: Tensor, owner: _Owner
) -> Tensor:
    ctx.owner, ctx.weight = owner, weight  # itself: hooks give what is saved back as another tensor
    ctx.save_for_backward(x, weight)
    return functional.linear(x, weight, bias)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    for_x, for_weight, for_bias, _, _ = ctx.needs_input_grad
    flat, features = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])

    def make(begin: int, end: int) -> Tensor:
        return flat.narrow(1, begin, end - begin).t().mm(features)

    return (
        flat.mm(weight).view(x.shape) if for_x else None,
        _weight_gradient(ctx, grad, make) if for_weight else None,
        flat.sum(0) if for_bias else None,
        None,
    )


def _weight_gradient(ctx: Any, grad: Tensor, make: Make) -> Tensor:
    """The weight's gradient, or zeros in its place where it is to come in pieces."""
    release = None if is_batched(grad) else ctx.owner()
    stand_in = None if release is None else release.rows.defer(ctx.weight, make)
    return make(0, len(ctx.weight)) if stand_in is None else stand_in


def _embedding_in_rows(  # noqa: PLR0913 (torch's own arguments, and two)
    owner: _Owner,
    rows: RowGradients,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or scale_grad_by_freq or sparse or not input.numel():
        others = (max_norm, norm_type, scale_grad_by_freq, sparse)
        return functional.embedding(input, weight, padding_idx, *others)
    rows.used(weight)
    return _embedding(input, weight, rows.probe, padding_idx, owner)


def _embedding_forward(
    ctx: Any, indices: Tensor, weight: Tensor, probe: Tensor, padding: int | None, owner: _Owner
) -> Tensor:
    y = functional.embedding(indices, weight, padding)  # refuses what is out of range
    ctx.owner, ctx.weight = owner, weight
    ctx.padding = -1 if padding is None else padding % len(weight)
    ctx.save_for_backward(indices)
    return y


def _embedding_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (indices,), padding = ctx.saved_tensors, ctx.padding
    backward = torch.ops.aten.embedding_dense_backward

    def make(begin: int, end: int) -> Tensor:
        own = (indices >= begin) & (indices < end) & (indices != padding)
        return backward(grad, torch.where(own, indices - begin, -1), end - begin, -1, False)

    return None, _weight_gradient(ctx, grad, make), None


_linear = autograd_function(
    _linear_forward,
    _linear_backward,
    tensors=4,
    twice=True,
    known=KnownOp("linear in rows", "linear", (SavedBy("0", "input", LINEAR),)),
)
_INDICES = SavedBy("0", "input", LOSSLESS, limit=lambda node: max(1, len(node.weight)))
_embedding = autograd_function(
    _embedding_forward,
    _embedding_backward,
    tensors=3,
    twice=True,
    known=KnownOp("embedding in rows", "embedding", (_INDICES,)),
)

_FORMS = {functional.linear: _linear_in_rows, functional.embedding: _embedding_in_rows}
IN_ROWS = frozenset(_FORMS)
"""The torch functions that `in_rows` knows."""
