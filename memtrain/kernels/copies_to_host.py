"""Copies of a device's tensors to host memory, beside the device's work."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain.kernels.dispatch import host_work, simulation

AT_ONCE = 2
"""Copies to the host that may be unfinished when another one starts."""


class CopiesToHost:
    """Copies without a stream: for all devices except CUDA, and for fake tensors.

    In a simulated step for CUDA as many tensors stay alive as in a real one.
    """

    def start(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Start copies, and return them and the event at their end; `tensors` may be freed."""
        if simulation.device == "cuda":
            simulation.in_flight.setdefault(id(self), deque(maxlen=AT_ONCE)).append(tensors)
        with host_work():
            return [x.to("cpu", copy=True) for x in tensors], None

    def clear(self) -> None:
        """Make the current work of the device wait for all copies, and release their tensors."""
        simulation.in_flight.pop(id(self), None)


class StreamedCopies(CopiesToHost):
    """Copies of a CUDA device to pinned memory, on a side stream.

    Each tensor is kept until its own stream waits for its copy. `record_stream` would wait until
    the host has *seen* a copy end. A host that runs ahead of the device sees no copy end before it
    waits itself, so that no memory would be reused.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self._kept: deque[tuple[Any, Any, Any]] = deque()

    def start(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """As `CopiesToHost.start`; at most `AT_ONCE` earlier copies are unfinished."""
        while len(self._kept) >= AT_ONCE:
            self._release()
        stream, copies = torch.cuda.current_stream(self.device), [*map(pinned, tensors)]
        self.stream.wait_stream(stream)
        with torch.cuda.stream(self.stream):
            for copy, x in zip(copies, tensors, strict=True):
                copy.copy_(x, non_blocking=True)
        ended = torch.cuda.Event(blocking=True)  # a host that spins would take the steps' core
        ended.record(self.stream)
        self._kept.append((stream, ended, tensors))
        return copies, ended

    def clear(self) -> None:
        """As `CopiesToHost.clear`."""
        while self._kept:
            self._release()

    def _release(self) -> None:
        try:
            stream, ended, _ = self._kept.popleft()
        except IndexError:  # another thread, in its backward or step, has just released it
            return
        stream.wait_event(ended)


def pinned(like: Tensor) -> Tensor:
    """Allocate pinned memory of the host."""
    return torch.empty_like(like, device="cpu", pin_memory=True)
