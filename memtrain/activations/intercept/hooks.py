"""Hooks on a model's modules that turn the interception on around its forward."""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _is_any_autocast_enabled
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _StopRecomputationError
from torch.utils.hooks import RemovableHandle

from memtrain.activations.intercept.compiler_internals import (
    compiled_regions,
    order_beneath,
    run_by_tracer,
    run_untraced,
)
from memtrain.activations.intercept.executor import Executor, Rounding
from memtrain.activations.intercept.inlined_hooks import CompiledGraphs
from memtrain.activations.intercept.options import Options
from memtrain.activations.intercept.own_tensors import OwnTensors
from memtrain.activations.intercept.recompute import Recompute
from memtrain.activations.intercept.reentrancy import (
    foreign_hooks,
    saves,
    suspend_others,
    suspended,
    top_hooks,
)
from memtrain.activations.intercept.replaced_ops import (
    FUNCTION_MODULES,
    recognise_module,
    unwatched,
)
from memtrain.activations.intercept.running_again import (
    FirstRun,
    Numbered,
    Numbering,
    dropping,
)
from memtrain.activations.ops.call import Call
from memtrain.activations.saved.expected import Running
from memtrain.activations.saved.origin import in_transform, refuse_replica, storage_id
from memtrain.activations.saved.pack_hook import Choose, SavedTensors, Watch
from memtrain.activations.saved.site import OTHER_THREAD, Op, Record, Site
from memtrain.compressors import Keep

_ONE_AGAIN = threading.RLock()  # modules on two devices may run again at once
_CALL_BITS = 16  # of the number of a site's payload within one run of a module

# A module whose forward runs: its path, what gives its result where it is run as one op, the op
# that its own `autograd.Function` stands for, what its own code saves, and itself.
_Running = tuple[str, Callable[[], Any] | None, Op, Running, nn.Module]
_CALL = nn.Module._call_impl.__code__
_Composite = Callable[[nn.Module, Tensor], Call | None]


