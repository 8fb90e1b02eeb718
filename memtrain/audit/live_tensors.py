"""The tensors that a training run keeps alive, found in the objects themselves."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def weight_tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


def gradient_tensors(model: nn.Module) -> list[Tensor]:
    """The gradients that are there now."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every tensor that an optimizer holds besides parameters and their gradients.

    It looks into the optimizer's attributes, not only into `state`, so that bytes kept elsewhere
    count too: dicts, lists, tuples, objects of memtrain, and an optimizer inside the optimizer.

    Some may share storages.

    Example:
        >>> from memtrain.audit.live_storages import storage_nbytes
        >>> model = nn.Linear(4, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> storage_nbytes(state_tensors(optimizer))
        80
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    others = [p.grad for p in parameters if p.grad is not None]
    left_out = {t.untyped_storage()._cdata for t in [*parameters, *others]}
    found = _tensors(vars(optimizer), set())
    return [t for t in found if t.untyped_storage()._cdata not in left_out]


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple | set):
        inner = value
    elif isinstance(value, torch.optim.Optimizer) or _is_own(value):
        slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
        inner = [*getattr(value, "__dict__", {}).values(), *slots]
    for item in inner:
        yield from _tensors(item, seen)


def _is_own(value: Any) -> bool:
    return type(value).__module__.startswith("memtrain") and not isinstance(value, nn.Module | type)
