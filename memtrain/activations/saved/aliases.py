"""All callables of torch under which one op is known: functions, methods, aten overloads."""

from functools import cache
from typing import Any

import torch
from torch.nn import functional

_C: Any = torch._C
_NAMESPACES: tuple[Any, ...] = (torch, torch.Tensor, functional, _C._nn, torch.special)


@cache
def callables(*names: str) -> frozenset[Any]:
    """Return the callables that torch itself has under these names.

    A name only says where to look, once, in torch's own namespaces; calls are recognised by the
    object, so that another op or function with the same name is not.

    Names of in-place forms end in `_`.

    Example:
        >>> torch.relu in callables("relu"), torch.Tensor.relu in callables("relu")
        (True, True)
    """
    found: set[Any] = set()
    for name in names:
        for namespace in _NAMESPACES:
            alias = getattr(namespace, name, None)
            if callable(alias) and not isinstance(alias, type):
                found.add(alias)
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            found.add(packet)
            found |= {getattr(packet, overload) for overload in packet.overloads()}
    return frozenset(found)
