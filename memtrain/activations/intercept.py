"""Sees every op of a model's forward, and acts on what it saves: replaces it, or hooks it."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from memtrain.activations.calls import SMOOTH, Call, recognise, recognise_module
from memtrain.activations.layout import layout_of
from memtrain.activations.ops.payload import output_again
from memtrain.activations.origin import foreign, in_transform, storage_id
from memtrain.activations.payload import Saved, unpack
from memtrain.activations.saved import Choose, SavedTensors, Watch
from memtrain.activations.sites import Op, Record, Site
from memtrain.compressors import Compressor


class _Mode(TorchFunctionMode):
    """Hands every torch function that runs inside the forward to the interception."""

    def __init__(self, interception: "Interception") -> None:
        super().__init__()
        self.interception = interception

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":  # x.shape and its like: nothing to save
            return func(*args, **(kwargs or {}))
        return self.interception.run(func, name, args, kwargs or {})


class _Entry(NamedTuple):
    """A module whose forward runs, and the call that stands for all of it, if it is composite."""

    name: str
    call: Call | None = None
    compressor: Compressor | None = None


class _Hole:
    """Where an op's input goes when the op is run again."""


_HOLE = _Hole()
_only: "Interception | None" = None  # while a trace runs, live interceptions sleep


class Interception:
    """Compresses what a model's forward saves for backward; the model's code is not touched.

    Hooks on every module (never a replaced `forward`, so that deepcopy and pickle work) turn a
    `TorchFunctionMode` and saved-tensor hooks on around the outermost forward, and keep the path
    of the module that runs now. It stays out under `no_grad`, inside `torch.compile` and inside
    activation checkpointing (whose saved tensors are recomputed, not kept).

    Args:
        model: The module whose forward is intercepted.
        choose: Site -> compressor, or the reason to keep the tensor.
        min_elements: Smaller tensors are kept.
        seed: Feeds the keys of stochastic rounding.
        derive_outputs: Whether an op's output that another op saves may be computed again from
            the payload of the op's input, where that costs no bytes.
        settle: Told what a forward saved, once for each module that one has started from.
    """

    def __init__(
        self,
        model: nn.Module,
        choose: Choose,
        *,
        min_elements: int,
        seed: int,
        derive_outputs: bool,
        settle: Callable[[list[Record]], None],
    ) -> None:
        self.model, self.settle, self.derive_outputs = model, settle, derive_outputs
        self.saved = SavedTensors(choose, min_elements, seed)
        self._settled: set[str] = set()  # modules whose forward, as the outermost, is known
        self._handles: list[Any] = []
        self._clear()

    def _clear(self) -> None:
        self._path: list[_Entry] = []
        self._op: Op | None = None
        self._outer: tuple[str, saved_tensors_hooks, _Mode] | None = None
        self._depth = 0  # of the path when the interception was turned on

    def __getstate__(self) -> dict[str, object]:
        runtime = ("_path", "_op", "_outer", "_depth")  # of a forward that runs now
        return {name: value for name, value in vars(self).items() if name not in runtime}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._clear()

    def attach(self) -> None:
        """Put the hooks on the model's modules."""
        for name, module in self.model.named_modules():
            before = partial(self._before, name, recognise_module(type(module).__name__))
            self._handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(self._after, prepend=True, always_call=True),
            ]

    def detach(self) -> None:
        """Take the hooks off again; payloads in living graphs stay valid."""
        self._stop(whole=False)
        self._path.clear()
        for handle in self._handles:
            handle.remove()
        self._handles = []

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
        global _only
        outer, _only = _only, self
        self.attach()
        try:
            yield
        finally:
            self.detach()
            _only = outer

    # -- around modules ---------------------------------------------------------------------

    def _before(
        self,
        name: str,
        composite: Callable[[nn.Module, Tensor], Call | None] | None,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._path and module is self.model:  # Ctrl-C broke an earlier forward off
            self._stop(whole=False)
            self._path.clear()
        entry = _Entry(name)
        if self._outer is None:
            if self._may_start(name):
                self._start(name, module, (args, kwargs))
        elif composite and len(args) == 1 and not kwargs and _only_our_hooks(module):
            call = composite(module, args[0]) if isinstance(args[0], Tensor) else None
            chosen = None if call is None else self._compressor(name, call)
            entry = entry if chosen is None else _Entry(name, call, chosen)
        self._path.append(entry)
        if entry.call is None:
            return None
        # The composite now runs on no elements; `_after` returns the real result.
        x = entry.call.x.detach()
        return (x.new_empty((0, *x.shape[1:])),), kwargs

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._path:  # the hooks were put on during this very forward
            return None
        name, call, compressor = self._path.pop()
        failed = output is None and sys.exc_info()[0] is not None
        result = None
        if call is not None and compressor is not None and not failed:
            result = self._replaced(name, call, compressor)
        if self._outer is not None and len(self._path) == self._depth:
            self._stop(whole=not failed)
        return result

    def _may_start(self, name: str) -> bool:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if _only is not None and _only is not self:
            return False
        why = ""
        if _top_hooks() is not None:
            why = "saved-tensor hooks of someone else are on"
        elif in_transform():
            why = "inside a transform of torch.func or forward-mode differentiation"
        # In a backward it is activation checkpointing that recomputes: nothing is lost.
        if why and not self._path and torch._C._current_graph_task_id() == -1:
            self._settle(f"outside: {name}", [Record(Site(name, "*", "*"), (), "", 0, 0, "", why)])
        return not why

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
        hooks, mode = saved_tensors_hooks(self._pack, unpack), _Mode(self)
        hooks.__enter__()
        mode.__enter__()
        self._outer = (name, hooks, mode)

    def _stop(self, *, whole: bool) -> None:
        if self._outer is None:
            return
        name, hooks, mode = self._outer
        self._outer = self._op = None
        mode.__exit__(None, None, None)
        hooks.__exit__(None, None, None)
        self.saved.end()
        records, self.saved.records = self.saved.records, None
        if whole and records is not None:
            self._settle(name, records)

    def _settle(self, name: str, records: list[Record]) -> None:
        if name not in self._settled:
            self._settled.add(name)
            self.settle(records)

    # -- around ops -------------------------------------------------------------------------

    def run(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one torch function: replaced, or as it is with its saved tensors packed."""
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        module = self._module()
        call = recognise(name, args, kwargs)
        if call is not None:
            chosen = self._compressor(module, call)
            if chosen is not None:
                return self._replaced(module, call, chosen)
            name = call.op
        op = Op(module, _op_name(name, args), _tensors(args, kwargs))
        result = self._during(op, func, *args, **kwargs)
        if op.name in SMOOTH and self.derive_outputs:
            self._derive(op, result, func, args, kwargs)
        return result

    def _derive(
        self, op: Op, y: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Let later saves of a nonlinearity's output lean on the payload of its input."""
        (x,) = op.inputs if len(op.inputs) == 1 else (None,)
        if x is None or not isinstance(y, Tensor) or foreign(x) or storage_id(x) == storage_id(y):
            return
        source = self.saved.source_of(x)
        if source is None or layout_of(x) != layout_of(y):
            return

        # The closure must not hold `x` itself.
        hollow = tree_map_only(Tensor, lambda _: _HOLE, (args, kwargs))

        def again() -> Tensor:
            stored = source()
            args, kwargs = tree_map_only(_Hole, lambda _: stored, hollow)
            return func(*args, **kwargs)

        self.saved.derive(y, again, op.name)

    def _during(self, op: Op, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function while `op` is the one that saves."""
        outer, self._op = self._op, op
        try:
            result = func(*args, **kwargs)
        finally:
            self._op = outer
        if self.saved.watch is not None:
            self.saved.watch.after(op, result)
        return result

    def _pack(self, x: Tensor) -> Saved:
        return self.saved.pack(x, self._op or Op(self._module(), "autograd.Function"))

    def _module(self) -> str:
        return self._path[-1].name if self._path else ""

    def _compressor(self, module: str, call: Call) -> Compressor | None:
        """What the call saves its payload with, or None to run it as it is."""
        if not self._replaceable(call.x):
            return None
        chosen = self.saved.choose(Site(module, call.op, call.tensor))
        return None if isinstance(chosen, str) or not call.accepts(chosen) else chosen

    def _replaceable(self, x: Any) -> bool:
        return (
            isinstance(x, Tensor)
            and not foreign(x)
            and x.requires_grad
            and torch.is_grad_enabled()
            and x.is_floating_point()
            and x.numel() >= self.saved.min_elements
            and _top_hooks() == self._pack  # not inside someone's activation checkpointing
        )

    def _replaced(self, module: str, call: Call, compressor: Compressor) -> Any:
        op = Op(module, call.op, (call.x,), replaced=call.tensor)
        site = Site(module, call.op, call.tensor)
        key = self.saved.key(site)
        if self.saved.watch is not None:
            self.saved.watch.saved(site, call.x)
        y = self._during(op, call.run, compressor, key)
        again = output_again(y) if self.derive_outputs and isinstance(y, Tensor) else None
        if again is not None:
            self.saved.derive(y, again, op.name)
        return y


def _op_name(name: str, args: Sequence[Any]) -> str:
    """The op's name in sites: dunders and in-place marks stripped; `pow` with 2 is `square`."""
    name = name.strip("_")
    if name == "pow" and len(args) > 1 and not isinstance(args[1], Tensor) and args[1] == 2:
        return "square"
    return name


def _only_our_hooks(module: nn.Module) -> bool:
    """Whether no one else watches the module, who would see the empty tensor."""
    return (
        len(module._forward_pre_hooks) == len(module._forward_hooks) == 1
        and not module._backward_hooks
        and not module._backward_pre_hooks
    )


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The tensors among a function's arguments, one level of lists included."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, Tensor)]
    return tuple(found)


def _top_hooks() -> Any:
    """The pack function on top of autograd's stack of saved-tensor hooks, or None."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore
    return None if top is None else top[0]
