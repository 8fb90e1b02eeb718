"""Kinds of saved tensors: an ordinary one, a parameter's memory, one that cannot be packed."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor as _wrapped
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from memtrain.activations.saved.known_ops import ACCUMULATE, COPY, STAND_INS

PLAIN = (Tensor, nn.Parameter, FakeTensor)
"""Types of the tensors that are compressed."""

_STRIDED = torch.strided


def unsupported(x: Tensor) -> str:
    """Return why a tensor has no storage of its own (sparse, nested, a subclass), or "".

    Example:
        >>> unsupported(torch.ones(2)), unsupported(torch.ones(2).to_sparse())
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
    """Return whether a tensor is a parameter, or made of parameters by casts and views.

    So weights are known that the model does not list: FSDP's unsharded ones, autocast's copies
    (those of cuDNN's recurrent layers too), explicit casts, weight norm's products. A detached
    tensor does not show it.

    Example:
        >>> weight = nn.Parameter(torch.ones(4, 4))
        >>> is_parameter(weight.bfloat16().t()), is_parameter(weight @ weight)
        (True, False)
    """
    base = x if x._base is None else x._base
    if base.is_leaf:  # frozen ones, too: FSDP's, or of a network that the model does not own
        return base.requires_grad or isinstance(base, nn.Parameter)
    nodes: list[Any] = [x.grad_fn]
    while nodes:
        node = nodes.pop()
        kind = type(node)
        if kind is ACCUMULATE:
            continue
        if node is None or kind not in STAND_INS:
            return False
        overwritten = kind is COPY  # its first input, of which nothing is left
        for above, _ in node.next_functions[overwritten:]:
            nodes.append(above)
    return True


def refuse_replica(module: nn.Module) -> None:
    """Raise RuntimeError for a training forward of a replica of `nn.DataParallel`.

    Its parameters are no parameters (they would be compressed), and its threads run side by side.
    """
    if vars(module).get("_is_replica") and torch.is_grad_enabled():
        raise RuntimeError(
            "memtrain does not compress what nn.DataParallel's copies save; "
            "train with nn.parallel.DistributedDataParallel, or unwrap the model"
        )


def storage_id(x: Tensor) -> int:
    """Return an identity of a storage, valid while the storage or a weak reference lives.

    Tensors without one of their own (sparse, nested) get a number that no storage has.
    """
    if x.layout is not _STRIDED or x.is_nested or _wrapped(x):
        return -id(x)
    return x.untyped_storage()._cdata


def in_transform() -> bool:
    """Return whether a transform of torch.func or forward-mode differentiation is active."""
    level = torch._C._functorch.maybe_current_level()  # pyright: ignore[reportAttributeAccessIssue]
    return level is not None or forward_ad._current_level >= 0
