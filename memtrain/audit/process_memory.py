"""Pages that were freed, and that glibc keeps."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MMAP_THRESHOLD = -3  # mallopt(3)

_MOST_IN_HEAP = 32 * 2**20  # bytes that the threshold above which glibc maps a block rises to
_LARGE = 2**20


def hand_back_freed_pages() -> bool:
    """Give the pages that were freed, but that glibc's heap has kept, back to the system.

    A block above a threshold is mapped by itself, and unmapped when it is freed. glibc raises the
    threshold to the size of each such block that is freed, up to 32 MiB: from then on tensors of
    that size lie in the heap, and stay resident behind whatever was allocated after them. Called
    where much has been freed; it takes milliseconds, and no tensor moves.

    Returns:
        Whether anything was handed back; False without glibc.

    Example:
        >>> hand_back_freed_pages() in (True, False)
        True
    """
    trim = _of_glibc("malloc_trim")
    return trim is not None and bool(trim(ctypes.c_size_t(0)))


@contextmanager
def large_blocks_mapped() -> Iterator[None]:
    """Let glibc map each block of a MiB and more by itself meanwhile, and unmap it when freed.

    For work that frees large temporaries between small blocks that stay (see
    `hand_back_freed_pages`), where a page fault costs little beside what is computed. It holds for
    the process. Afterwards the threshold is 32 MiB, where glibc's own rising ends. Without glibc
    nothing changes.

    Example:
        >>> with large_blocks_mapped():
        ...     len(bytearray(2**20))
        1048576
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
    """A function of glibc's malloc; None where there is none (musl and others)."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
