"""Module hooks that enter and exit `OpMode` around the forward of a wrapped model."""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from torch.compiler import is_compiling
from torch.overrides import (
    _get_current_function_mode,
    _get_current_function_mode_stack,
)
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from memtrain.activations.intercept.compiler_internals import (
    INSIDE,
    compiled_call,
    compiled_regions,
    run_by_tracer,
    run_untraced,
    sync_hook_order,
)
from memtrain.activations.intercept.inlined_hooks import CompiledGraphs
from memtrain.activations.intercept.op_mode import OpMode, modes_of
from memtrain.activations.intercept.recompute import Recompute
from memtrain.activations.intercept.reentrancy import (
    calls_itself,
    saves,
    suspend_others,
    suspended,
    top_hooks,
    why_inactive,
)
from memtrain.activations.intercept.replaced_ops import (
    Replacements,
    replace_forward,
    restore_forward,
)
from memtrain.activations.saved.fit import Choose
from memtrain.activations.saved.options import Options
from memtrain.activations.saved.origin import in_transform, refuse_replica
from memtrain.activations.saved.saved_tensors import SavedTensors
from memtrain.activations.saved.site import OTHER_THREAD, Record, Site, tensors_in


class Interception:
    """Compresses the tensors that autograd saves in the forward of a model.

    Hooks on every module enter a `TorchFunctionMode` around the outermost forward, and track the
    path of the running module. The interception is inactive under `no_grad` and inside a model's
    own activation checkpointing. In compiled modules, hooks inside the graph compress the saved
    tensors.

    `on_saved` is called with the records after the first forward of each outermost module. The mode
    of `rounding` runs between the replacement of ops and the visit of autograd nodes. If not
    `compresses`, saved tensors are left as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        choose: Choose,
        *,
        options: Options,
        seed: int,
        on_saved: Callable[[list[Record]], None],
        rounding: Any = None,
        compresses: bool = True,
    ) -> None:
        self.on_saved = on_saved
        self._refer_to(model)
        self.rounding, self.compresses = rounding, compresses
        if rounding is not None:  # it changes results, which their inputs then do not determine
            options = replace(options, derives=0)
        self.saved = SavedTensors(choose, options, seed)
        self.replacements = Replacements(self.saved)
        self.graphs = CompiledGraphs(self.find_model, self.saved, self._record_graph)
        self.seen = False
        """Whether a training forward has run here, or a compiled one was compressed."""
        self.compiled = False
        """Whether a part of a forward was compiled, for modes that were on."""
        self.trained: list[int] = []
        """The `id` of each tensor of the model that required gradients in the last forward seen."""
        if rounding is not None:
            rounding.attach(self.saved)
        self.recompute = Recompute(
            model,
            options.recompute,
            self.saved,
            options.recompute_inputs,
            self.rerun,
            partial(suspended, self),
        )
        self._recorded: set[str] = set()  # modules whose forward, as the outermost, is known
        self._handles: list[Any] = []
        self._classes: set[type[nn.Module]] = set()  # whose forward may run as one op
        self._clear()

    def _clear(self) -> None:
        self._path: list[tuple[str, nn.Module, bool]] = []  # modules that run; whether compiled
        self._outer: tuple[str, bool] | None = None  # of the outermost: its path, whether it saves
        self._depth = 0  # of the path when the interception was turned on
        self._modes: list[Any] = []
        self._thread: dict[str, int] = {}  # whose forward runs; the others' are left alone

    def __getstate__(self) -> dict[str, Any]:
        runtime = ["_path", "_outer", "_depth", "_modes", "_thread", "_model", "_part", "_parts"]
        state = {name: value for name, value in vars(self).items() if name not in runtime}
        return state | {"model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._refer_to(state.pop("model"))
        vars(self).update(state)
        for cls in self._classes:  # of another process
            replace_forward(cls)
        self._clear()

    def _refer_to(self, model: nn.Module) -> None:
        """Store a weak reference to the model: a cycle would delay freeing its memory."""
        self._model = self._part = weakref.ref(model)
        self._parts: list[weakref.ref[nn.Module]] = []  # a copy that is made now has none yet

    def find_model(self) -> nn.Module:
        """Return the model; if it was deleted, a submodule that is still alive."""
        model = self._model()
        if model is not None:
            self._parts = self._parts or [*map(weakref.ref, model.modules())]
            return model
        for known in (self._part, *self._parts):
            model = known()
            if model is not None:
                return model
        raise ReferenceError("the wrapped model was deleted: no reference to it remains")

    model = property(find_model)

    def attach(self) -> None:
        """Register the hooks on the model's modules."""
        # Graphs are guarded by the numbers of hooks: with equal ones, equal modules run one graph.
        number = RemovableHandle.next_id
        for name, module in self.model.named_modules():
            if name and isinstance(module, torch.jit.ScriptModule):
                continue  # takes no such hooks; its parent lists what it saves
            hooked = _Hooked(self, name)
            RemovableHandle.next_id = number
            self._handles += [
                module.register_forward_pre_hook(hooked.before, with_kwargs=True),
                module.register_forward_hook(self._after, prepend=True, always_call=True),
            ]
            sync_hook_order(module._forward_hooks)
            if type(module) not in self._classes and replace_forward(type(module)):
                self._classes.add(type(module))
        self.recompute.attach(self.model)

    def detach(self) -> None:
        """Remove the hooks; payloads in existing graphs stay valid."""
        self._stop(completed=False)
        self._leave()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        while self._classes:
            restore_forward(self._classes.pop())
        self.recompute.detach()

    def rerun(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module's forward again in its backward, under its path."""
        changed = _Hooked(self, name).before(module, args, kwargs)
        args, kwargs = changed or (args, kwargs)
        output = None
        try:
            output = module.forward(*args, **kwargs)
        finally:
            self._after(module, args, output)
        return output

    def record_next(self) -> None:
        """Record the saved tensors of the next forward."""
        self._recorded = set()

    @contextmanager
    def trial(self, choose: Choose, watch: Any, draws: dict[str, int]) -> Iterator[None]:
        """Use another `choose` and `watch` inside the block, without counting forwards."""
        saved = self.saved
        before = (saved.choose, saved.watch, saved.draws, saved.step, self._recorded)
        outer = self.on_saved
        saved.choose, saved.watch, saved.draws = choose, watch, draws
        self.on_saved = lambda records: None
        try:
            yield
        finally:
            saved.choose, saved.watch, saved.draws, saved.step, self._recorded = before
            self.on_saved = outer

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Attach the hooks inside the block, with every other interception suspended."""
        with suspend_others(self):
            self.attach()
            try:
                yield
            finally:
                self.detach()

    @run_by_tracer
    def claim(self) -> None:
        """Compress the saved tensors of the graph that is being traced."""
        if self.compresses:
            self.graphs.claim()

    def _is_ours(self, name: str, module: nn.Module) -> bool:
        """Return whether this thread may start an outermost forward."""
        refuse_replica(module)
        if not self._claim(name):
            return False
        if self._path and module is self._model() and not calls_itself(module):
            # Ctrl-C broke an earlier forward off.
            self._stop(completed=False)
            self._path.clear()
        return True

    def _begin(
        self, name: str, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Begin an outermost forward; its arguments, where they are changed."""
        if self._model() is None:
            self._part = weakref.ref(module)
        saving = self.compresses and self._may_start(name)
        rounds = self.rounding is not None and (saving or self._may_round())
        idles = rounds or (self.saved.options.low is not None and self._may_round())
        arguments = (args, kwargs)
        if self.rounding is not None and rounds:
            arguments = self.rounding.begin(self.model, name, args, kwargs)
        if not (saving or idles):
            return None
        self.replacements.idle = not saving
        self._depth = len(self._path)
        if saving:
            self._start(name, module, (args, kwargs))
        rounding = self.rounding if rounds else None
        self._modes = modes_of(self.replacements, self.saved if saving else None, rounding)
        self._outer = (name, saving)
        self._enter()
        return arguments if rounds else None

    def _enter(self) -> None:
        for mode in self._modes:
            mode.__enter__()

    def _exit(self) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)

    def _name(self, name: str) -> None:
        self.replacements.module = self.graphs.root = name
        for mode in self._modes:
            mode.module = name

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if is_compiling():
            return None
        # Another thread's forward, or the hooks were put on during this very one.
        path = self._path
        if not path or self._thread.get("ident") != get_ident():
            return None
        if path[-1][1] is not module:  # another's pre-hook raised before ours
            return None
        name, _, was_compiled = path.pop()
        result = None
        failed = output is None and sys.exc_info()[0] is not None
        self._leave_module(name, None if failed else output, was_compiled=was_compiled)
        if self._outer is not None and len(path) == self._depth:
            self._stop(completed=not failed, output=output)
            if self.rounding is not None:
                result = self.rounding.end(output, completed=not failed)
        if not path:
            self._leave()
        return result

    def _leave_module(self, name: str, output: Any, *, was_compiled: bool) -> None:
        """Visit nodes that no torch function has created, such as a user's `autograd.Function`."""
        saving = self._outer is not None and self._outer[1]
        if was_compiled and self._outer is not None:
            self._enter()
        # An output of another thread, without a new node of this one, is seen at the end.
        if saving and (len(self._path) == self._depth or _get_sequence_nr() != self.saved.mark):
            hooked = self.saved.under_hooks(top_hooks() is not None)
            with torch._C.DisableTorchFunction():
                self.saved.collect(tensors_in(output), None, name, hooked=hooked)
        if self._path:
            self._name(self._path[-1][0])

    def _claim(self, name: str) -> bool:
        """Acquire the interception for this thread; return False if another live thread has it."""
        ident = get_ident()
        owner = self._thread.setdefault("ident", ident)  # at once: no thread comes between
        if owner == ident:
            return True
        # Autograd's own threads, where modules run again on CUDA, are found among frames alone; one
        # that waits at Python's prompt, among threads alone.
        alive = {*sys._current_frames(), *(thread.ident for thread in threading.enumerate())}
        if owner not in alive:  # died in its forward
            self._outer = None
            self._leave()
            return self._claim(name)
        self._record("other threads", [_untouched(name, OTHER_THREAD)])
        return False

    def _leave(self) -> None:
        self._path.clear()
        self._thread.clear()

    def _may_start(self, name: str) -> bool:
        if not saves() or suspended(self):
            return False
        self.seen = True
        modes = _get_current_function_mode_stack()
        if any(isinstance(mode, OpMode) and mode.saved is not None for mode in modes):
            return False  # the forward of another wrapped model, which sees these ops
        why = why_inactive()
        if why and not self._path:
            self._record(f"outside: {name}", [_untouched(name, why)])
        return not why

    def _may_round(self) -> bool:
        """Whether ops may be rounded where nothing is compressed: evaluation, recomputation."""
        busy = torch.jit.is_tracing() or in_transform()
        return not busy and not suspended(self)

    def _start(self, name: str, module: nn.Module, inputs: Any) -> None:
        # A submodule called on its own may be given what another one made: not the user's to keep.
        tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        user_inputs = [x for x in tensors if x.grad_fn is None or module is self._model()]
        watch = self.saved.watch
        if watch is not None and watch.begin(self.saved.step):
            self.record_next()
        parameters = [*self.model.parameters(), *self.model.buffers()]
        self.trained = [*map(id, [x for x in parameters if x.requires_grad])]
        self.saved.begin(parameters, user_inputs, tensors, name not in self._recorded)
        model = self._model()
        is_copy = model is not None and model.get_submodule(name) is not module
        self.graphs.regions = compiled_regions(module, name) if is_copy else frozenset()
        self.graphs.begin(user_inputs)

    def _stop(self, *, completed: bool, output: Any = None) -> None:
        if self._outer is None:
            return
        if not completed:
            self.recompute.break_off()
        name, saving = self._outer
        self._outer = None
        if _get_current_function_mode() in self._modes:
            self._exit()
        self._modes, self.replacements.idle = [], False
        if not saving:
            return
        compiled, records = self.graphs.end(), self.saved.end(tensors_in(output))
        self.compiled = self.compiled or bool(compiled)
        if completed and records is not None:
            self._record(name, compiled + records)
        elif completed and compiled:  # of other shapes, or after what was not a whole forward
            self.on_saved(compiled)

    def _record_graph(self, records: list[Record]) -> None:
        self.seen = True
        self.on_saved(records)

    def _record(self, name: str, records: list[Record]) -> None:
        if name not in self._recorded:
            self._recorded.add(name)
            self.on_saved(records)