class Interception:
    """Compresses what a model's forward saves for backward; the model's code is not touched.

    Hooks on every module (never a replaced `forward`, so that deepcopy and pickle work) turn a
    `TorchFunctionMode` and saved-tensor hooks on around the outermost forward, and keep the path
    of the module that runs now. It is inactive under `no_grad` and inside a model's own activation
    checkpointing (whose saved tensors are recomputed, not kept); inside `torch.compile` its graphs
    are.

    Args:
        model: The module whose forward is intercepted.
        choose: Site -> compressor, or the reason to keep the tensor.
        options: How saved tensors are handled.
        seed: Feeds the keys of stochastic rounding.
        on_saved: Called with the records of a forward, once for each module that one has started
            from.
        rounding: What else is done to the ops, also where nothing is saved for backward.
        compresses: Whether anything is done to saved tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        choose: Choose,
        *,
        options: Options,
        seed: int,
        on_saved: Callable[[list[Record]], None],
        rounding: Rounding | None = None,
        compresses: bool = True,
    ) -> None:
        self.on_saved = on_saved
        self._refer_to(model)
        self.saved = SavedTensors(choose, options.min_elements, seed, options.recompute_inputs)
        self.graphs = CompiledGraphs(self.find_model, self.saved, self._record_graph)
        self.executor = Executor(self.saved, options, rounding)
        self.rounding, self.compresses = rounding, compresses
        self.seen = False
        """Whether a training forward has run here, or a compiled one has been seen to."""
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
            self.rerun,
            self.first_run,
            self.dropping,
            partial(suspended, self),
        )
        self._recorded: set[str] = set()  # modules whose forward, as the outermost, is known
        self._handles: list[Any] = []
        self._clear()

    def _clear(self) -> None:
        self._own = OwnTensors()
        self._path: list[_Running] = []
        self._outer: tuple[str, saved_tensors_hooks | None] | None = None
        self._depth = 0  # of the path when the interception was turned on
        self._thread: dict[str, int] = {}  # whose forward runs; the others' are left alone
        self._runs: dict[str, int] = {}  # of checkpointed modules in this forward
        # What packs and what executes for checkpointed modules: a pair for each that runs at once.
        self._spare: list[tuple[SavedTensors, Executor]] = []

    def __getstate__(self) -> dict[str, Any]:
        # of a forward that runs now, and the reference
        runtime = ("_own", "_path", "_outer", "_depth", "_thread", "_runs", "_spare")
        runtime += ("_model", "_part", "_parts")
        state = {name: value for name, value in vars(self).items() if name not in runtime}
        return state | {"model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._refer_to(state.pop("model"))
        vars(self).update(state)
        self._clear()

    def _refer_to(self, model: nn.Module) -> None:
        """Know the model whose hooks lead here, and do not keep it alive.

        A cycle would hold its memory until Python's collector comes by: that counts objects, and
        not their bytes.
        """
        self._model = self._part = weakref.ref(model, self._forget)
        self._parts: list[weakref.ref[nn.Module]] = []  # a copy that is made now has none yet

    def _forget(self, model: Any) -> None:
        """Let the modules go of a model that is gone."""
        self._own = OwnTensors()

    def find_model(self) -> nn.Module:
        """The model; of one that is gone, the part that last ran by itself, or the first left."""
        model = self._model()
        if model is not None:
            self._parts = self._parts or [*map(weakref.ref, model.modules())]
            return model
        for known in (self._part, *self._parts):
            model = known()
            if model is not None:
                return model
        raise ReferenceError("the wrapped model is gone: no one refers to it any more")

    @property
    def model(self) -> nn.Module:
        """The module whose forward is intercepted."""
        return self.find_model()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's."""
        return self.model.parameters()

    def attach(self) -> None:
        """Put the hooks on the model's modules."""
        # Graphs are guarded by the numbers of hooks: alike, equal modules run one graph.
        number = RemovableHandle.next_id
        for name, module in self.model.named_modules():
            if name and isinstance(module, torch.jit.ScriptModule):
                continue  # takes no such hooks; what it saves is kept, and listed, as its parent's
            hooked = _Hooked(self, name, type(module), recognise_module(type(module)))
            RemovableHandle.next_id = number
            self._handles += [
                module.register_forward_pre_hook(hooked.before, with_kwargs=True),
                module.register_forward_hook(self._after, prepend=True, always_call=True),
            ]
            order_beneath(module._forward_hooks)
        self.recompute.attach(self.model)

    def make_in_rows(self) -> None:
        """Let linear layers and embeddings leave gradients of their weights to be made in pieces.

        Those of ops that are rounded stay whole.
        """
        self.executor.in_rows = self.rounding is None

    def detach(self) -> None:
        """Take the hooks off again; payloads in living graphs stay valid."""
        self._stop(whole=False)
        self._leave()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.recompute.detach()

    def rerun(
        self, name: str, module: nn.Module, args: Any, kwargs: Any, first: FirstRun | None = None
    ) -> Any:
        """Run a module's forward within its backward, known by its path as the first time."""
        if first is not None:
            with _ONE_AGAIN, self._holding(first, module, args, kwargs) as (args, kwargs):
                return module.forward(*args, **kwargs)
        given = _Hooked(self, name, type(module)).before(module, args, kwargs)
        args, kwargs = given or (args, kwargs)
        output = None
        try:
            output = module.forward(*args, **kwargs)
        finally:
            self._after(module, args, output)
        return output

    def first_run(self, name: str) -> FirstRun | None:
        """Note what a checkpointed module that is about to run repeats when it runs again.

        Returns:
            None where what it then saves is kept: the choices for sites are not for it, or others
            have their hooks on.
        """
        saved, asked = self.saved, self.executor.options.recompute_saves
        if not asked or self._thread.get("ident") != get_ident() or self._path[-1][1]:
            return None
        if self._outer is None or self._outer[1] is None or top_hooks() != saved.hook:
            return None
        number = self._runs.get(name, 0)
        self._runs[name] = number + 1
        return FirstRun(name, saved.step, number, saved.choose, {**saved.draws})

    @contextmanager
    def dropping(self, first: FirstRun) -> Iterator[None]:
        """Inside the block a checkpointed module runs, and what it saves is dropped."""
        name, as_one_op, op, _, module = self._path[-1]
        self._path[-1] = (name, as_one_op, op, None, module)  # its own ops are watched
        self.saved.expectations.watch()
        self.executor.step_back()
        outer, (saved, executor) = self.saved, self._spare_pair()
        self._begin_run(saved, first)
        hooks = dropping()
        saved.hook, saved.custom, saved.drops = hooks[0], op, True
        self.saved = self.executor.saved = saved
        try:
            with saved_tensors_hooks(*hooks):
                yield
        finally:
            self.saved = self.executor.saved = outer
            saved.end(whole=False)
            self._spare.append((saved, executor))

    @contextmanager
    def _holding(
        self, first: FirstRun, module: nn.Module, args: Any, kwargs: Any
    ) -> Iterator[tuple[Any, Any]]:
        """Inside the block a checkpointed module runs again, and what it saves is held."""
        name, own = first.module, get_ident()
        # A forward that still runs waits for its own backward, which CUDA runs in another thread.
        if self._thread.get("ident", own) != own and first.step != self.saved.step:
            raise RuntimeError(
                f"{name or 'the model'} runs again while another thread runs a forward of the "
                "model; allowed: one at a time, or activations.recompute_saves=keep"
            )
        before = self.saved, self.executor, self._path, self._outer, self._depth, self._thread
        saved, executor = self._spare_pair()
        self._begin_run(saved, first, module, tree_leaves((args, kwargs)))
        numbering, whole = Numbering(saved), False
        hooks = saved_tensors_hooks(numbering.pack, Numbered.unpack)
        saved.hook, saved.surprised = numbering.pack, executor.step_back
        function = FUNCTION_MODULES.get(type(module).__name__)
        op = Op(name, function, (args, kwargs)) if function else Op(name, "autograd.Function")
        running = saved.expectations.call(name, module.training, args, kwargs)
        path: list[_Running] = [(name, None, op, running, module)]
        saved.custom, executor.module, self.graphs.root = op, name, name
        self.saved, self.executor, self._path, self._depth = saved, executor, path, 0
        self._outer, self._thread = (name, hooks), {"ident": own}
        given = (args, kwargs)
        if self.rounding is not None:
            self.rounding.attach(saved)
            given = self.rounding.begin(self.model, name, args, kwargs)
        hooks.__enter__()
        executor.__enter__()
        try:
            self._turn()
            yield given
            whole = True
        except _StopRecomputationError:  # all is there that the first run saved
            whole = True
            raise
        finally:
            executor.reset()
            hooks.__exit__(None, None, None)
            self.saved, self.executor, self._path, self._outer, self._depth, self._thread = before
            if self.rounding is not None:
                self.rounding.end(None, whole=False)
                self.rounding.attach(self.saved)
            saved.end(whole=whole)
            self._spare.append((saved, executor))

    def _spare_pair(self) -> tuple[SavedTensors, Executor]:
        """Take what packs and what executes ops for a checkpointed module."""
        if self._spare:
            return self._spare.pop()
        own, options = self.saved, self.executor.options
        saved = SavedTensors(
            own.choose, own.min_elements, own.seed, own.checkpointed, hooks_all=True
        )
        return saved, Executor(saved, options, self.rounding)

    def _begin_run(
        self,
        saved: SavedTensors,
        first: FirstRun,
        module: nn.Module | None = None,
        given: Sequence[Any] = (),
    ) -> None:
        """Begin a checkpointed module's run, of which the second is given the module and leaves."""
        own = [] if module is None else OwnTensors().find(module)
        form = None
        if own and not saved.defers and self.executor.options.low is None and not self.compiled:
            form = sum([x.requires_grad for x in own]), _is_any_autocast_enabled()
        kept = isinstance(saved.checkpointed, Keep)  # alive anyway
        inputs = [x for x in given if isinstance(x, Tensor) and (kept or not x.requires_grad)]
        saved.choose, saved.draws, saved.step = first.choose, first.draws, first.step
        saved.begin(
            own,
            {storage_id(x) for x in inputs},
            record=False,
            form=form,
            first_call=first.number << _CALL_BITS,
        )

    def record_again(self) -> None:
        """Record what the next forward saves."""
        self._recorded = set()

    @contextmanager
    def trial(self, choose: Choose, watch: Watch | None, draws: dict[str, int]) -> Iterator[None]:
        """Inside the block forwards ask `choose` and tell `watch`; they are not counted."""
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
        """Attached inside the block, with every other interception suspended."""
        with suspend_others(self):
            self.attach()
            try:
                yield
            finally:
                self.detach()

    # -- around modules ---------------------------------------------------------------------

    @run_by_tracer
    def claim(self) -> None:
        """Compress what the graph saves that is traced now."""
        if self.compresses:
            self.graphs.claim()

    def _as_one_op(
        self, composite: _Composite, module: nn.Module, x: Any
    ) -> Callable[[], Any] | None:
        """Runs a module as one op, with the ops not watched; None: it runs as it is."""
        self.executor.step_aside()
        call = composite(module, x) if isinstance(x, Tensor) else None
        as_one_op = None if call is None else self.executor.as_one_op(call)
        if as_one_op is None:
            self.executor.step_back()
        return as_one_op

    def _is_ours(self, name: str, module: nn.Module) -> bool:
        """Whether a forward that may be the outermost one is this thread's."""
        refuse_replica(module)
        if not self._claim(name):
            return False
        if self._path and module is self._model() and not _calls_itself(module):
            # Ctrl-C broke an earlier forward off.
            self._stop(whole=False)
            self._path.clear()
        return True

    def _turn(self) -> None:
        """Watch the ops of the module that runs, or not."""
        if self.saved.expectations.due is None:
            self.executor.step_back()
        else:
            self.executor.step_aside()

    def _begin(
        self, name: str, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Begin an outermost forward; its arguments, where they are changed."""
        if self._model() is None:
            self._part = weakref.ref(module)
        saves = self.compresses and self._may_start(name)
        rounds = self.rounding is not None and (saves or self._may_round())
        watches = self.executor.options.low is not None or self.executor.in_rows
        idles = rounds or (watches and self._may_round())
        given = (args, kwargs)
        if self.rounding is not None and rounds:
            given = self.rounding.begin(self.model, name, args, kwargs)
        if saves:
            self._start(name, module, (args, kwargs))
        elif idles:
            self._depth, self.executor.idle = len(self._path), True
            self.executor.__enter__()
            self._outer = (name, None)
        return given if rounds else None

    def _alike(self, module: nn.Module) -> bool:
        """Whether the module as one op is what it is written as, also to others."""
        weights = self.rounding is not None and next(module.parameters(), None) is not None
        return unwatched(module) and not weights

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if is_compiling():
            return None
        # Another thread's forward, or the hooks were put on during this very one.
        path, executor = self._path, self.executor
        if not path or self._thread.get("ident") != get_ident():
            return None
        if path[-1][-1] is not module:  # another's pre-hook raised before ours
            return None
        executor.module, as_one_op, _, _, _ = path.pop()
        result = None
        failed = output is None and sys.exc_info()[0] is not None
        if as_one_op is not None:
            self.saved.shell = False
            try:
                result = None if failed else as_one_op()
            finally:
                executor.step_back()
        if path:
            saved = self.saved
            name, _, saved.custom, running, _ = path[-1]
            executor.module = self.graphs.root = name
            saved.expectations.resume(name, running)
            if (saved.expectations.due is None) == executor.is_aside:
                self._turn()
        if self._outer is not None and len(path) == self._depth:
            self._stop(whole=not failed)
            if self.rounding is not None:
                result = self.rounding.end(output if result is None else result, whole=not failed)
        if not path:
            self._leave()
        return result

    def _claim(self, name: str) -> bool:
        """Whether the forward that runs is this thread's, which it becomes where it is no one's."""
        own = get_ident()
        owner = self._thread.setdefault("ident", own)  # at once: no thread comes between
        if owner == own:
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
        why = foreign_hooks()
        if why and not self._path:
            self._record(f"outside: {name}", [_untouched(name, why)])
        return not why

    def _may_round(self) -> bool:
        """Whether ops may be rounded where nothing is compressed: evaluation, recomputation."""
        busy = torch.jit.is_tracing() or in_transform()
        return not busy and not suspended(self)

    def _start(self, name: str, module: nn.Module, inputs: Any) -> None:
        # A submodule called on its own may be given what another one made: not the user's to keep.
        given = [
            x
            for x in tree_leaves(inputs)
            if isinstance(x, Tensor) and (x.grad_fn is None or module is self._model())
        ]
        watch = self.saved.watch
        if watch is not None and watch.begin(self.saved.step, tree_leaves(inputs)):
            self.record_again()
        own = self._own.find(self.model)
        self.trained = [*map(id, [x for x in own if x.requires_grad])]
        form = None
        if self.rounding is None and self.executor.options.low is None and not self.compiled:
            form = len(self.trained), _is_any_autocast_enabled()
        inputs = {storage_id(x) for x in given}
        self._runs = {}
        self.saved.begin(own, inputs, record=name not in self._recorded, form=form)
        self._depth = len(self._path)
        is_copy = module is not self.model and self._is_no_part(name, module)
        self.graphs.regions = compiled_regions(module, name) if is_copy else frozenset()
        pack, unpack = self.graphs.hooks(given)
        self.saved.hook, self.saved.surprised = pack, self.executor.step_back
        hooks = saved_tensors_hooks(pack, unpack)
        hooks.__enter__()
        self.executor.__enter__()
        self._outer = (name, hooks)

    def _is_no_part(self, name: str, module: nn.Module) -> bool:
        """Whether the model has another module at that path."""
        model = self._model()
        return model is not None and model.get_submodule(name) is not module

    def _stop(self, *, whole: bool) -> None:
        if self._outer is None:
            return
        if not whole:
            self.recompute.break_off()
        name, hooks = self._outer
        self._outer = None
        self.executor.reset()
        if hooks is None:
            return
        hooks.__exit__(None, None, None)
        compiled, records = self.graphs.end(), self.saved.end(whole=whole)
        self.compiled = self.compiled or bool(compiled)
        if whole and records is not None:
            self._record(name, compiled + records)
        elif whole and compiled:  # of other shapes, or after what was not a whole forward
            self.on_saved(compiled)

    def _record_graph(self, records: list[Record]) -> None:
        self.seen = True
        self.on_saved(records)

    def _record(self, name: str, records: list[Record]) -> None:
        if name not in self._recorded:
            self._recorded.add(name)
            self.on_saved(records)


class _Hooked:
    """A module as its pre-hook knows it.

    One object for each: graphs are guarded by what leads to a hook's code, and of `partial` that is
    every part.

    Args:
        owner: Whose hook it is.
        name: The module's path.
        kind: Its class.
        composite: Recognises a module that writes an op out.
    """

    __slots__ = ("composite", "function", "name", "op", "owner")

    def __init__(
        self, owner: Interception, name: str, kind: type, composite: _Composite | None = None
    ) -> None:
        self.owner, self.name, self.composite = owner, name, composite
        self.op = Op(name, "autograd.Function")
        self.function = FUNCTION_MODULES.get(kind.__name__)
        """The op's name where torch's `autograd.Function` is the module's own."""

    def before(  # asked inline: a call for each module would cost the host
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The pre-hook."""
        owner = self.owner
        if is_compiling():
            owner.claim()
            return None
        name, op = self.name, self.op
        inside = owner._outer is not None and owner._thread.get("ident") == get_ident()
        if (not inside or module is owner._model()) and not owner._is_ours(name, module):
            return None
        saved, executor, graphs = owner.saved, owner.executor, owner.graphs
        executor.module = graphs.root = name
        as_one_op, given = None, None
        if owner._outer is None:
            given = owner._begin(name, module, args, kwargs)
        elif self.composite and len(args) == 1 and not kwargs and owner._alike(module):
            as_one_op = owner._as_one_op(self.composite, module, args[0])
        if module._compiled_call_impl or name.endswith("_orig_mod") or name in graphs.regions:
            executor.step_aside()  # asked about tensors under a mode, torch would call it each time
            graphs.called(name, *(given or (args, kwargs)))
        if self.function is not None:
            as_one_op, op = None, Op(name, self.function, (args, kwargs))
        expected = saved.expectations
        running = expected.call(name, module.training, args, kwargs)
        if type(running) is list and top_hooks() != saved.hook:
            expected.watch()  # inside activation checkpointing, which saves alone
        owner._path.append((name, as_one_op, op, running, module))
        saved.custom = op
        if as_one_op is None:
            if (expected.due is None) == executor.is_aside:
                owner._turn()
            return given
        expected.watch()
        # The composite now runs on no elements, seen by no one; `_after` returns the real result.
        saved.shell = True
        x = args[0]
        return (x.new_empty(0, *x.shape[1:]),), kwargs


run_untraced(_Hooked.before, Interception._after)


def _calls_itself(module: nn.Module) -> bool:
    """Whether two calls of the module, of which the pre-hook's is one, run in this thread."""
    frame, calls = sys._getframe(), 0
    while frame is not None and calls < 2:
        calls += frame.f_code is _CALL and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls > 1


def _untouched(module: str, why: str) -> Record:
    """A record of a forward that was left alone."""
    return Record(Site(module, "*", "*"), (), "", 0, 0, "", why)
