"""Caches of keys and values, which a module that runs twice would fill twice."""

from collections.abc import Mapping
from typing import Any

from torch import nn

_HOME = "transformers.cache_utils"


def is_cache(x: object) -> bool:
    """Whether `x` is one of Hugging Face's.

    Example:
        >>> is_cache({"keys": []})
        False
    """
    return any(base.__module__ == _HOME for base in type(x).__mro__)


def without_caches(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments with None in place of caches, which training reads nothing from.

    Hugging Face's own activation checkpointing does so too.

    Args:
        module: About to run; one that reads another's entries keeps its cache
            (`_can_checkpoint_with_cache`).
        args: Of its forward.
        kwargs: Of its forward.

    Returns:
        The arguments to give it; None where a cache holds entries for it from before (a prefix).
    """
    caches = [x for x in (*args, *kwargs.values()) if is_cache(x)]
    if not caches or getattr(module, "_can_checkpoint_with_cache", False):
        return args, dict(kwargs)
    numbers = {getattr(part, "layer_idx", None) for part in module.modules()}
    layers = [n for n in numbers if isinstance(n, int)] or [0]
    if any(cache.get_seq_length(layer) > 0 for cache in caches for layer in layers):
        return None
    without = {name: None if is_cache(x) else x for name, x in kwargs.items()}
    if "use_cache" in without:
        without["use_cache"] = False
    return tuple(None if is_cache(x) else x for x in args), without
