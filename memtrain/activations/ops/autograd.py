"""Autograd Functions made of two plain functions, and the payloads that they save for backward."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from memtrain.activations.saved.known_ops import GELU, REPLACED_NODES

_EXCEPTION = (
    "keep such ops by activations.exceptions="
    "[{op: '@nonlinear|*norm|*pool*|cross_entropy', compressor: keep}]"
)


def autograd_function(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    tensors: int = 1,
    twice: bool = False,
    like: type = GELU,
) -> Callable[..., Any]:
    """Create an autograd Function from two functions; return its `apply`.

    `forward(ctx, x, ...)` returns the result; its name less `_forward` names the graph's node.
    `backward(ctx, *grads)` returns a tuple, with a gradient or None for each of forward's first
    `tensors` arguments, which are tensors or None.

    `like` is a node of torch whose output depends on its input in the same way.

    Unless `twice`, the backward raises a RuntimeError under `create_graph=True`: what was saved is
    no function of x. (torch's `once_differentiable` raises only where an incoming gradient requires
    one; else it omits the second derivative through x.)

    Example:
        >>> def cube_forward(ctx, x):
        ...     ctx.save_for_backward(x)
        ...     return x**3
        >>> def cube_backward(ctx, grad):
        ...     return (3 * ctx.saved_tensors[0] ** 2 * grad,)
        >>> cube, x = autograd_function(cube_forward, cube_backward), torch.ones(2).requires_grad_()
        >>> y = cube(x)
        >>> type(y.grad_fn).__name__, torch.autograd.grad(y.sum(), x)
        ('CubeBackward', (tensor([3., 3.]),))
        >>> torch.autograd.grad(y.sum(), x, create_graph=True)
        Traceback (most recent call last):
        ...
        RuntimeError: memtrain keeps too little of an activation to differentiate it twice ...
    """
    constants = (None,) * (forward.__code__.co_argcount - 1 - tensors)

    def checked(ctx: Any, *grads: Any) -> Any:
        if not twice and torch.is_grad_enabled():
            raise RuntimeError(
                "memtrain keeps too little of an activation to differentiate it twice "
                f"(once_differentiable, {name}): {_EXCEPTION}"
            )
        try:
            return backward(ctx, *grads) + constants
        except RuntimeError as error:
            if any(map(is_batched, grads)):
                raise RuntimeError(
                    f"memtrain's {name} takes one gradient at a time: remove "
                    f"is_grads_batched=True, jacobian's vectorize=True or vmap around the "
                    f"backward, or {_EXCEPTION}"
                ) from error
            raise

    name = forward.__name__.removesuffix("_forward").title().replace("_", "")
    methods = {"forward": staticmethod(forward), "backward": staticmethod(checked)}
    function = cast("type[Function]", type(name, (Function,), methods))
    REPLACED_NODES[cast(Any, function)._backward_cls] = like
    return function.apply


def is_batched(grad: Tensor | None) -> bool:
    """Return whether a gradient stands for many, by either of torch's two vmaps."""
    return grad is not None and "Batched" in repr(torch._C._dispatch_keys(grad))
