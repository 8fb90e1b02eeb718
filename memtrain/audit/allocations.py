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
        """Bytes alive now, or when the block ended.

        Args:
            exclude: Tensors whose storages are not to count.
        """
        self._read()
        return self._now - storage_nbytes(exclude)

    @property
    def peak_nbytes(self) -> int:
        """The most bytes alive at once."""
        self._read()
        return self._most

    def _read(self) -> None:
        if not self._inside:
            return
        if self.device.type == "cuda":
            self._now = torch.cuda.memory_allocated(self.device) - self._start
            self._most = torch.cuda.max_memory_allocated(self.device) - self._start
            return
        for nbytes in _stop():
            self._now += nbytes
            self._most = max(self._most, self._now)
        _start()


# torch.profiler would tell the same with an entry in a trace for each, and prints lines of its own


def _start() -> None:
    options = (False, True, False, False, False)  # `True`: memory
    config = ProfilerConfig(ProfilerState.CPU, *options, _ExperimentalConfig())
    torch.autograd._enable_profiler_legacy(config)


def _stop() -> list[int]:
    """Bytes of each allocation since `_start`, in order; freed ones are negative."""
    threads: Any = torch.autograd._disable_profiler_legacy()
    return [
        event.cpu_memory_usage()
        for events in threads
        for event in events
        if event.kind() == "memory_alloc"
    ]
