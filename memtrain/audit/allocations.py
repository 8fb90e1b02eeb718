"""Bytes that torch allocates, asked of its allocators: compiled code calls no op that is seen."""

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig  # pyright: ignore[reportMissingImports]
from torch.autograd import ProfilerConfig, ProfilerState

from memtrain.audit.live_storages import storage_nbytes


class Allocations:
    """Counts what is allocated and freed inside a `with` block, temporaries of compiled code too.

    It answers what `LiveStorages` does, but needs no mode, which would make Dynamo run code as it
    is. On a CPU it counts what the thread that entered the block asks of torch's allocator, by
    torch's profiler of ops, which does not see that older blocks are freed; on CUDA what all do, as
    the caching allocator rounds it.

    Args:
        device: Where.

    Raises:
        RuntimeError: When the block is entered, if the profiler runs already.

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
        """Begin to count."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)
        else:
            _start()
        self._inside = True
        return self

    def __exit__(self, *_: object) -> None:
        """Count no more."""
        self._read()
        self._inside = False
        if self.device.type != "cuda":
            _stop()

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Count these older tensors too; shared storages count once."""
        nbytes = storage_nbytes(tensors)
        self._now, self._most = self._now + nbytes, self._most + nbytes
        self._start -= nbytes

    def nbytes(self, exclude: Iterable[Tensor] = ()) -> int:
        """Bytes alive now, or when the block ended, without the storages of `exclude`."""
        self._read()
        return self._now - storage_nbytes(exclude)

    @property
    def peak_nbytes(self) -> int:
        """The most bytes alive at once."""
        self._read()
        return self._most

    def restart(self, nbytes: int | None = None) -> tuple[int, str]:
        """Return the most bytes alive at once, with the op that ran then, and begin anew.

        On a CPU `nbytes` sets what is alive now, where older tensors may have been freed.
        """
        self._read()
        found = self._most, self._op
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif nbytes is not None:
            self._now = nbytes
        self._most, self._op = self._now, ""
        return found

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


# torch.profiler records the same, but with a trace entry for each, and prints lines of its own


def _start() -> None:
    options = (False, True, False, False, False)  # `True`: memory
    config = ProfilerConfig(ProfilerState.CPU, *options, _ExperimentalConfig())
    torch.autograd._enable_profiler_legacy(config)


def _stop() -> list[tuple[str, int]]:
    """Outermost op and bytes of each allocation since `_start`; freed ones are negative."""
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
