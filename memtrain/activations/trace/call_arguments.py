"""A batch as the arguments of a model."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer


class CallArguments(NamedTuple):
    """A batch that is a module's positional and keyword arguments already."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as positional and keyword arguments of the model.

    Example:
        >>> call_arguments({"input_ids": 1}), call_arguments((1, 2)), call_arguments(1)
        (((), {'input_ids': 1}), ((1, 2), {}), ((1,), {}))
    """
    if isinstance(batch, CallArguments):
        return batch
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def check_order(model: Any, batch: Any) -> None:
    """Raise TypeError for a model or a batch that is an argument in the wrong position."""
    for name, value, wrong in (
        ("model", model, not isinstance(model, nn.Module)),
        ("batch", batch, isinstance(batch, nn.Module | Optimizer)),
    ):
        if wrong:
            raise TypeError(
                f"{name} is of type {type(value).__name__}; allowed: (model, batch, cfg) in this "
                "order, with a torch.nn.Module, its input (a tensor, a tuple of arguments or a "
                "dict of keyword arguments) and a preset's name or a config"
            )
