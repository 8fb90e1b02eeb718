"""The process's resident memory under Linux, and glibc's freed pages."""

import ctypes
import sys
from pathlib import Path

_RESET_PEAK = "5"  # proc(5): the peak of the resident set becomes the present one
_MMAP_THRESHOLD = -3  # mallopt(3)

MOST_IN_HEAP = 32 * 2**20
"""Bytes that the threshold above which glibc maps a block rises to."""


def resident_nbytes(*, peak: bool = False) -> int | None:
    """Bytes of the process in memory: tensors, libraries, Python, what the allocator keeps.

    Args:
        peak: The most since `restart_resident_peak`, in place of those of now.

    Returns:
        Bytes; None where the system does not tell them (it is not Linux).

    Example:
        >>> now = resident_nbytes()
        >>> now is None or now > 2**20
        True
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    name = "VmHWM:" if peak else "VmRSS:"
    found = [line.split()[1] for line in lines if line.startswith(name)]
    return 1024 * int(found[0]) if found else None


def restart_resident_peak() -> bool:
    """Let the peak of `resident_nbytes` begin anew; False where the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def hand_back_freed_pages() -> bool:
    """Give the pages that were freed, but that glibc's heap has kept, back to the system.

    A block above a threshold is mapped by itself, and unmapped when it is freed. glibc raises the
    threshold to the size of each such block that is freed, up to 32 MiB: from then on tensors of
    that size lie in the heap, and their pages stay resident behind whatever was allocated after
    them. A lower, fixed threshold would hand each back at once, but every op would then fault its
    result's pages in anew. So what is kept is handed back at once, where much has been freed (a
    model whose weights were converted, a run that has ended): milliseconds, and no tensor moves.

    Returns:
        Whether anything was handed back; False without glibc.

    Example:
        >>> hand_back_freed_pages() in (True, False)
        True
    """
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl and others have none
    return trim is not None and bool(trim(ctypes.c_size_t(0)))


def map_large_blocks(at_least: int) -> bool:
    """Let glibc map each block of so many bytes by itself, and unmap it when it is freed.

    For work that frees large temporaries between small blocks that stay (see
    `hand_back_freed_pages`), where a page fault costs little beside what is computed. It holds for
    the process, and ends the threshold's rising.

    Args:
        at_least: Bytes; at most 32 MiB, where glibc maps by itself.

    Returns:
        Whether it does; False without glibc.

    Raises:
        ValueError: If `at_least` is out of its range.
    """
    if not 0 < at_least <= MOST_IN_HEAP:
        raise ValueError(f"at_least={at_least}; allowed: 1 to {MOST_IN_HEAP} bytes")
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, at_least))
