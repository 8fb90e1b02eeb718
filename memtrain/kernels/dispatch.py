"""Which of the three backends serves a call: `reference`, `triton` or `cpu`."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _len_torch_dispatch_stack as _modes
from torch.compiler import is_compiling

from memtrain.kernels import cpu

BACKENDS = ("reference", "triton", "cpu")

# A module global: Dynamo cannot trace a ContextVar (fullgraph would fail), and what is a thread's
# own would not reach a backward on CUDA, which autograd runs in threads of its own.
forced: str | None = None
"""The backend that `backend` forces now."""


class _Simulation(threading.local):
    """The step that each thread simulates.

    A backward of simulated tensors, which are on the CPU, runs in the thread that calls it.
    """

    def __init__(self) -> None:  # Dynamo guards what an instance has, not what its class has
        self.device: str | None = None
        self.on_host = False
        self.in_flight: dict[int, Any] = {}


simulation = _Simulation()
"""`device`: the device type of the step that this thread simulates; `on_host`: whether the running
op is work of the host on host memory; `in_flight`: tensors that are being copied to the host, until
the outermost block of `simulating` ends."""


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Force one backend inside a `with` block; a forced backend never falls back.

    `"reference"` is pure torch. `"triton"` takes CUDA tensors, and CPU tensors if
    `TRITON_INTERPRET=1` was set before triton's import. `"cpu"` is the C++ library, and the
    reference for patches, norms and rounding to float formats.

    Example:
        >>> with backend("reference"):
        ...     choose(torch.zeros(1))
        'reference'
    """
    global forced
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} is unknown; allowed: {', '.join(BACKENDS)}")
    if name == "triton" and not has_triton():
        raise RuntimeError("backend 'triton' was requested, but triton is not installed")
    if name == "cpu" and cpu.library() is None:
        raise RuntimeError("backend 'cpu' was requested, but the C++ library was not built")
    previous, forced = forced, name
    try:
        yield
    finally:
        forced = previous


@contextmanager
def simulating(device: str | None = None) -> Iterator[None]:
    """Simulate a step of this thread on fake tensors, for a device of type `"cpu"` or `"cuda"`.

    Fake tensors are on the CPU whichever device they represent. Writes in place and reads of
    addresses are skipped. Without a device, the device of the block around this one is used, else
    `"cpu"`.

    Example:
        >>> with simulating("cuda"), simulating():
        ...     is_simulated(), is_for_cuda(torch.ones(2))
        (True, True)
    """
    before = simulation.device
    simulation.device = device or before or "cpu"
    try:
        yield
    finally:
        simulation.device = before
        if before is None:
            simulation.in_flight.clear()


@contextmanager
def host_work(on_host: bool = True) -> Iterator[None]:
    """Count allocations inside the block as host memory, or as device memory in a callback."""
    before, simulation.on_host = simulation.on_host, on_host
    try:
        yield
    finally:
        simulation.on_host = before


def is_host_work() -> bool:
    """Return whether allocations are in host memory: fake tensors of a device do not show it."""
    return simulation.on_host


def is_simulated() -> bool:
    """Return whether this is inside a block of `simulating`."""
    return simulation.device is not None


def is_for_cuda(x: Tensor) -> bool:
    """Return whether `x` is on CUDA, or represents a tensor on CUDA in a simulated step."""
    return x.is_cuda or (simulation.device == "cuda" and not simulation.on_host)


@cache
def has_triton() -> bool:
    """Return whether triton can be imported, without importing it."""
    return find_spec("triton") is not None


def choose(x: Tensor) -> str:
    """Return the backend for a call on `x`: the forced one, else the best for its device."""
    if forced is not None:
        return forced
    if x.is_cuda and has_triton():
        return "triton"
    if x.is_cpu and cpu.library() is not None:
        return "cpu"
    return "reference"


def backend_of(x: Tensor) -> str:
    """Return the backend for the tensor that `x` represents in a simulated step, else `choose(x)`.

    In a step that is simulated for CUDA, the backend is `"triton"`, also if triton is missing.
    """
    if forced is None and simulation.device == "cuda" and not simulation.on_host:
        return "triton"
    return choose(x)


def is_plain(x: Tensor) -> bool:
    """Return whether `x` has data, and no compiler, mode, subclass or autograd observes a call.

    The implementation can then be called directly: the dispatcher costs more than a small call.
    """
    return (
        type(x) is Tensor
        and not is_compiling()
        and not x.is_meta
        and not (is_grad_enabled() and x.requires_grad)
        and _modes() == 0
    )


def is_plain_cpu(x: Tensor) -> bool:
    """Return `is_plain(x) and choose(x) == "cpu"`, in less time."""
    return (
        (forced is None or forced == "cpu")
        and x.is_cpu
        and type(x) is Tensor
        and not is_compiling()
        and not (x.requires_grad and is_grad_enabled())
        and _modes() == 0
        and cpu.library() is not None
    )


def is_ordinary() -> bool:
    """Return whether no backend is forced and no compiler or mode is active."""
    return (forced is None or forced == "cpu") and not is_compiling() and _modes() == 0


_LIBRARY = torch.library.Library("memtrain", "FRAGMENT")


INSIDE: dict[str, Callable[..., int]] = {}
"""Name of an op -> bytes that it holds on the CPU besides its arguments and results."""
INSIDE_CUDA: dict[str, Callable[..., int]] = {}
"""The same of its Triton form."""


def register(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    inside: Callable[..., int] | None = None,
    inside_cuda: Callable[..., int] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> Any:
    """Register an op `memtrain::<name>`, so that FakeTensorMode and torch.compile see it.

    Args:
        schema: A torch schema, `"name(Tensor x, int bits) -> Tensor"`.
        implementation: Serves CPU and CUDA; it calls `choose` itself.
        fake: Returns empty tensors of the right shapes and dtypes, and reads no data.
        inside: Returns the bytes of temporary tensors on the CPU for the op's arguments, which
            predicted peaks include. Without it, they count as 0.
        inside_cuda: The same for the Triton kernel.
        tags: Torch's tags of the op, for compilers.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=tags)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"memtrain::{name}", fake, lib=_LIBRARY)
    for function, known in ((inside, INSIDE), (inside_cuda, INSIDE_CUDA)):
        if function is not None:
            known[f"memtrain::{name}"] = function
    return getattr(torch.ops.memtrain, name)


def readable(x: Tensor, *native: torch.dtype) -> Tensor:
    """Return `x` contiguous with one of the `native` dtypes, else in float32; maybe a copy."""
    if x.dtype in native:
        return x.contiguous()
    return x.to(torch.float32, memory_format=torch.contiguous_format)


def copies(x: Tensor, *native: torch.dtype) -> int:
    """Return the bytes of the copy that `readable` makes."""
    return contiguous_nbytes(x) if x.dtype in native else 4 * x.numel()


def contiguous_nbytes(x: Tensor) -> int:
    """Return the bytes that `x.contiguous()` allocates."""
    return 0 if x.is_contiguous() else x.nbytes
