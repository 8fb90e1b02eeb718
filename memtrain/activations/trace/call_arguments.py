"""A batch as the arguments of a model."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class CallArguments(NamedTuple):
    """A batch that is a module's positional and keyword arguments already."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as positional and keyword arguments of the model.

    Example:
        >>> call_arguments({"input_ids": 1}), call_arguments((1, 2)), call_arguments(1)
        (((), {'input_ids': 1}), ((1, 2), {}), ((1,), {}))
    """
    if isinstance(batch, CallArguments):
        return batch
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})
