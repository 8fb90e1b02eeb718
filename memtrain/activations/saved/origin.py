"""Kinds of saved tensors: an ordinary one, a parameter's memory, one that cannot be packed."""

import sys
from collections.abc import Sequence
from functools import lru_cache
from inspect import unwrap
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor as _wrapped
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator, checkpoint

PLAIN = (Tensor, nn.Parameter, FakeTensor)
"""Types of the tensors that are compressed."""

# What may lie between a parameter and its stand-in: a cast, a view, a copy, weight norm. Nothing
# that mixes in activations: a linear layer's output also leads to parameters only.
_COPY = "CopyBackwards"
_STAND_INS = (
    _COPY,
    "ToCopyBackward",
    "TBackward",
    "TransposeBackward",
    "PermuteBackward",
    "ViewBackward",
    "UnsafeViewBackward",
    "ReshapeAliasBackward",
    "SelectBackward",
    "WeightNormInterfaceBackward",
)
_VIEWS = tuple(
    f"{name}Backward"
    for name in (
        *("Alias", "AsStrided", "Diagonal", "Expand", "Permute", "ReshapeAlias", "Select", "Slice"),
        *("Split", "SplitWithSizes", "Squeeze", "T", "Transpose", "Unbind", "Unfold", "UnsafeView"),
        *("Unsqueeze", "View"),
    )
)
# Of Python functions that give back what they are given: a module's hooks, FSDP2's.
_HOOKS = ("BackwardHookFunctionBackward", "RegisterPostBackwardFunctionBackward")
_STEPS = 6
_STRIDED = torch.strided
# Who calls to save the inputs, so many frames above at the most.
_CHECKPOINT = (unwrap(checkpoint).__code__, _checkpoint_without_reentrant_generator.__code__)
_DEPTH = 12


def foreign(x: Tensor) -> str:
    """Why a tensor's storage cannot be spoken of (sparse, nested, a subclass), or "".

    Example:
        >>> foreign(torch.ones(2)), foreign(torch.ones(2).to_sparse())
        ('', 'a tensor of layout torch.sparse_coo')
    """
    if x.layout is not torch.strided or x.is_nested:
        return f"a tensor of layout {x.layout}"
    if _wrapped(x):
        return "a tensor of torch.func"
    if type(x) not in PLAIN:
        return f"a tensor subclass: {type(x).__name__}"
    return ""


def is_parameter(x: Tensor) -> bool:
    """Whether `x` is a parameter, its view, or made of trainable ones by casts and views alone.

    So weights are known that the model does not list: FSDP's unsharded ones, autocast's copies
    (those of cuDNN's recurrent layers too), explicit casts, weight norm's products.

    Args:
        x: A saved tensor as autograd hands it over, not detached.

    Example:
        >>> weight = nn.Parameter(torch.ones(4, 4))
        >>> is_parameter(weight.bfloat16().t()), is_parameter(weight @ weight)
        (True, False)
    """
    base = x if x._base is None else x._base
    if base.is_leaf:  # frozen ones, too: FSDP's, or of a network that the model does not own
        return base.requires_grad or isinstance(base, nn.Parameter)
    nodes = [(x.grad_fn, _STEPS)]
    while nodes:
        node, steps = nodes.pop()
        kind = type(node)
        if kind.__name__ == "AccumulateGrad":
            continue
        if node is None or steps == 0 or not of_stand_in(kind):
            return False
        overwritten = kind.__name__ == _COPY  # its first input, of which nothing is left
        for above, _ in node.next_functions[overwritten:]:
            nodes.append((above, steps - 1))
    return True


@lru_cache(maxsize=1024)
def of_stand_in(node: type | None) -> bool:
    """Whether nodes of this type may lie between a parameter and what stands for it."""
    return node is not None and node.__name__.startswith(_STAND_INS)


@lru_cache(maxsize=1024)
def _is_view(node: type) -> bool:
    """Whether nodes of this type write nothing; torch's own have a number, a user's have none."""
    name = node.__name__
    return name in _HOOKS or (name.startswith(_VIEWS) and name[-1].isdigit())


