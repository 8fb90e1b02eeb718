"""Return freed pages, which glibc's heap keeps, to the system."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MMAP_THRESHOLD = -3  # mallopt(3)

_MOST_IN_HEAP = 32 * 2**20  # bytes that the threshold above which glibc maps a block rises to
_LARGE = 2**20


def hand_back_freed_pages() -> bool:
    """Return freed pages of glibc's heap to the system, in milliseconds; False without glibc.

    glibc maps blocks above a threshold separately and unmaps freed ones. Freeing such a block
    raises the threshold to its size, up to 32 MiB. Later tensors of that size are in the heap, and
    stay resident when freed if a later allocation is alive.
    """
    trim = _of_glibc("malloc_trim")
    return trim is not None and bool(trim(ctypes.c_size_t(0)))


@contextmanager
def large_blocks_mapped() -> Iterator[None]:
    """Make glibc map each block of at least a MiB separately, for the whole process.

    This helps work that frees large temporaries between small blocks that stay. Afterwards the
    threshold is 32 MiB, glibc's largest. Without glibc nothing changes.
    """
    _map_blocks(_LARGE)
    try:
        yield
    finally:
        _map_blocks(_MOST_IN_HEAP)


def _map_blocks(at_least: int) -> None:
    if mallopt := _of_glibc("mallopt"):
        mallopt(_MMAP_THRESHOLD, at_least)


def _of_glibc(name: str) -> Any:
    """Return a function of glibc's malloc; None without glibc."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
