"""Saved tensors of compiled graphs: the pack and unpack functions that AOTAutograd inlines."""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from memtrain.activations.intercept import compiler_internals as internals
from memtrain.activations.intercept.graph_saves import GraphSaves
from memtrain.activations.intercept.graph_sites import GraphSites
from memtrain.activations.intercept.reentrancy import is_free
from memtrain.activations.intercept.shared_graphs import records_of
from memtrain.activations.saved.origin import foreign
from memtrain.activations.saved.saved_tensors import SavedTensors
from memtrain.activations.saved.site import Record

_Tensors = list[tuple[weakref.ref[Tensor], StorageWeakRef]]
_LEAVES = {Tensor, type(None), bool, int, float}

UNSUPPORTED = "it ran inside torch.compile, whose graphs this version of torch keeps to itself"
"""Why a compiled forward is left alone where torch's inside is another one."""


class CompiledGraphs:
    """Compresses what the compiled parts of a model's forward save.

    While a graph is compiled, hooks that are graphs themselves are on: AOTAutograd inlines them at
    the end of the compiled forward and at the beginning of its backward. When the graph runs, no
    hook does, and nothing here.

    `on_graphs` is called with the records of graphs that were compiled outside of a forward.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        saved: SavedTensors,
        on_graphs: Callable[[list[Record]], None],
    ) -> None:
        self.model, self.saved, self.on_graphs = model, saved, on_graphs
        self.why = ""
        """Why a graph was left alone, if one was."""
        self.root = ""
        """Path of the module whose forward runs now, not traced."""
        self.regions: frozenset[str] = frozenset()
        """Paths of what is compiled by itself in a copy of the model, while that one runs."""
        self.settings = internals.COMPRESSING
        self._clear()

    def _clear(self) -> None:
        self._modules: tuple[fx.GraphModule, fx.GraphModule] | None = None
        self._open: list[GraphSaves] = []
        # Of the forward's modules that are compiled by themselves: the tensors that each is given.
        self._given: dict[str, _Tensors] = {}
        # What the user gave the forward, and keeps alive; None where none began outside of Dynamo.
        self._own: _Tensors | None = None

    def __getstate__(self) -> dict[str, object]:
        runtime = ("_modules", "_open", "_given", "_own")
        return {name: value for name, value in vars(self).items() if name not in runtime}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._clear()

    def begin(self, inputs: Sequence[Tensor]) -> None:
        """Begin a forward outside of graphs."""
        self._own = _watched(inputs) if "torch._dynamo" in sys.modules else []

    def end(self) -> list[Record]:
        """End the forward that has begun; what the graphs save that were compiled in it."""
        graphs, self._open = self._open, []
        given, self._given = self._given, {}
        own, self._own = self._own or [], None
        if not graphs:
            return []
        storages = {path: [storage.cdata for _, storage in xs] for path, xs in given.items()}
        return records_of(graphs, self.model(), storages, {storage.cdata for _, storage in own})

    def _hooks(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        if self._modules is None:  # one pair for good
            self._modules = internals.inlined_call(self._pack), internals.inlined_call(self._unpack)
        return self._modules

    def called(self, path: str, args: Any, kwargs: Any) -> None:
        """Note what a module that is compiled by itself is given: others may share it."""
        if self._own is not None:
            values = (*args, *kwargs.values())
            flat = {*map(type, values)} <= _LEAVES  # mostly: pytrees take longer than the rest
            self._given[path] = _watched(values if flat else tree_leaves(values))

    def claim(self) -> None:
        """Compress what the graph saves that is traced now, though no forward began outside of it.

        The module is not known: equal modules run one graph, as long as everything that was read
        while the graph was traced is equal. Where a forward did begin, the hooks are there already.
        """
        compiler = internals.frame_compiler()
        if hasattr(compiler, "_memtrain"):
            return
        free = is_free()
        if compiler is None or not internals.is_supported():
            self.why = UNSUPPORTED if free else self.why
            return
        internals.guard_frame(is_free)
        if free:  # else someone's hooks, or checkpointing, have what the graph saves
            internals.compile_frame_by(self._around(compiler), self._hooks())

    def _around(self, compiler: Callable[..., Any]) -> Callable[..., Any]:
        """The compiler of a graph, with our hooks for it to inline."""

        @wraps(compiler)
        def inner(*args: Any, **kwargs: Any) -> Any:
            inside = self._own is not None
            if not inside:
                self.root = ""
            before = internals.configure(self.settings)
            try:
                with saved_tensors_hooks(*self._hooks()):
                    graph = compiler(*args, **kwargs)
            finally:
                internals.configure(before)
                if not inside and (records := self.end()):
                    self.on_graphs(records)
            return internals.run_without_modes(graph)

        vars(inner)["_memtrain"] = True
        return inner

    def _pack(self, x: Tensor, hooked: internals.Hooked) -> Any:
        return self._graph(hooked).pack(x, hooked.node)

    def _unpack(self, packed: Any, hooked: internals.Hooked) -> Tensor:
        return self._graph(hooked).unpack(packed, hooked.node)

    def _graph(self, hooked: internals.Hooked) -> GraphSaves:
        """The saves of the graph whose hooks are inlined now."""
        for graph in self._open:
            if graph.forward is hooked.forward:
                return graph
        internals.match_names(hooked.forward, hooked.backward)
        sites = GraphSites(
            hooked.forward,
            hooked.backward,
            {name for name, _ in self.model().named_modules()},
            self.root,
            internals.static_inputs(),
            sharded=any(_is_sharded(module) for module in self.model().modules()),
        )
        places = internals.input_places(sites.given, _alive(self._given.get(self.root, [])))
        if self._own is not None:
            sites.own = {*internals.input_places(sites.given, _alive(self._own))}
        self._open.append(GraphSaves(self.saved, hooked.forward, hooked.backward, sites, places))
        return self._open[-1]


def _watched(values: Iterable[Any]) -> _Tensors:
    """References to those of some values that are tensors, none of which stays alive by them."""
    tensors = (x for x in values if isinstance(x, Tensor) and not foreign(x))
    return [(weakref.ref(x), StorageWeakRef(x.untyped_storage())) for x in tensors]


def _alive(tensors: _Tensors) -> list[Tensor | None]:
    return [x() for x, _ in tensors]


def _is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2's `fully_shard` has been called on it."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
