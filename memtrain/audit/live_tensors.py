"""The tensors that a model and its optimizer keep alive."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def weight_tensors(model: nn.Module) -> list[Tensor]:
    """Return parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


def gradient_tensors(model: nn.Module) -> list[Tensor]:
    """Return the current gradients."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return every tensor of an optimizer, without parameters and gradients.

    All attributes are searched, not only `state`: dicts, lists, tuples, objects of memtrain, and
    optimizers inside the optimizer. Tensors may share storages.

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
    elif isinstance(value, torch.optim.Optimizer) or _is_of_memtrain(value):
        slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
        inner = [*getattr(value, "__dict__", {}).values(), *slots]
    for item in inner:
        yield from _tensors(item, seen)


def _is_of_memtrain(value: Any) -> bool:
    return type(value).__module__.startswith("memtrain") and not isinstance(value, nn.Module | type)
