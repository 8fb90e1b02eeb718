"""What a forward costs, block by block, on fake tensors: arithmetic and bytes moved."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memtrain.activations.trace.fake_forward import trace
from memtrain.compressors import Keep


class Work(NamedTuple):
    """Of a part of a forward."""

    flops: float = 0.0
    """Of matrix products and convolutions."""
    nbytes: float = 0.0
    """Read and written by all ops."""
    n_ops: float = 0.0
    """That do not only make views."""


def measure_forward(model: nn.Module, batch: Any, paths: Sequence[str]) -> dict[str, Work]:
    """Count the work of a forward without running it.

    Args:
        model: Real or fake; not changed.
        batch: What it is called with.
        paths: Of modules that are counted on their own.

    Returns:
        Path -> its work; `""` is the whole forward.
    """
    # Imports triton where there is one: not before it is needed.
    from torch.utils.flop_counter import flop_registry

    counter = _Counter(flop_registry)
    handles = [model.register_forward_pre_hook(counter.start, prepend=True)]
    handles.append(model.register_forward_hook(counter.stop, always_call=True))
    for path in paths:
        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(counter.entering(path), prepend=True))
        handles.append(module.register_forward_hook(counter.leaving, always_call=True))
    try:
        trace(model, batch, lambda site: Keep("counted only"))
    finally:
        for handle in handles:
            handle.remove()
    return counter.found


class _Counter(TorchDispatchMode):
    def __init__(self, flops: Mapping[Any, Any]) -> None:
        super().__init__()
        self.flops = flops
        self.found = {"": Work()}
        self.path = ""

    def start(self, module: nn.Module, args: Any) -> None:
        self.__enter__()

    def stop(self, module: nn.Module, args: Any, output: Any) -> None:
        self.__exit__(None, None, None)

    def entering(self, path: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self.path = path

        return enter

    def leaving(self, module: nn.Module, args: Any, output: Any) -> None:
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
