"""Choose the compressor for a saved tensor from its site, op, metadata and producing nodes."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from memtrain.activations.saved.flatten import memory_of
from memtrain.activations.saved.known_ops import (
    LINEAR,
    LOGARITHM,
    MULTIPLIES,
    POWERS,
    REPLACED_OP,
    SHAPE,
    SavedBy,
)
from memtrain.activations.saved.masked import may_be_masked
from memtrain.activations.saved.site import Site
from memtrain.compressors import Compressor, Integers, Keep
from memtrain.compressors.log_group import of_logarithms

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int16, torch.int32, torch.int64)
UNKNOWN_RANGE = Keep("integers whose range is not known without reading them")
CODES = Keep("derivative codes serve replaced nonlinearities only")
SENTINEL = Keep("a mask was applied: it may hold numbers that stand for minus infinity")
NOT_REPLACED = Keep("torch's own form of the op ran: codes are of memtrain's form alone")

Choose = Callable[[Site], Compressor | Keep]
"""Site -> compressor, or the reason to keep the tensor."""


def decide(
    choose: Choose,
    min_elements: int,
    site: Site,
    saved: SavedBy,
    node: Any,
    x: Tensor,
    joins: Mapping[int, type] | None = None,
) -> Compressor | Keep:
    """Return the compressor for a saved tensor, or the reason to keep it.

    `joins` has the numbers of the nodes that add, join or write constants, and their classes.
    """
    if x.numel() < min_elements:
        return Keep(f"under {min_elements:,} elements")
    chosen = choose(site)
    if isinstance(chosen, Keep) or chosen.is_identity or saved.reason == SHAPE:
        return chosen
    if saved.reason == REPLACED_OP:
        return NOT_REPLACED
    if memory_of(x)[1] is None:
        return Keep("its elements overlap in memory")
    if x.is_neg():
        return Keep("a negated view")
    # What matrix products and convolutions read has padding and positions in it more often.
    checked = (joins or {}) if saved.reason == LINEAR else {}
    multiplies = type(node) in MULTIPLIES or type(node) in POWERS
    if checked and may_be_masked(x.grad_fn, checked, any_constant=multiplies):
        return SENTINEL
    limit = None if saved.limit is None else saved.limit(node)
    return fit(chosen, saved.reason, x.dtype, limit)


def fit(
    chosen: Compressor, reason: str, dtype: torch.dtype, limit: int | None
) -> Compressor | Keep:
    """Return the compressor for a saved tensor that a rule claims.

    Integers of the tensor lie below `limit`, where that is known.

    Example:
        >>> from memtrain.compressors import Group
        >>> fit(Group(bits=4), LOGARITHM, torch.bool, None)
        Integers(limit=2)
    """
    if dtype == torch.bool:
        return Integers(limit=2)
    if limit is not None:
        return Integers(limit=limit)
    if dtype in INTEGERS:
        return UNKNOWN_RANGE
    if dtype not in FLOATS:
        return Keep(f"dtype {dtype}")
    if chosen.gives_derivative:
        return CODES
    return of_logarithms(chosen) if reason == LOGARITHM else chosen
