"""A call of a torch op for which memtrain has its own autograd Function."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memtrain.compressors import Compressor, DerivativeCode, Host, Identity, Integers, Key, Samples

# Compressors that give no floats, or that need the tensor's shape or the payload's own object.
HOOKED = (Identity, DerivativeCode, Integers, Samples, Host)
"""With these an op that keeps a tensor of its own making runs as it is, under hooks."""


_HALVES = (torch.float16, torch.bfloat16)


class Call(NamedTuple):
    """One call of an op that also exists in a form which saves a compressor's payload."""

    op: str  # its name in sites
    x: Tensor  # its size, dtype and `requires_grad` decide whether the call is worth replacing
    run: Callable[[Compressor, Key], Any]  # gives the result, and saves the payload
    accepts: Callable[[Compressor], bool]  # if not, the op runs as it is, under hooks
    tensor: str = "input"  # the role of its one site: `input` or `saved`
    plain: Callable[[Tensor], Tensor] | None = None  # for a module: one op with the same value
    waits: Callable[[Compressor, Key], Any] | None = None  # runs it, and saves `x` at first


def gives_floats(compressor: Compressor) -> bool:
    """Whether an op may hand it a float tensor of its own making, and take another one back."""
    return _gives_floats(type(compressor))


@cache
def _gives_floats(kind: type[Compressor]) -> bool:
    return not issubclass(kind, HOOKED)  # a protocol's check is slow


def is_lossy(compressor: Compressor) -> bool:
    """Return whether the compressor is not the identity."""
    return not compressor.is_identity


def as_autocast(
    function: Callable[[Tensor], Tensor], sizes: Sequence[int], x: Tensor, *others: Tensor | None
) -> list[Any]:
    """Cast tensors as autocast, where it is on, does for `function` (`autocast_widens`).

    An empty tensor with these sizes is an argument that the function takes.
    """
    tensors = [x, *others]
    if not torch.is_autocast_enabled(x.device.type) or not autocast_widens(function, sizes, x):
        return tensors
    return [t.float() if t is not None and t.dtype in _HALVES else t for t in tensors]


def autocast_widens(function: Callable[[Tensor], Tensor], sizes: Sequence[int], x: Tensor) -> bool:
    """Return whether autocast is on and casts 16-bit tensors to float32 for `function`.

    Which functions it runs in float32 differs between devices and versions: torch is asked, on a
    tensor without elements.
    """
    if not torch.is_autocast_enabled(x.device.type):
        return False
    probe = x.new_empty(tuple(sizes), dtype=torch.bfloat16)
    return function(probe).dtype == torch.float32
