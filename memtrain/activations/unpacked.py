"""Keeps transformers from building, under fake tensors, masks that a real run does not have."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MODULE, _FUNCTION = "transformers.masking_utils", "find_packed_sequence_indices"


@contextmanager
def one_sequence_per_row() -> Iterator[None]:
    """Take every row of a batch as one sequence, as it mostly is.

    transformers reads position ids to find several sequences packed in one row. Where it cannot
    read them it plays safe: it builds a mask of sequence x sequence, which attention then saves.
    Without transformers, or one that has no such function, nothing happens.

    Example:
        >>> with one_sequence_per_row():
        ...     pass
    """
    module: Any = sys.modules.get(_MODULE)
    original = getattr(module, _FUNCTION, None)
    if original is None:
        yield
        return
    setattr(module, _FUNCTION, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(module, _FUNCTION, original)
