"""Copies between a device and host memory, beside the work of both."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from threading import BoundedSemaphore
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memtrain.kernels.copies_in_flight import AT_ONCE, CopiesInFlight

IN_FLIGHT = 4
"""Gradients on their way to their step: a backward waits for a slower host."""


class HostCopies:
    """How gradients go to the host, and weights come back: copies that are waited for.

    So they are on any device but CUDA, in host memory itself, and for fake tensors.
    """

    beside = False
    """Whether the device works on while the host does: the host then works in a thread."""

    def host_memory(self, like: Tensor) -> Tensor:
        """Make a tensor in host memory that copies are fast from and to; not filled."""
        return torch.empty_like(like, device="cpu")

    def to_host(self, x: Tensor) -> tuple[Tensor, Any]:
        """Start a copy to the host; the second value is for `wait`. `x` may be freed at once."""
        return x.to("cpu", copy=True), None

    def wait(self, started: Any) -> None:
        """Let the host wait until a copy to it has been made."""

    def to_device(self, value: Tensor, param: Tensor) -> None:
        """Start a copy into a tensor of the device; `value` stays as it is until `join`."""
        param.copy_(value)

    def join(self) -> None:
        """Let work of the device that follows see what `to_device` sends; the host goes on."""


class CudaCopies(HostCopies):
    """CUDA: pinned host memory, and a side stream each way.

    At most `AT_ONCE` copies are in flight, so a backward keeps at most that many more gradients,
    however far the host runs ahead.
    """

    beside = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._in_flight = CopiesInFlight()

    def host_memory(self, like: Tensor) -> Tensor:
        """As `HostCopies.host_memory`: pinned."""
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def to_host(self, x: Tensor) -> tuple[Tensor, Any]:
        """As `HostCopies.to_host`."""
        stream = torch.cuda.current_stream(self.device)
        self._in_flight.make_room()
        copy = self.host_memory(x)
        self._down.wait_stream(stream)
        with torch.cuda.stream(self._down):
            copy.copy_(x, non_blocking=True)
            made = torch.cuda.Event(blocking=True)  # a host that spins would take the steps' core
            made.record(self._down)
        self._in_flight.add(stream, made, x)
        return copy, made

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
        self._in_flight.clear()


class HostWorker:
    """A thread that steps parameters on the host while the device works on."""

    def __init__(self) -> None:
        self._room = BoundedSemaphore(IN_FLIGHT)
        self._thread = ThreadPoolExecutor(1, "memtrain-host-states")  # starts with its first job
        self._jobs: list[Future[None]] = []

    def submit(self, send: Callable[[], Any], step: Callable[[Any], None]) -> None:
        """Send a gradient now, and step with it in the thread.

        Args:
            send: Starts the gradient's copy to the host.
            step: Called with the result of `send`.
        """
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
        """Wait until all is stepped; errors stay for `finish`."""
        wait(self._jobs)

    def finish(self, *, drop_errors: bool = False) -> None:
        """Wait until all is stepped, and raise the first error of a step."""
        jobs, self._jobs = self._jobs, []
        errors = [error for job in jobs if (error := job.exception()) is not None]
        if errors and not drop_errors:
            raise errors[0]


class DelayedCopies(HostCopies):
    """Copies of fake tensors that stand for those of CUDA: as many copies are in flight."""

    def __init__(self) -> None:
        self._in_flight: deque[Tensor] = deque(maxlen=AT_ONCE)

    def to_host(self, x: Tensor) -> tuple[Tensor, Any]:
        """As `HostCopies.to_host`."""
        self._in_flight.append(x)
        return super().to_host(x)

    def join(self) -> None:
        """As `HostCopies.join`."""
        self._in_flight.clear()


@cache
def _cuda(device: torch.device) -> HostCopies:
    return CudaCopies(device)


_PLAIN = HostCopies()


def copies_of(x: Tensor) -> HostCopies:
    """How a tensor's values go to the host and back.

    Args:
        x: A parameter.

    Example:
        >>> copies_of(torch.ones(1)).beside
        False
    """
    real = x.is_cuda and not isinstance(x, FakeTensor)
    return _cuda(x.device) if real else _PLAIN