class _Hooked:
    """Forward pre-hook of one module.

    A class and not a `partial`, for which Dynamo would add a guard per argument.
    """

    __slots__ = ("name", "owner")

    def __init__(self, owner: Interception, name: str) -> None:
        self.owner, self.name = owner, name

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Enter the module: extend the path, and begin an outermost forward."""
        owner = self.owner
        if is_compiling():
            owner.claim()
            return None
        name = self.name
        inside = owner._outer is not None and owner._thread.get("ident") == get_ident()
        if (not inside or module is owner._model()) and not owner._is_ours(name, module):
            return None
        arguments = None
        if owner._outer is None:
            arguments = owner._begin(name, module, args, kwargs)
        owner._name(name)
        regions = owner.graphs.regions
        compiled = compiled_call(module) or name.endswith(INSIDE) or name in regions
        compiled = compiled and owner._outer is not None and bool(owner._modes)
        if compiled and _get_current_function_mode() is owner._modes[-1]:
            owner._exit()  # asked about tensors under a mode, torch would call it each time
            owner.graphs.called(name, *(arguments or (args, kwargs)))
        else:
            compiled = False
        owner._path.append((name, module, compiled))
        return arguments


run_untraced(_Hooked.before, Interception._after)


def _untouched(module: str, why: str) -> Record:
    return Record(Site(module, "*", "*"), (), "", 0, 0, "", why)