def cast_source(x: Tensor, inputs: Sequence[Tensor]) -> Tensor | None:
    """The tensor of another dtype that autocast or `.to` copied `x` from, where it is known.

    Args:
        x: A saved tensor as autograd hands it over, not detached; or a view of one.
        inputs: Arguments of the op that saves it.

    Returns:
        A parameter, or one of `inputs`, with the elements of `x` (where `x` is a view: of its
        base) in the same shape and memory order; None where the copy was written to since.

    Example:
        >>> weight = nn.Parameter(torch.ones(4, 4))
        >>> cast_source(weight.bfloat16().t(), ()) is weight
        True
    """
    copy = x if x._base is None else x._base
    if not x.is_floating_point() or x.is_neg() or copy._version:
        return None
    if copy.grad_fn is None:
        # Autocast's copy of a frozen weight, if no other matrix that the op reads lacks a gradient.
        found = [one for one in inputs if one.dim() > 1 and not one.requires_grad]
        alone = len(found) == 1 and isinstance(found[0], nn.Parameter)
        return found[0] if alone and _is_cast(copy, found[0]) else None
    if not type(copy.grad_fn).__name__.startswith("ToCopyBackward"):
        return None
    node, number = copy.grad_fn.next_functions[0]
    if hasattr(node, "variable"):  # AccumulateGrad
        found = [cast(Any, node).variable]
    else:
        found = [one for one in inputs if one.grad_fn is node and one.output_nr == number]
    return found[0] if found and _is_cast(copy, found[0]) else None


def _is_cast(copy: Tensor, x: Tensor) -> bool:
    return (
        copy.shape == x.shape
        and copy.stride() == x.stride()
        and copy.device == x.device
        and copy.dtype != x.dtype
        and copy.untyped_storage().nbytes() == copy.nbytes  # dense, and nothing besides
    )


def node_number(y: Tensor) -> int | None:
    """The number of the graph's node that made a tensor's memory; None where none did."""
    node = (y if y._base is None else y._base).grad_fn
    return None if node is None else node._sequence_nr()


def leads_to(node: Any, number: int | None) -> bool:
    """Whether views alone lie between a tensor's node and the one that made its memory.

    Else a user's `autograd.Function` may have written to the memory in between, past the version
    counter, as kernels do that are given an address: fused rotary embeddings, for one.

    Args:
        node: The tensor's `grad_fn`. Where it has none, no graph tells.
        number: As of `node_number`.

    Example:
        >>> y = torch.ones(4, requires_grad=True) * 2
        >>> number = node_number(y)
        >>> leads_to(y.view(2, 2).grad_fn, number), leads_to((y + 1).grad_fn, number)
        (True, False)
    """
    if node is None:
        return True
    nodes = [(node, _STEPS)]
    while nodes:
        node, steps = nodes.pop()
        if node._sequence_nr() == number:
            return True
        if steps and _is_view(type(node)):
            nodes += [(above, steps - 1) for above, _ in node.next_functions if above is not None]
    return False


def refuse_replica(module: nn.Module) -> None:
    """Stop a training forward of a copy that `nn.DataParallel` makes anew for each one.

    Its parameters are no parameters (they would be compressed), and its threads run side by side.

    Raises:
        RuntimeError: If the module is one.
    """
    if vars(module).get("_is_replica") and torch.is_grad_enabled():
        raise RuntimeError(
            "memtrain does not compress what nn.DataParallel's copies save; "
            "train with nn.parallel.DistributedDataParallel, or unwrap the model"
        )


def of_checkpoint() -> bool:
    """Whether torch's activation checkpointing saves now: an input that it starts again from."""
    frame = sys._getframe()
    for _ in range(_DEPTH):
        frame = frame.f_back
        if frame is None:
            return False
        if frame.f_code in _CHECKPOINT:
            return True
    return False


def storage_id(x: Tensor) -> int:
    """Identity of the storage of `x`, valid while the storage or a weak reference to it lives.

    Tensors without one of their own (sparse, nested) get a number that no storage has.
    """
    if x.layout is not _STRIDED or x.is_nested or _wrapped(x):
        return -id(x)
    return x.untyped_storage()._cdata


def in_transform() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is at work."""
    level = torch._C._functorch.maybe_current_level()  # pyright: ignore[reportAttributeAccessIssue]
    return level is not None or forward_ad._current_level >= 0
