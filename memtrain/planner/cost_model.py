"""Step time by bytes moved and arithmetic: the rates of a device, and the work of a forward."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memtrain.activations.trace.fake_forward import trace
from memtrain.compressors import Keep
from memtrain.planner.knapsack import Option
from memtrain.planner.schemes import BITS2, BITS4, FACTORED, TORCH

_REREAD = {BITS4: 4.5, FACTORED: 4.1, BITS2: 4.7}
"""Bytes per parameter that two passes over a tensor read again."""


class Work(NamedTuple):
    """The work of a part of a forward."""

    flops: float = 0.0
    """Of matrix products and convolutions."""
    nbytes: float = 0.0
    """Bytes that all ops read and write."""
    n_ops: float = 0.0
    """Ops, without those that only make views."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Throughputs of a device, and its fixed cost per op.

    The defaults are of no device in particular: bytes at 4.3 TB/s, an H200's copy, and arithmetic
    at a tenth of its peak in bfloat16, so that plans rank by bytes and work alone; a launch costs
    nothing. Beside it are a host of 200 GB/s and a bus of 50 GB/s each way.

    Example:
        >>> Rates().seconds(Work(flops=0.0, nbytes=4.3e12))
        1.0
    """

    name: str = "byte counts"
    """Of the device; printed beside a plan."""
    copy: float = 4.3e12
    """Bytes per second, read plus written."""
    flops: float = 1e14
    """Of matrix products, per second."""
    pack: float = 4.3e12
    """Bytes per second, read plus written, of compressing and decompressing in groups."""
    launch: float = 0.0
    """Seconds that any op takes besides its bytes and its arithmetic."""
    call: float = 0.0
    """Seconds that compressing, or decompressing, takes besides its bytes."""
    host: float = 2e11
    """Bytes per second, read plus written, of the memory beside the device."""
    bus: float = 5e10
    """Bytes per second between that and the device, one way."""

    def __post_init__(self) -> None:
        for name in ("copy", "flops", "pack", "launch", "call", "host", "bus"):
            value, least = getattr(self, name), name in ("launch", "call")
            sound = isinstance(value, int | float) and 0 <= value < float("inf")
            if not sound or (value == 0 and not least):
                allowed = "0 or more" if least else "above 0"
                raise ValueError(f"{name}={value!r} is out of range; allowed: {allowed}")

    def seconds(self, work: Work) -> float:
        """Return the time of a part of a forward; arithmetic and traffic do not overlap."""
        return work.flops / self.flops + work.nbytes / self.copy + work.n_ops * self.launch

    def compressing(self, option: Option) -> float:
        """Return the time to compress in the forward and to decompress in the backward.

        A tensor is read and written once more, and its payload is written and read. A replaced op
        only writes and reads its payload.
        """
        return option.moved / self.pack + option.calls * self.call

    def step(
        self, optimizer: Optimizer, variant: str, n_params: int, nbytes: int, bus: int = 0
    ) -> float:
        """Return the time of an optimizer's step over `n_params` elements.

        `nbytes` are the bytes of its states under the variant. `bus` are the bytes of gradients and
        weights that cross the bus if the states are in host memory; that the copies overlap with
        the backward is ignored.
        """
        moved = 12.0 * n_params + 2 * nbytes + _REREAD.get(variant, 0.0) * n_params
        if variant != TORCH and type(optimizer) not in (Adam, AdamW, SGD):
            moved += 16.0 * n_params
        return moved / self.host + bus / self.bus if bus else moved / self.copy


def measure_forward(model: nn.Module, batch: Any, paths: Sequence[str]) -> dict[str, Work]:
    """Count the work of a fake forward: of all modules (key `""`), and of modules by path."""
    # Imports triton where there is one: not before it is needed.
    from torch.utils.flop_counter import flop_registry

    counter = _Counter(flop_registry)

    @contextmanager
    def counted(copy: nn.Module) -> Iterator[None]:
        for path in paths:
            module = copy.get_submodule(path)
            module.register_forward_pre_hook(counter.entering(path), prepend=True)
            module.register_forward_hook(counter.exited, always_call=True)
        with counter:
            yield

    trace(model, batch, lambda site: Keep("counted only"), observe=counted)
    return counter.found


class _Counter(TorchDispatchMode):
    def __init__(self, flops: Mapping[Any, Any]) -> None:
        super().__init__()
        self.flops = flops
        self.found = {"": Work()}
        self.path = ""

    def entering(self, path: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self.path = path

        return enter

    def exited(self, module: nn.Module, args: Any, output: Any) -> None:
        self.path = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count = self.flops.get(func._overloadpacket)
        flops = float(count(*args, **kwargs, out_val=out)) if count else 0.0
        view = _is_view(func)
        nbytes = 0.0 if view else _moved((args, kwargs, out))
        for path in {"", self.path}:
            before = self.found.get(path, Work())
            self.found[path] = Work(
                before.flops + flops, before.nbytes + nbytes, before.n_ops + (not view)
            )
        return out


def _is_view(func: Any) -> bool:
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in func._schema.returns
    )


def _moved(tensors: Any) -> float:
    leaves = {id(x): x for x in tree_leaves(tensors) if isinstance(x, Tensor)}
    return float(sum(x.numel() * x.element_size() for x in leaves.values()))
