"""Backwards that cannot be differentiated themselves, and say so."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse to build a graph of a Function's backward: what it saved is no function of x.

    torch's own decorator of this name raises only where a gradient that comes in requires one; else
    the second derivative through x is left out without a word.

    Args:
        backward: Of an `autograd.Function`.

    Raises:
        RuntimeError: From the backward, under `create_graph=True`.

    Example:
        >>> from memtrain.activations.ops.fewbit import fewbit
        >>> from memtrain.compressors import DerivativeCode
        >>> x = torch.ones(3, requires_grad=True)
        >>> y = fewbit(x, DerivativeCode(bits=3)).sum()
        >>> torch.autograd.grad(y, x, create_graph=True)
        Traceback (most recent call last):
        ...
        RuntimeError: memtrain keeps too little of an activation to differentiate it twice ...
    """

    @wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "memtrain keeps too little of an activation to differentiate it twice "
                "(once_differentiable): keep this op by an exception rule, compressor: keep"
            )
        return backward(ctx, *grads)

    return guarded
