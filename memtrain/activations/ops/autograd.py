"""Autograd Functions made of two plain functions, and the payloads that they save for backward."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as _in_transform
from torch._C._functorch import unwrap_if_dead
from torch.autograd import Function
from torch.compiler import is_compiling

from memtrain.activations.saved.flatten import Layout, flatten, layout_of
from memtrain.activations.saved.handles import check_version, tensor_of
from memtrain.compressors import Compressor, Key, Packed
from memtrain.kernels.dispatch import is_ordinary

Payload = tuple[Packed, Layout | None]
"""A compressed tensor, and its layout where it was flattened."""

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
) -> Callable[..., Any]:
    """The `apply` of an autograd Function of two functions, at the price of its C++ part alone.

    torch's own looks for a `setup_context`, refuses to run in a transform of torch.func without
    one, and unwraps the tensors that a finished transform left, all in Python: as long as a small
    kernel. This calls it in a transform or a compilation only.

    Args:
        forward: `(ctx, x, ...) -> y`. Its name less `_forward` names the graph's node.
        backward: `(ctx, *grads) -> tuple`, a gradient or None for each of `tensors`.
        tensors: How many of forward's first arguments are tensors, or None in place of one.
        twice: Whether the backward is differentiable. If not, it raises a RuntimeError under
            `create_graph=True`: what was saved is no function of x. (torch's `once_differentiable`
            raises only where a gradient that comes in requires one; else it leaves the second
            derivative through x out without a word.)

    Returns:
        A callable of forward's arguments after `ctx`, by position.

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
                    f"memtrain's {name} takes one gradient at a time: leave is_grads_batched=True, "
                    f"jacobian's vectorize=True or vmap around the backward out, or {_EXCEPTION}"
                ) from error
            raise

    name = forward.__name__.removesuffix("_forward").title().replace("_", "")
    methods = {"forward": staticmethod(forward), "backward": staticmethod(checked)}
    function = cast("type[Function]", type(name, (Function,), methods))
    in_cpp = cast(Any, super(Function, function)).apply

    def apply(x: Tensor, *others: Any) -> Any:
        if is_compiling() or _in_transform():
            return function.apply(x, *others)
        return in_cpp(unwrap_if_dead(x), *others)

    def apply_to_many(*given: Any) -> Any:
        if is_compiling() or _in_transform():
            return function.apply(*given)
        live = [None if x is None else unwrap_if_dead(x) for x in given[:tensors]]
        return in_cpp(*live, *given[tensors:])

    return apply if tensors == 1 else apply_to_many


def is_batched(grad: Tensor | None) -> bool:
    """Whether a gradient stands for many, by either of torch's two vmaps."""
    return grad is not None and "Batched" in repr(torch._C._dispatch_keys(grad))


def compress(x: Tensor, compressor: Compressor, key: Key) -> Payload:
    """The payload of `x`, flattened in memory order unless the compressor is `shaped`.

    Args:
        x: What is compressed.
        compressor: Of the site's rule.
        key: Feeds its random bits.
    """
    flat, layout = (x, None) if compressor.shaped else flatten(x)
    return compressor.compress(flat, key=key), layout


def save_payloads(
    ctx: Any, payloads: Sequence[Payload], compressor: Compressor, *others: Tensor | None
) -> None:
    """Save payloads, and other tensors as they are, through `ctx.save_for_backward`.

    Args:
        ctx: The Function's context.
        payloads: As `compress` gives them.
        compressor: What decompresses them.
        *others: Parameters and statistics.
    """
    parts: list[Tensor] = []
    ctx.compressor, ctx.payloads = compressor, []
    for (tensors, shape, dtype), layout in payloads:  # a comprehension is a function more to call
        parts += tensors.values()
        ctx.payloads.append((tuple(tensors), shape, dtype, layout))
    ctx.save_for_backward(*parts, *others)


def saved_payloads(ctx: Any) -> tuple[list[tuple[Packed, Any]], list[Any]]:
    """The payloads that `save_payloads` saved, and the other tensors."""
    saved = iter(ctx.saved_tensors)
    payloads: list[tuple[Packed, Any]] = []
    for names, shape, dtype, layout in ctx.payloads:
        tensors = dict(zip(names, saved, strict=False))  # the first of those that are left
        payloads.append((Packed(tensors, shape, dtype), layout))
    return payloads, list(saved)


def save_compressed(
    ctx: Any, x: Tensor, compressor: Compressor, key: Key, *others: Tensor | None
) -> None:
    """Save the payload of `x`, and other tensors as they are, through `ctx.save_for_backward`.

    Args:
        ctx: The Function's context.
        x: What is compressed.
        compressor: Of the site's rule.
        key: Feeds its random bits.
        *others: Parameters and statistics.
    """
    save_payloads(ctx, [compress(x, compressor, key)], compressor, *others)


def saved_compressed(ctx: Any) -> tuple[Tensor, list[Any]]:
    """Tensors of `save_compressed`: `x` decompressed, in its shape and memory order, and others."""
    (payload,), others = saved_payloads(ctx)
    return decompress(payload, ctx.compressor), others


def decompress(payload: Payload, compressor: Compressor) -> Tensor:
    """The tensor of a payload, in its shape and memory order."""
    packed, layout = payload
    return tensor_of(packed, compressor, layout)


def output_again(y: Tensor) -> Callable[[], Tensor] | None:
    """A function that computes an op's output again from the payload that the op saved, or None.

    An op allows it by setting `ctx.output`, a function of what `saved_compressed` returns. Where it
    sets `ctx.bound`, that is called for x while calls are ordinary, with the payload's tensors.

    Args:
        y: The op's result.
    """
    node: Any = y.grad_fn
    if not hasattr(node, "output") or node.payloads[0][-1] != layout_of(y):
        return None
    # Not the node itself: a backward through it frees what it saved, yet who reads the output may
    # belong to another graph (of `y.detach()`), or have its turn later.
    (payload,), others = saved_payloads(node)
    versions = [0 if t is None else t._version for t in others]
    bound = getattr(node, "bound", None)
    return partial(_output_again, node.output, payload, node.compressor, bound, others, versions)


def _output_again(
    output: Callable[..., Tensor],
    payload: Payload,
    compressor: Compressor,
    bound: Callable[..., Tensor] | None,
    others: list[Any],
    versions: list[int],
) -> Tensor:
    for t, version in zip(others, versions, strict=True):
        if t is not None and t._version != version:
            check_version(t, version)
    if bound is not None and is_ordinary():
        return output(bound(*payload[0].tensors.values()), *others)
    return output(decompress(payload, compressor), *others)
