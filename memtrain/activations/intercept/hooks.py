"""Turns itself on around a model's forward, and hands every op of it to the performer."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from memtrain.activations.intercept.executor import Mode, Performer, tensors_of
from memtrain.activations.intercept.options import Options
from memtrain.activations.intercept.recompute import Recompute
from memtrain.activations.intercept.reentrancy import Turn, awake, foreign_hooks, saves, sleeps
from memtrain.activations.intercept.registry import (
    FUNCTION_MODULES,
    recognise_module,
    unwatched,
)
from memtrain.activations.intercept.rounding import Rounding
from memtrain.activations.ops.call import Call
from memtrain.activations.saved.handles import unpack
from memtrain.activations.saved.origin import in_transform, refuse_replica, storage_id
from memtrain.activations.saved.pack import Choose, SavedTensors, Watch
from memtrain.activations.saved.site import Op, Record, Site


class _Entry(NamedTuple):
    """A module whose forward runs.

    `whole` gives its result where it is run as one op; `function` is the op that its own
    `autograd.Function` stands for.
    """

    name: str
    whole: Callable[[], Any] | None = None
    function: Op | None = None


class Interception:
    """Compresses what a model's forward saves for backward; the model's code is not touched.

    Hooks on every module (never a replaced `forward`, so that deepcopy and pickle work) turn a
    `TorchFunctionMode` and saved-tensor hooks on around the outermost forward, and keep the path
    of the module that runs now. It stays out under `no_grad`, inside `torch.compile` and inside
    activation checkpointing (whose saved tensors are recomputed, not kept).

    Args:
        model: The module whose forward is intercepted.
        choose: Site -> compressor, or the reason to keep the tensor.
        options: How saved tensors are handled.
        seed: Feeds the keys of stochastic rounding.
        settle: Told what a forward saved, once for each module that one has started from.
        rounding: What else is done to the ops, also where nothing is saved for backward.
    """

    def __init__(
        self,
        model: nn.Module,
        choose: Choose,
        *,
        options: Options,
        seed: int,
        settle: Callable[[list[Record]], None],
        rounding: Rounding | None = None,
    ) -> None:
        self.model, self.settle = model, settle
        self.saved = SavedTensors(choose, options.min_elements, seed, options.recompute_inputs)
        self.performer = Performer(self.saved, options)
        self.performer.rounding = self.rounding = rounding
        if rounding is not None:
            rounding.attach(self.saved)
        self.recompute = Recompute(model, options.recompute, self)
        self._settled: set[str] = set()  # modules whose forward, as the outermost, is known
        self._handles: list[Any] = []
        self._clear()

    def _clear(self) -> None:
        self._path: list[_Entry] = []
        self._outer: tuple[str, saved_tensors_hooks | None, Mode] | None = None
        self._depth = 0  # of the path when the interception was turned on
        self._turn = Turn()

    def __getstate__(self) -> dict[str, object]:
        runtime = ("_path", "_outer", "_depth", "_turn")  # of a forward that runs now
        return {name: value for name, value in vars(self).items() if name not in runtime}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._clear()

    def attach(self) -> None:
        """Put the hooks on the model's modules."""
        for name, module in self.model.named_modules():
            if name and isinstance(module, torch.jit.ScriptModule):
                continue  # takes no such hooks; what it saves is kept, and listed, as its parent's
            before = partial(self._before, name, recognise_module(type(module).__name__))
            self._handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(self._after, prepend=True, always_call=True),
            ]
        self.recompute.attach()

    def detach(self) -> None:
        """Take the hooks off again; payloads in living graphs stay valid."""
        self._stop(whole=False)
        self._leave()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.recompute.detach()

    def sleeps(self) -> bool:
        """Whether another interception has the forward to itself."""
        return sleeps(self)

    def rerun(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module's forward within its backward, known by its path as the first time."""
        given = self._before(name, None, module, args, kwargs)
        args, kwargs = given or (args, kwargs)
        output = None
        try:
            output = module.forward(*args, **kwargs)
        finally:
            self._after(module, args, output)
        return output

    def resettle(self) -> None:
        """Let the next forward tell again what it saves."""
        self._settled = set()

    @contextmanager
    def trial(self, choose: Choose, watch: Watch | None, draws: dict[str, int]) -> Iterator[None]:
        """Inside the block forwards ask `choose`, tell `watch`, settle and count nothing."""
        saved = self.saved
        before = (saved.choose, saved.watch, saved.draws, saved.step, self._settled)
        outer = self.settle
        saved.choose, saved.watch, saved.draws = choose, watch, draws
        self.settle = lambda records: None
        try:
            yield
        finally:
            saved.choose, saved.watch, saved.draws, saved.step, self._settled = before
            self.settle = outer

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Attached inside the block, with every other interception asleep."""
        with awake(self):
            self.attach()
            try:
                yield
            finally:
                self.detach()

    # -- around modules ---------------------------------------------------------------------

    def _before(
        self,
        name: str,
        composite: Callable[[nn.Module, Tensor], Call | None] | None,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if torch.compiler.is_compiling():  # a compiled forward saves what its compiler chose
            return None
        refuse_replica(module)
        if not self._claim(name):
            return None
        if self._path and module is self.model:  # Ctrl-C broke an earlier forward off
            self._stop(whole=False)
            self._path.clear()
        self.performer.module = name
        entry, given = _Entry(name), None
        if self._outer is None:
            given = self._begin(name, module, args, kwargs)
        elif composite and len(args) == 1 and not kwargs and self._alike(module):
            call = composite(module, args[0]) if isinstance(args[0], Tensor) else None
            entry = _Entry(name, None if call is None else self.performer.whole(call))
        op = FUNCTION_MODULES.get(type(module).__name__)
        if op is not None:
            entry = _Entry(name, function=Op(name, op, tensors_of(args, kwargs)))
        self._path.append(entry)
        self.performer.function = entry.function
        if entry.whole is None:
            return given
        # The composite now runs on no elements; `_after` returns the real result.
        x = args[0].detach()
        return (x.new_empty((0, *x.shape[1:])),), kwargs

    def _begin(
        self, name: str, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Turn on what may be on; the forward's arguments, where they are changed."""
        saves = self._may_start(name)
        rounds = self.rounding is not None and (saves or self._may_round())
        given = (args, kwargs)
        if self.rounding is not None and rounds:
            given = self.rounding.begin(self.model, name, args, kwargs)
        if saves:
            self._start(name, module, (args, kwargs))
        elif rounds:
            self._depth, self.performer.idle = len(self._path), True
            mode = Mode(self.performer)
            mode.__enter__()
            self._outer = (name, None, mode)
        return given if rounds else None

    def _alike(self, module: nn.Module) -> bool:
        """Whether the module as one op is what it is written as, also to others."""
        weights = self.rounding is not None and next(module.parameters(), None) is not None
        return unwatched(module) and not weights

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        # Another thread's forward, or the hooks were put on during this very one.
        if not self._path or not self._turn.mine():
            return None
        self.performer.module, whole, _ = self._path.pop()
        failed = output is None and sys.exc_info()[0] is not None
        result = whole() if whole is not None and not failed else None
        parent = self._path[-1] if self._path else _Entry("")
        self.performer.module, self.performer.function = parent.name, parent.function
        if self._outer is not None and len(self._path) == self._depth:
            self._stop(whole=not failed)
            if self.rounding is not None:
                result = self.rounding.end(output if result is None else result, whole=not failed)
        if not self._path:
            self._leave()
        return result

    def _claim(self, name: str) -> bool:
        """Whether the forward that runs is this thread's."""
        if self._turn.claim():
            return True
        if self._turn.died():
            self._outer = None
            self._leave()
            return self._claim(name)
        why = "another thread runs a forward: one at a time is compressed"
        self._settle("other threads", [Record(Site(name, "*", "*"), (), "", 0, 0, "", why)])
        return False

    def _leave(self) -> None:
        self._path.clear()
        self._turn.leave()

    def _may_start(self, name: str) -> bool:
        if not saves() or sleeps(self):
            return False
        why = foreign_hooks()
        if why and not self._path:
            self._settle(f"outside: {name}", [Record(Site(name, "*", "*"), (), "", 0, 0, "", why)])
        return not why

    def _may_round(self) -> bool:
        """Whether ops may be rounded where nothing is compressed: evaluation, recomputation."""
        busy = torch.jit.is_tracing() or in_transform()
        return not busy and not sleeps(self)

    def _start(self, name: str, module: nn.Module, inputs: Any) -> None:
        own = [*self.model.parameters(), *self.model.buffers()]
        # A submodule called on its own may be given what another one made: not the user's to keep.
        given = [
            x
            for x in tree_leaves(inputs)
            if isinstance(x, Tensor) and (x.grad_fn is None or module is self.model)
        ]
        watch = self.saved.watch
        if watch is not None and watch.begin(self.saved.step, tree_leaves(inputs)):
            self.resettle()
        self.saved.begin({storage_id(x) for x in own}, {storage_id(x) for x in given})
        self.saved.records = [] if name not in self._settled else None
        self._depth = len(self._path)
        hooks, mode = saved_tensors_hooks(self.performer.pack, unpack), Mode(self.performer)
        hooks.__enter__()
        mode.__enter__()
        self._outer = (name, hooks, mode)

    def _stop(self, *, whole: bool) -> None:
        if self._outer is None:
            return
        name, hooks, mode = self._outer
        self._outer, self.performer.idle = None, False
        self.performer.reset()
        mode.__exit__(None, None, None)
        if hooks is None:
            return
        hooks.__exit__(None, None, None)
        self.saved.end()
        records, self.saved.records = self.saved.records, None
        if whole and records is not None:
            self._settle(name, records)

    def _settle(self, name: str, records: list[Record]) -> None:
        if name not in self._settled:
            self._settled.add(name)
            self.settle(records)
