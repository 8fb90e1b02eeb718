"""Copies between a device and host memory, beside the work of both."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from threading import BoundedSemaphore
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memtrain.kernels.copies_to_host import CopiesToHost, StreamedCopies, pinned

IN_FLIGHT = 4
"""Gradients between their copy and their step: a backward waits for a slower host."""


class HostCopies:
    """Copies of gradients to the host and of weights to the device, without streams.

    They serve all devices except CUDA, and fake tensors.
    """

    beside = False
    """Whether the device runs while the host steps: the host then steps in a thread."""

    def __init__(self) -> None:
        self._to_host = CopiesToHost()

    def host_memory(self, like: Tensor) -> Tensor:
        """Allocate host memory for fast copies."""
        return torch.empty_like(like, device="cpu")

    def to_host(self, x: Tensor) -> tuple[Tensor, Any]:
        """Start a copy to the host; the second value is for `wait`. `x` may be freed at once."""
        copies, started = self._to_host.start([x])
        return copies[0], started

    def wait(self, started: Any) -> None:
        """Block the host until a copy to it is complete."""

    def to_device(self, value: Tensor, param: Tensor) -> None:
        """Start a copy into a tensor of the device; `value` must not change before `join`."""
        param.copy_(value)

    def join(self) -> None:
        """Make later work of the device wait for the copies of `to_device`; do not block."""
        self._to_host.clear()


class CudaCopies(HostCopies):
    """Copies through pinned host memory, on one side stream per direction."""

    beside = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._to_host, self._up = StreamedCopies(device), torch.cuda.Stream(device)

    def host_memory(self, like: Tensor) -> Tensor:
        """Allocate pinned memory."""
        return pinned(like)

    def wait(self, started: Any) -> None:
        """As `HostCopies.wait`."""
        started.synchronize()

    def to_device(self, value: Tensor, param: Tensor) -> None:
        """As `HostCopies.to_device`: the host has waited for the gradient, so nothing reads it."""
        with torch.cuda.stream(self._up):
            param.copy_(value, non_blocking=True)

    def join(self) -> None:
        """As `HostCopies.join`."""
        torch.cuda.current_stream(self.device).wait_stream(self._up)
        super().join()


class HostWorker:
    """A thread that steps parameters on the host while the device runs."""

    def __init__(self) -> None:
        self._room = BoundedSemaphore(IN_FLIGHT)
        self._thread = ThreadPoolExecutor(1, "memtrain-host-states")  # starts with its first job
        self._jobs: list[Future[None]] = []

    def submit(self, send: Callable[[], Any], step: Callable[[Any], None]) -> None:
        """Call `send`, which starts a gradient's copy, and `step` with its result in the thread."""
        room = self._room
        room.acquire()
        try:
            job = self._thread.submit(step, send())
        except BaseException:
            room.release()
            raise
        job.add_done_callback(lambda _: room.release())
        self._jobs.append(job)

    def wait(self) -> None:
        """Wait for all steps; errors stay for `finish`."""
        wait(self._jobs)

    def finish(self, *, drop_errors: bool = False) -> None:
        """Wait for all steps, and raise the first error of a step."""
        jobs, self._jobs = self._jobs, []
        errors = [error for job in jobs if (error := job.exception()) is not None]
        if errors and not drop_errors:
            raise errors[0]


@cache
def _cuda(device: torch.device) -> HostCopies:
    return CudaCopies(device)


_PLAIN = HostCopies()


def copies_of(x: Tensor) -> HostCopies:
    """Return the copies that serve a parameter."""
    real = x.is_cuda and not isinstance(x, FakeTensor)
    return _cuda(x.device) if real else _PLAIN
