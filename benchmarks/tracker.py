"""Every byte that a process asks of malloc, alive now and at most: kernels' and libraries' too.

    python -m benchmarks.tracker -m benchmarks run peaks
    python -m benchmarks.tracker my_script.py

runs Python with a small C++ library in front of glibc's malloc (`tracker.cpp`, built with g++ where
it has not been). It sees what live storages do not: what an op allocates and frees before it
returns, the workspaces of oneDNN and MKL, and Python's own larger objects. Linux with glibc only.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("tracker.cpp")
LIBRARY = SOURCE.with_name("libtracker.so")


def build() -> Path:
    """Compile the tracker where it is missing or older than its source.

    Returns:
        The library, for `LD_PRELOAD`.

    Raises:
        RuntimeError: If this is not Linux.
        subprocess.CalledProcessError: If the compiler fails.
    """
    if not sys.platform.startswith("linux"):
        raise RuntimeError(
            f"platform {sys.platform!r}; allowed: linux (glibc's malloc is replaced)"
        )
    if not LIBRARY.exists() or LIBRARY.stat().st_mtime < SOURCE.stat().st_mtime:
        part = LIBRARY.with_suffix(f".{os.getpid()}")
        flags = ["-O2", "-std=c++17", "-shared", "-fPIC", "-fno-builtin"]
        subprocess.run(["g++", *flags, str(SOURCE), "-o", str(part)], check=True)
        part.replace(LIBRARY)  # another process may be loading the old one
    return LIBRARY


def environment() -> dict[str, str]:
    """Variables of a process that is to be tracked: the library, and one thread."""
    return {**os.environ, "LD_PRELOAD": str(build()), "OMP_NUM_THREADS": "1"}


def run(arguments: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run Python under the tracker.

    Args:
        arguments: Of the interpreter: `["-c", "..."]`, `["script.py"]`.
        **options: Of `subprocess.run`.

    Returns:
        The process that has ended.
    """
    return subprocess.run([sys.executable, *arguments], env=environment(), text=True, **options)


def is_tracked() -> bool:
    """Whether this process runs under the tracker."""
    return hasattr(ctypes.CDLL(None), "tracker_live")


def live() -> int:
    """Bytes that are allocated now."""
    return _library().tracker_live()


def restart() -> None:
    """Let the peak begin anew, at what is alive now."""
    _library().tracker_restart()


def peak() -> int:
    """The most bytes alive at any moment since `restart`."""
    return _library().tracker_peak()


def peak_of(call: Callable[[], object]) -> int:
    """The most bytes alive at any moment of a call, besides those alive before it.

    Args:
        call: What runs; let it run once before, so that imports and caches do not count.

    Returns:
        Bytes.

    Raises:
        RuntimeError: If this process does not run under the tracker.

    Example:
        >>> if is_tracked():  # python -m benchmarks.tracker
        ...     assert peak_of(lambda: bytes(10**6)) >= 10**6
    """
    restart()
    before = live()
    call()
    return peak() - before


def peaks_of(call: Callable[[], object]) -> tuple[int, int]:
    """As `peak_of`: of all blocks, and of those of a KiB or more.

    The first counts the objects of Python and of autograd's graph too: some hundred bytes for each
    op of a forward, mebibytes where a model loops over time steps.

    Args:
        call: What runs.

    Returns:
        Bytes, of all blocks and of the large ones; each at its own peak.
    """
    library = _library()
    restart()
    before, large = live(), library.tracker_large()
    call()
    return peak() - before, library.tracker_large_peak() - large


@cache
def _library() -> ctypes.CDLL:
    if not is_tracked():
        raise RuntimeError(
            "this process is not tracked: run it by `python -m benchmarks.tracker script.py`, or "
            "by benchmarks.tracker.run"
        )
    library = ctypes.CDLL(None)
    for name in ("live", "peak", "large", "large_peak"):
        getattr(library, f"tracker_{name}").restype = ctypes.c_int64
    library.tracker_restart.restype = None
    return library


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]).returncode)
