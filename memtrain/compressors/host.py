"""Payloads in host memory: offloaded after the forward, fetched before the backward."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memtrain.compressors.base import SAVED, Compressor, Key, Packed
from memtrain.kernels.copies_in_flight import AT_ONCE, CopiesInFlight
from memtrain.kernels.dispatch import host_work, is_for_cuda, simulation


class Transfers(Protocol):
    """Copies of tensors to host memory and back, concurrent with the device's work."""

    def out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start copies to the host."""
        ...

    def back(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        """Start copies to the device; the second value is for `wait`."""
        ...

    def wait(self, tensors: Mapping[str, Tensor], started: Any) -> None:
        """Make later work on the device wait for the copies of `back`."""
        ...


class _Streams:
    """CUDA: pinned host memory, and a side stream each way.

    Device memory is reused in the order of the stream that was current when a copy to the host
    started (`CopiesInFlight`) or a payload was requested. A copy back waits for its copy
    out. The returned tensors belong to the requesting stream; use on another stream is recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._in_flight = CopiesInFlight()

    def out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stream = torch.cuda.current_stream(self.device)
        self._in_flight.make_room()
        self._out.wait_stream(stream)
        with torch.cuda.stream(self._out):
            copies = {name: _pinned(x) for name, x in tensors.items()}
            for name, x in tensors.items():
                copies[name].copy_(x, non_blocking=True)
        self._in_flight.add(stream, self._out.record_event(), [*tensors.values()])
        return copies

    def back(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        copies = {n: torch.empty_like(x, device=self.device) for n, x in tensors.items()}
        stream = torch.cuda.current_stream(self.device)
        self._in.wait_stream(stream)
        self._in.wait_stream(self._out)
        with torch.cuda.stream(self._in):
            for name, x in tensors.items():
                copies[name].copy_(x, non_blocking=True)
        return copies, (stream, self._in.record_event())

    def wait(self, tensors: Mapping[str, Tensor], started: Any) -> None:
        asked, come = started
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(come)
        if stream != asked:  # autograd runs each op on the stream of its forward
            for x in tensors.values():
                x.record_stream(stream)
        self._in_flight.clear()  # mostly at no cost: copies back have waited for earlier copies out


def _pinned(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)


class _Copies:
    """Any other device, and fake tensors: synchronous copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: x.to("cpu") for name, x in tensors.items()}

    def back(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        return {name: x.to(self.device) for name, x in tensors.items()}, None

    def wait(self, tensors: Mapping[str, Tensor], started: Any) -> None:
        """Do nothing: the copies are complete."""


class _Simulated:
    """Fake tensors of CUDA: as many copies are in flight as in a real run."""

    def out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        in_flight = simulation.in_flight
        del in_flight[: max(0, len(in_flight) + 1 - AT_ONCE)]
        in_flight.append([*tensors.values()])
        with host_work():
            return {name: torch.empty_like(x) for name, x in tensors.items()}

    def back(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        return {name: torch.empty_like(x) for name, x in tensors.items()}, None

    def wait(self, tensors: Mapping[str, Tensor], started: Any) -> None:
        simulation.in_flight.clear()


_SIMULATED = _Simulated()


@cache
def _streams(device: torch.device) -> Transfers:
    return _Streams(device)


def transfers(x: Tensor) -> Transfers | None:
    """Return how a tensor's payload is offloaded; None if the tensor is in host memory.

    Args:
        x: The tensor.

    Example:
        >>> transfers(torch.ones(1)) is None
        True
    """
    fake = isinstance(x, FakeTensor)
    if fake and not x.is_cuda and is_for_cuda(x):
        return _SIMULATED
    if x.device.type in ("cpu", "meta"):
        return None
    real = x.is_cuda and not fake
    return _streams(x.device) if real else _Copies(x.device)


_DEVICE = "device"  # an empty tensor on the payload's device
_newest: "dict[torch.device, weakref.ref[_Swapped]]" = {}


class _Swapped(dict[str, Tensor]):
    """A payload's tensors on the host, linked to the payload that was offloaded just before."""

    _coming: tuple[dict[str, Tensor], Any] | None = None

    def __init__(
        self, tensors: Mapping[str, Tensor], lane: Transfers, device: torch.device
    ) -> None:
        marker = torch.empty(0, device=device)
        self.offloaded = frozenset(tensors)
        """Names of the tensors on the host, which take no bytes of the device."""
        super().__init__({**lane.out(tensors), _DEVICE: marker})
        self._lane = lane
        self._before = _newest.get(marker.device)
        _newest[marker.device] = weakref.ref(self)

    def prefetch(self) -> None:
        """Start the copy back, if it has not started."""
        if self._coming is None:
            self._coming = self._start()

    def _start(self) -> tuple[dict[str, Tensor], Any]:
        return self._lane.back(_without_device(self))

    def fetch(self) -> dict[str, Tensor]:
        """Return the tensors on their device, and start the copy of the payload needed next."""
        tensors, started = self._coming or self._start()
        self._coming = None
        before = self._before() if self._before else None
        if before is not None:
            before.prefetch()
        self._lane.wait(tensors, started)
        return tensors

    def __del__(self) -> None:
        if self._coming is not None:  # a copy may still write into memory that is freed now
            self._lane.wait(*self._coming)


def _without_device(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if name != _DEVICE}


@dataclass(frozen=True, kw_only=True)
class Host(Compressor):
    """Stores another compressor's payload in host memory until the backward needs it.

    On CUDA the payload is copied to pinned memory on a side stream, while the forward goes on, and
    is copied back on another; fetching a payload starts the copy of the payload made before it,
    which the backward needs next. For a tensor in host memory, `Host` equals its inner compressor.
    Results do not change.

    Args:
        inner: Makes the payload; `identity` offloads the tensor as it is.

    Raises:
        TypeError: If `inner` is no compressor.

    Memory:
        On the device up to three payloads at a time in forward, two in backward: the device waits
        where the host's bus is slower than that; on the host that of `inner`.

    Example:
        >>> from memtrain.compressors.group import Group
        >>> compressor = Host(inner=Group(bits=2))
        >>> packed = compressor.compress(torch.ones(512), key=Key())
        >>> bool((compressor.decompress(packed) == 1).all())
        True

    Reference:
        ActNN's level L4 and GACT's L3 swap their codes; Liu et al., GACT, ICML 2022,
        arXiv:2206.11357, section 6.
    """

    roles = SAVED

    inner: Any

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compressor):
            raise TypeError(
                f"inner={self.inner!r} is a {type(self.inner).__name__}, not a compressor"
            )

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of `inner`, and the device."""
        return (*self.inner.parts, _DEVICE)

    def serves(self, role: str) -> bool:
        """Return whether `inner` serves the role; derivative codes are excluded: ops read them."""
        return super().serves(role) and self.inner.serves(role) and not self.inner.gives_derivative

    @property
    def shaped(self) -> bool:
        """Whether `inner` takes the tensor itself, not a flat one."""
        return self.inner.shaped

    @property
    def whole_rows(self) -> bool:
        """Whether `inner` depends on the shape."""
        return self.inner.whole_rows

    def for_saved(self, shape: torch.Size) -> "Host":
        """Return `Host` with `inner`'s compressor for this shape."""
        return Host(inner=self.inner.for_saved(shape))

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Compress `x` with `inner` and start the copy to the host.

        Args:
            x: What `inner` takes.
            key: Feeds `inner`.

        Returns:
            The payload of `inner`, its tensors on the CPU, and an empty one, `device`, where they
            were; of a tensor in host memory, the payload of `inner`.
        """
        packed = self.inner.compress(x, key=key)
        lane = transfers(x)
        if lane is None or not packed.tensors:
            return packed
        return packed._replace(tensors=_Swapped(packed.tensors, lane, x.device))

    def check_payload(self, packed: Packed) -> None:
        """Check nothing: `inner` checks the tensors that are copied back."""

    def decompress(self, packed: Packed) -> Tensor:
        """Return the tensor on its original device."""
        tensors = packed.tensors
        if isinstance(tensors, _Swapped):
            packed = packed._replace(tensors=tensors.fetch())
        elif _DEVICE in tensors:  # plain tensors, such as of a copied payload: not prefetched
            lane, back = transfers(tensors[_DEVICE]), _without_device(tensors)
            if lane is not None:
                back, started = lane.back(back)
                lane.wait(back, started)
            packed = packed._replace(tensors=back)
        return self.inner.decompress(packed)
