"""Bytes that torch's allocators report, also for compiled code."""

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig  # pyright: ignore[reportMissingImports]
from torch.autograd import ProfilerConfig, ProfilerState

from memtrain.audit.live_storages import storage_nbytes


class Allocations:
    """Counts allocations and releases inside a `with` block, also temporaries of compiled code.

    Unlike `LiveStorages`, it needs no dispatch mode, which would disable Dynamo. On a CPU it reads
    torch's profiler of ops for the thread that entered the block; the release of older blocks is
    not seen. On CUDA it reads the caching allocator, with its rounding, for all threads. Entering
    the block raises RuntimeError if the profiler is already running.

    Example:
        >>> with Allocations(torch.device("cpu")) as live:
        ...     x = torch.ones(256)
        ...     y = (x + 1).exp()
        >>> live.nbytes(), live.nbytes(exclude=[x]), live.peak_nbytes
        (2048, 1024, 3072)
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._now = self._most = self._start = 0
        self._op = ""
        self._inside = False

    def __enter__(self) -> Self:
        """Start counting."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)
        else:
            _start()
        self._inside = True
        return self

    def __exit__(self, *_: object) -> None:
        """Stop counting."""
        self._read()
        self._inside = False
        if self.device.type != "cuda":
            _stop()

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Also count these older tensors; a shared storage counts once."""
        nbytes = storage_nbytes(tensors)
        self._now, self._most = self._now + nbytes, self._most + nbytes
        self._start -= nbytes

    def nbytes(self, exclude: Iterable[Tensor] = ()) -> int:
        """Return the live bytes, now or at the block's end, without the storages of `exclude`."""
        self._read()
        return self._now - storage_nbytes(exclude)

    @property
    def peak_nbytes(self) -> int:
        """The most bytes alive at once."""
        self._read()
        return self._most

    def restart(self, nbytes: int | None = None) -> tuple[int, str]:
        """Return the most live bytes, with the op that ran then, and reset both.

        On a CPU `nbytes` sets the live bytes, since older tensors may have been freed.
        """
        self._read()
        highest = self._most, self._op
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif nbytes is not None:
            self._now = nbytes
        self._most, self._op = self._now, ""
        return highest

    def _read(self) -> None:
        if not self._inside:
            return
        if self.device.type == "cuda":
            self._now = torch.cuda.memory_allocated(self.device) - self._start
            self._most = torch.cuda.max_memory_allocated(self.device) - self._start
            return
        for op, nbytes in _stop():
            self._now += nbytes
            if self._now > self._most:
                self._most, self._op = self._now, op
        _start()


# torch.profiler makes a trace entry for each event and prints lines.


def _start() -> None:
    options = (False, True, False, False, False)  # `True`: memory
    config = ProfilerConfig(ProfilerState.CPU, *options, _ExperimentalConfig())
    torch.autograd._enable_profiler_legacy(config)


def _stop() -> list[tuple[str, int]]:
    """Return outermost op and bytes of each allocation since `_start`; releases are negative."""
    threads: Any = torch.autograd._disable_profiler_legacy()
    found: list[tuple[str, int]] = []
    for events in threads:
        running: list[str] = []
        for event in events:
            kind = event.kind()
            if kind == "push":
                running.append(event.name().rpartition(": ")[2].removeprefix("aten::"))
            elif kind == "pop":
                del running[-1:]
            elif kind == "memory_alloc":
                found.append((running[0] if running else "", event.cpu_memory_usage()))
    return found
