"""The compressor that fits a saved tensor's dtype and its row of the table."""

import torch

from memtrain.activations.saved.known_ops import LOGARITHM
from memtrain.compressors import Compressor, Integers, Keep, Mask
from memtrain.compressors.log_group import of_logarithms

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int16, torch.int32, torch.int64)
UNKNOWN_RANGE = Keep("integers whose range is not known without reading them")
CODES = Keep("derivative codes serve replaced nonlinearities only")


def fit(
    chosen: Compressor, reason: str, dtype: torch.dtype, limit: int | None
) -> Compressor | Keep:
    """Return the compressor for a saved tensor that a rule claims.

    Args:
        chosen: By the rule.
        reason: Of the tensor's row in the known-op table.
        dtype: Of the tensor.
        limit: The number below which its integers lie, where that is known.

    Example:
        >>> from memtrain.compressors import Group
        >>> fit(Group(bits=4), LOGARITHM, torch.bool, None)
        Mask()
    """
    if dtype == torch.bool:
        return Mask()
    if limit is not None:
        return Integers(limit=limit)
    if dtype in INTEGERS:
        return UNKNOWN_RANGE
    if dtype not in FLOATS:
        return Keep(f"dtype {dtype}")
    if chosen.gives_derivative:
        return CODES
    return of_logarithms(chosen) if reason == LOGARITHM else chosen
