"""Step time by bytes moved and arithmetic, and the work of a forward.

The rates are of no device in particular: plans rank by bytes and work alone, and launches cost
nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memtrain.activations.trace.fake_forward import trace
from memtrain.compressors import Keep
from memtrain.planner.schemes import BITS2, BITS4, FACTORED, TORCH

COPY = 4.3e12
"""Bytes per second, read plus written: an H200's copy."""
FLOPS = 1e14
"""Arithmetic per second: a tenth of its peak in bfloat16."""
HOST, BUS = 2e11, 5e10
"""Bytes per second of the memory beside the device, read plus written, and of the bus, one way."""
_REREAD = {BITS4: 4.5, FACTORED: 4.1, BITS2: 4.7}
"""Bytes per parameter that two passes over a tensor read again."""


class Work(NamedTuple):
    """The work of a part of a forward."""

    flops: float = 0.0
    """Of matrix products and convolutions."""
    nbytes: float = 0.0
    """Bytes that all ops read and write."""

    @property
    def seconds(self) -> float:
        """The time; arithmetic and traffic do not overlap."""
        return self.flops / FLOPS + self.nbytes / COPY


def step_seconds(
    optimizer: Optimizer, variant: str, n_params: int, nbytes: int, bus: int = 0
) -> float:
    """Return the time of an optimizer's step over `n_params` elements.

    `nbytes` are the bytes of its states under the variant. `bus` are the bytes of gradients and
    weights that cross the bus if the states are in host memory; that the copies overlap with the
    backward is ignored.
    """
    moved = 12.0 * n_params + 2 * nbytes + _REREAD.get(variant, 0.0) * n_params
    if variant != TORCH and type(optimizer) not in (Adam, AdamW, SGD):
        moved += 16.0 * n_params
    return moved / HOST + bus / BUS if bus else moved / COPY


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
        nbytes = 0.0 if _is_view(func) else _moved((args, kwargs, out))
        for path in {"", self.path}:
            before = self.found.get(path, Work())
            self.found[path] = Work(before.flops + flops, before.nbytes + nbytes)
        return out


def _is_view(func: Any) -> bool:
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in func._schema.returns
    )


def _moved(tensors: Any) -> float:
    leaves = {id(x): x for x in tree_leaves(tensors) if isinstance(x, Tensor)}
    return float(sum(x.numel() * x.element_size() for x in leaves.values()))
