"""Record allocation and release of the storages of a training step."""

import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memtrain.activations.trace.compiled_parts import running_node
from memtrain.activations.trace.fake_results import as_real
from memtrain.audit.live_storages import storages
from memtrain.audit.peak.timeline import (
    NO_STORAGE,
    NOTHING,
    RECOMPUTED,
    TEMPORARIES,
    Event,
    Phase,
)
from memtrain.kernels.dispatch import is_host_work

_SCALAR = torch.ops.aten._local_scalar_dense.default
COMPRESSED = "compressed"
"""The name of memtrain's kernels in labels."""
INSIDE = 0
"""The number of the storage that stands for the buffers inside ops."""
_ADD = torch.ops.aten.add.Tensor
_DEVICE = torch.ops.prim.device.default
"""The op that reads a fake tensor's `device`: more than half of all ops."""
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_CALL = nn.Module._wrapped_call_impl.__code__
_NODE_OF_GRADIENT = "torch::autograd::AccumulateGrad"


class StorageRecorder(TorchDispatchMode):
    """Records every storage that ops allocate inside a `with` block, and its release, real or fake.

    The mode is below autograd and adds no hook to a module: the running module is found in Python's
    frames, since hooks of modules would change the interception.

    `fake` is for tensors without data: a number that is read after the forward (an optimizer's step
    counter, a norm) is then 0.5, or 1 for integers. Forwards and backwards run under `corrections`,
    to save the tensors that another device would save. With `separate_host`, tensors in host memory
    do not count. `inside` returns the bytes that an op allocates and frees while it runs.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fake: bool = False,
        corrections: Callable[[], AbstractContextManager[Any]] = nullcontext,
        inside: Callable[[Any, Any, Any, Any], int] = lambda func, args, kwargs, result: 0,
        separate_host: bool = False,
    ) -> None:
        super().__init__()
        self.separate_host = separate_host
        self.events: list[Event] = []
        self.categories: list[str] = [TEMPORARIES]  # of `INSIDE`
        """The category of each storage, by its number."""
        self.inside = inside
        self.phase: Phase = "forward"
        self.corrections = corrections
        self._fake = fake
        self._names = {module: name for name, module in model.named_modules()}
        self._parameters = {id(p): name for name, p in model.named_parameters()}
        self._recomputes = False  # whether a forward runs within the backward
        # Numbers of autograd nodes, ascending, and the ops that made them.
        self._nodes: list[int] = []
        self._ops: list[str] = []
        self._label = "start"
        self._numbers: dict[int, int] = {}  # of living storages, by address
        self._sizes: list[int] = [0]
        self._refs: dict[int, Any] = {}
        self._born: list[int] = []  # since the outermost forward began

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled parts run as compiled, and graphs run op by op."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op, and register its new storages."""
        kwargs = kwargs or {}
        if func is _DEVICE:
            return func(*args)
        if self._fake and func is _SCALAR and self.phase != "forward":
            return 0.5 if args[0].is_floating_point() else 1
        result = func(*args, **kwargs)
        if self._fake:
            result = as_real(func, args, result)
        made = list(storages(tree_leaves(result)))
        if any(storage._cdata not in self._numbers for storage in made):
            made = self._without_older(made, func, (args, kwargs))
        if func is _ADD and self.phase == "backward" and _is_summed_in_place(args[0]):
            self._release(args[0].untyped_storage()._cdata)
        on_host = self.separate_host and is_host_work()
        inside = 0 if on_host else self.inside(func, args, kwargs, result)
        new = any(storage.nbytes() and storage._cdata not in self._numbers for storage in made)
        if inside or new:
            self._label = self._describe(func)
        for storage in made:
            self._see(storage, NOTHING if on_host else TEMPORARIES)
        self._change(INSIDE, inside)
        self._change(INSIDE, 0)
        return result

    def _without_older(self, made: list[Any], func: Any, inputs: Any) -> list[Any]:
        """Leave out unknown storages of an op's inputs."""
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(...): first seen as argument
            return made
        # A difference of sets would go through all that is alive.
        addresses = {storage._cdata for storage in storages(tree_leaves(inputs))}
        older = {address for address in addresses if address not in self._numbers}
        return [storage for storage in made if storage._cdata not in older]

    def adopt(self, tensors: Iterable[Tensor], category: str) -> None:
        """Put these tensors, known or older, into a category of `timeline.PARTS`."""
        for storage in storages(tensors):
            self._see(storage, category)
            self.categories[self._numbers[storage._cdata]] = category

    def begin(self, phase: Phase) -> None:
        """Begin a phase of the step."""
        if self._recomputes:
            self._recompute(begins=False)
        self.phase = phase
        self._label = phase
        self.events.append((NO_STORAGE, 0, phase, phase))

    def keep(self, category: str) -> None:
        """Put the live storages of the forward that has just ended into a category."""
        for number in self._born:
            if number in self._refs and self.categories[number] == TEMPORARIES:
                self.categories[number] = category
        self._born = []

    def _describe(self, func: Any) -> str:
        """Return the label of the running op."""
        if self.phase == "step":
            return "step"
        inside, path = running_node(), self._module()
        if self.phase == "backward" and (path is not None) != self._recomputes:
            self._recompute(path is not None)
        if path is not None or self.phase == "forward":
            path = path or ""
            ours = func.namespace == "memtrain"
            where = _joined(path, inside or f" / {COMPRESSED if ours else _op_name(func)}")
            made: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
            node = made._get_sequence_nr() - 1  # taken before the op runs
            if not self._nodes or node > self._nodes[-1]:
                self._nodes.append(node)
                self._ops.append(path if inside else where)
            elif node == self._nodes[-1] and self._ops[-1].endswith(COMPRESSED) and not ours:
                self._ops[-1] = where  # its saved tensors were compressed before it ran
            return f"{'recomputing' if self.phase == 'backward' else 'forward of'} {where}"
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return "backward"
        if node.name() == _NODE_OF_GRADIENT:
            name = self._parameters.get(id(node.variable), "a tensor")
            return f"backward of {name} / gradient"
        index = bisect_right(self._nodes, node._sequence_nr())
        where = self._ops[index - 1] if index else ""
        if func.namespace == "memtrain":
            where = f"{where.partition(' / ')[0]} / {COMPRESSED}" if where else ""
        if inside:  # of a graph, of which its module is known
            where = _joined(where.partition(" / ")[0], inside)
        return f"backward of {where}" if where else "backward"

    def _module(self) -> str | None:
        """Return the path of the innermost running module."""
        frame = sys._getframe(2)
        while frame is not None and frame.f_code is not _ENGINE:
            if frame.f_code is _CALL:
                name = self._names.get(frame.f_locals["self"])
                if name is not None:
                    return name
            frame = frame.f_back
        return None

    def _recompute(self, begins: bool) -> None:
        """Begin or end a forward within the backward."""
        self._recomputes = begins
        if not begins:
            self.keep(RECOMPUTED)
        self._born = []

    def _see(self, storage: Any, category: str) -> None:
        address, nbytes = storage._cdata, storage.nbytes()
        number = self._numbers.get(address)
        if number is None:
            number = self._numbers[address] = len(self._sizes)
            self._sizes.append(0)
            self.categories.append(category)
            self._born.append(number)
            self._refs[number] = weakref.ref(storage, lambda _: self._die(address, number))
        self._change(number, nbytes)

    def _release(self, address: int) -> None:
        """Release a storage that another one replaces."""
        if address in self._numbers:
            self._change(self._numbers[address], 0)

    def _die(self, address: int, number: int) -> None:
        self._numbers.pop(address, None)
        del self._refs[number]
        self._change(number, 0)

    def _change(self, number: int, nbytes: int) -> None:
        delta = nbytes - self._sizes[number]
        if delta:
            self._sizes[number] = nbytes
            self.events.append((number, delta, self.phase, self._label))


def _is_summed_in_place(x: Tensor) -> bool:
    """Return whether autograd's engine would add to `x`, a sum of gradients, in place.

    The engine does so if nothing else refers to the sum, but never under a dispatch mode.
    """
    caller = sys._getframe(2)  # of the mode
    for _ in range(4):  # torch calls a mode through a few frames
        if caller.f_code is _ENGINE:
            storage = x.untyped_storage()
            uses: Any = torch._C._storage_Use_Count  # pyright: ignore[reportAttributeAccessIssue]
            return x.is_contiguous() and uses(storage._cdata) == 2  # the sum's, and this one
        if caller.f_back is None:
            return False
        caller = caller.f_back
    return False


def _joined(path: str, inner: str) -> str:
    """Return `h.3.mlp / gelu` for `h.3` and `mlp / gelu`."""
    dot = "." if path and not inner.startswith(" ") else ""
    return f"{path}{dot}{inner}".removeprefix(" / ")


def _op_name(func: Any) -> str:
    """Return `gelu` for `aten::gelu`, `layer_norm` for `aten::native_layer_norm`."""
    name = func._schema.name.partition("::")[2].strip("_")
    return name.removeprefix("native_").removeprefix("scaled_").strip("_")
