"""Payloads in host memory: offloaded after the forward, copied back before the backward."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memtrain.compressors.base import SAVED, Compressor, Key, Packed
from memtrain.kernels.copies_to_host import CopiesToHost, StreamedCopies
from memtrain.kernels.dispatch import is_for_cuda


class Transfers:
    """Copies of tensors to host memory and back, synchronous: not on CUDA, or fake tensors."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._to_host = device, CopiesToHost()

    def out(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start copies to the host."""
        copies, _ = self._to_host.start([*tensors.values()])
        return dict(zip(tensors, copies, strict=True))

    def back(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        """Start copies to the device; the second value is an argument of `wait`."""
        return {name: x.to(self.device, copy=True) for name, x in tensors.items()}, None

    def wait(self, tensors: Mapping[str, Tensor], started: Any) -> None:
        """Make later work on the device wait for the copies of `back`."""
        self._to_host.clear()  # mostly free: copies back have waited for earlier copies out


class _Streams(Transfers):
    """CUDA: pinned host memory, and one side stream per direction.

    Device memory is reused in the order of the stream that was current when a copy to the host
    started (`StreamedCopies`) or a payload was requested. A copy back waits for its copy out. The
    returned tensors belong to the requesting stream; use on another stream is recorded.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._to_host, self._in = StreamedCopies(device), torch.cuda.Stream(device)

    def back(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        copies = {n: torch.empty_like(x, device=self.device) for n, x in tensors.items()}
        stream = torch.cuda.current_stream(self.device)
        self._in.wait_stream(stream)
        self._in.wait_stream(self._to_host.stream)
        with torch.cuda.stream(self._in):
            for name, x in tensors.items():
                copies[name].copy_(x, non_blocking=True)
        return copies, (stream, self._in.record_event())

    def wait(self, tensors: Mapping[str, Tensor], started: Any) -> None:
        requested, come = started
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(come)
        if stream != requested:  # autograd runs each op on the stream of its forward
            for x in tensors.values():
                x.record_stream(stream)
        super().wait(tensors, started)


_plain, _streams = cache(Transfers), cache(_Streams)


def transfers(x: Tensor) -> Transfers | None:
    """Return the transfers for a tensor's payload; None if the tensor is in host memory."""
    fake = isinstance(x, FakeTensor)
    if x.device.type in ("cpu", "meta") and not (fake and is_for_cuda(x)):
        return None
    return (_streams if x.is_cuda and not fake else _plain)(x.device)


_DEVICE = "device"  # an empty tensor on the payload's device
_newest: "dict[torch.device, weakref.ref[_Swapped]]" = {}


class _Swapped(dict[str, Tensor]):
    """A payload's tensors on the host, linked to the payload that was offloaded before it."""

    _coming: tuple[dict[str, Tensor], Any] | None = None

    def __init__(
        self, tensors: Mapping[str, Tensor], lane: Transfers, device: torch.device
    ) -> None:
        marker = torch.empty(0, device=device)
        self.offloaded = frozenset(tensors)
        """Names of the tensors on the host, which take no device memory."""
        super().__init__({**lane.out(tensors), _DEVICE: marker})
        self._lane = lane
        self._before = _newest.get(marker.device)
        _newest[marker.device] = weakref.ref(self)

    def _start(self) -> tuple[dict[str, Tensor], Any]:
        return self._lane.back(_without_device(self))

    def fetch(self) -> dict[str, Tensor]:
        """Return the tensors on their device, and start the copy of the payload needed next."""
        tensors, started = self._coming or self._start()
        self._coming = None
        before = self._before() if self._before else None
        if before is not None and before._coming is None:
            before._coming = before._start()
        self._lane.wait(tensors, started)
        return tensors

    def __del__(self) -> None:
        if self._coming is not None:  # a copy may still write to memory that is freed now
            self._lane.wait(*self._coming)


def _without_device(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if name != _DEVICE}


@dataclass(frozen=True, kw_only=True)
class Host(Compressor):
    """Another compressor's payload, kept in host memory until the backward needs it.

    On CUDA a side stream copies the payload to pinned memory during the forward, and another one
    copies the payload back. The backward needs payloads in reverse order, so fetching a payload
    starts the copy of the payload before it. For tensors in host memory `Host` equals `inner`.

    Args:
        inner: The compressor of the payload; `identity` offloads the tensor itself.

    Raises:
        TypeError: If `inner` is not a compressor.

    Memory:
        On the device, three payloads at a time in the forward and two in the backward: the device
        waits for a slower bus. On the host, the payload of `inner`.

    Example:
        >>> from memtrain.compressors.group import Group
        >>> compressor = Host(inner=Group(bits=2))
        >>> packed = compressor.compress(torch.ones(512), key=Key())
        >>> bool((compressor.decompress(packed) == 1).all())
        True

    Reference:
        Level L4 of ActNN; level L3 of GACT (Liu et al., ICML 2022, arXiv:2206.11357, section 6).
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
        """The parts of `inner`, and a marker of the device."""
        return (*self.inner.parts, _DEVICE)

    def serves(self, role: str) -> bool:
        """Return whether `inner` serves the role; ops read derivative codes, which stay."""
        return super().serves(role) and self.inner.serves(role) and not self.inner.gives_derivative

    @property
    def shaped(self) -> bool:
        """Whether `inner` takes tensors with their shape and strides."""
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

        The payload's tensors are then on the CPU, with an empty tensor `device` on the device of
        `x`.
        """
        packed = self.inner.compress(x, key=key)
        lane = transfers(x)
        if lane is None or not packed.tensors:
            return packed
        return packed._replace(tensors=_Swapped(packed.tensors, lane, x.device))

    def check_payload(self, packed: Packed) -> None:
        """Do nothing: `inner` checks the tensors that are copied back."""

    def decompress(self, packed: Packed) -> Tensor:
        """Return the tensor on its original device."""
        tensors = packed.tensors
        if isinstance(tensors, _Swapped):
            packed = packed._replace(tensors=tensors.fetch())
        elif _DEVICE in tensors:  # plain tensors, as in a copied payload: no prefetch
            lane, back = transfers(tensors[_DEVICE]), _without_device(tensors)
            if lane is not None:
                back, started = lane.back(back)
                lane.wait(back, started)
            packed = packed._replace(tensors=back)
        return self.inner.decompress(packed)
