"""Saved tensors of compiled graphs: the pack and unpack functions that AOTAutograd inlines."""

import sys
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from memtrain.activations.intercept import compiler_internals as internals
from memtrain.activations.intercept.graph_saves import GraphSaves
from memtrain.activations.intercept.graph_sites import MODEL_INPUT, GraphSites
from memtrain.activations.intercept.reentrancy import is_free
from memtrain.activations.saved.origin import unsupported
from memtrain.activations.saved.saved_tensors import SavedTensors
from memtrain.activations.saved.site import Record

_Graphs = list[tuple[str, list[Record], dict[int, int]]]
"""Of each graph of a frame: the path of the module that it was compiled for, its records, and the
numbers of storages in the records -> which of the module's inputs they are."""
_Tensors = list[tuple[weakref.ref[Tensor], StorageWeakRef]]
_LEAVES = {Tensor, type(None), bool, int, float}

UNSUPPORTED = "it ran inside torch.compile, whose graphs this version of torch keeps to itself"
"""Why a compiled forward is left alone where torch's inside is another one."""
EQUAL = "it ran by the graph of an equal module, which was compiled for a model that is not wrapped"
"""Why a compiled forward is left alone for which no graph was compiled."""


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
        self.compiled = False
        """Whether a graph was compiled with hooks."""
        self.root = ""
        """Path of the module whose forward runs now, not traced."""
        self.regions: frozenset[str] = frozenset()
        """Paths of what is compiled by itself in a copy of the model, while that one runs."""
        self.settings = internals.COMPRESSING
        self._clear()

    def _clear(self) -> None:
        self._modules: tuple[fx.GraphModule, fx.GraphModule] | None = None
        self._open: list[GraphSaves] = []  # of the graph that is being compiled
        self._compiled: list[_Graphs] = []  # in this forward
        self._runs: list[tuple[_Graphs, str]] = []  # of this forward, with the running module
        # Of the forward's modules that are compiled by themselves: the tensors that each is given.
        self._inputs: dict[str, _Tensors] = {}
        # What the user gave the forward, and keeps alive; None where none began outside of Dynamo.
        self._model_inputs: _Tensors | None = None

    def __getstate__(self) -> dict[str, object]:
        runtime = ("_modules", "_open", "_compiled", "_runs", "_inputs", "_model_inputs")
        return {name: value for name, value in vars(self).items() if name not in runtime}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._clear()

    def begin(self, inputs: Sequence[Tensor]) -> None:
        """Begin a forward outside of graphs."""
        self._model_inputs = _watched(inputs) if internals.is_dynamo_imported() else []

    def end(self) -> list[Record]:
        """End the forward; return the records of the graphs that were compiled in it."""
        compiled, self._compiled = self._compiled, []
        runs, self._runs = self._runs, []
        inputs, self._inputs = self._inputs, {}
        model_inputs, self._model_inputs = self._model_inputs or [], None
        if inputs and not self.compiled:
            self.why = self.why or EQUAL
        if not compiled:
            return []
        storages = {path: [storage.cdata for _, storage in xs] for path, xs in inputs.items()}
        new = [(graphs, path) for graphs, path in runs if any(graphs is one for one in compiled)]
        return records_of(new, storages, {storage.cdata for _, storage in model_inputs})

    def _hooks(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        if self._modules is None:  # one pair for good
            self._modules = internals.inlined_call(self._pack), internals.inlined_call(self._unpack)
        return self._modules

    def called(self, path: str, args: Any, kwargs: Any) -> None:
        """Note the inputs of a compiled module: other modules may share them."""
        if self._model_inputs is not None:
            values = (*args, *kwargs.values())
            flat = {*map(type, values)} <= _LEAVES  # mostly: pytrees take longer than the rest
            self._inputs[path] = _watched(values if flat else tree_leaves(values))

    def claim(self) -> None:
        """Compress the saved tensors of a graph that is traced outside of a known forward.

        The module is not known: equal modules run one graph, as long as everything that was read
        while the graph was traced is equal. Where a forward did begin, the hooks are there already.
        """
        compiler = internals.frame_compiler()
        if hasattr(compiler, "_memtrain"):
            return
        free = is_free()
        if compiler is None:
            self.why = UNSUPPORTED if free else self.why
            return
        internals.guard_frame(is_free)
        if free:  # else someone's hooks, or checkpointing, have what the graph saves
            internals.compile_frame_by(self._around(compiler), self._hooks())

    def _around(self, compiler: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiler of a graph, with our hooks for it to inline."""

        @wraps(compiler)
        def inner(*args: Any, **kwargs: Any) -> Any:
            inside = self._model_inputs is not None
            if not inside:
                self.root = ""
            self.compiled = True
            before = internals.configure(self.settings)
            try:
                with saved_tensors_hooks(*self._hooks()):
                    graph = compiler(*args, **kwargs)
            finally:
                internals.configure(before)
                compiled, self._open = self._open, []
            graphs = [(one.sites.root, one.records, one.positions) for one in compiled]
            if inside:
                self._compiled.append(graphs)
            elif records := records_of([(graphs, "")], {}, ()):
                self.on_graphs(records)
            owner = weakref.ref(self)  # torch keeps the graph for longer

            def runs() -> None:
                one = owner()
                if one is not None and one._model_inputs is not None:
                    one._runs.append((graphs, one.root))

            return internals.run_without_modes(graph, runs)

        vars(inner)["_memtrain"] = True
        return inner

    def _pack(self, x: Tensor, forward: fx.Graph, backward: fx.Graph, node: fx.Node) -> Any:
        return self._graph(forward, backward).pack(x, node)

    def _unpack(self, packed: Any, forward: fx.Graph, backward: fx.Graph, node: fx.Node) -> Tensor:
        return self._graph(forward, backward).unpack(packed, node)

    def _graph(self, forward: fx.Graph, backward: fx.Graph) -> GraphSaves:
        """Return the saves of the graph whose hooks are inlined now."""
        for graph in self._open:
            if graph.forward is forward:
                return graph
        internals.match_names(forward, backward)
        sites = GraphSites(
            forward,
            backward,
            {name for name, _ in self.model().named_modules()},
            self.root,
            internals.static_inputs(),
            [*self.model().parameters()],
            sharded=any(map(_is_sharded, self.model().modules())),
        )
        positions = internals.input_positions(
            sites.data_inputs, _alive(self._inputs.get(self.root, []))
        )
        if self._model_inputs is not None:
            sites.model_inputs = {
                *internals.input_positions(sites.data_inputs, _alive(self._model_inputs))
            }
        self._open.append(GraphSaves(self.saved, forward, backward, sites, positions))
        return self._open[-1]


def _watched(values: Iterable[Any]) -> _Tensors:
    """References to those of some values that are tensors, none of which stays alive by them."""
    tensors = (x for x in values if isinstance(x, Tensor) and not unsupported(x))
    return [(weakref.ref(x), StorageWeakRef(x.untyped_storage())) for x in tensors]


def _alive(tensors: _Tensors) -> list[Tensor | None]:
    return [x() for x, _ in tensors]


def _is_sharded(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


# -- graphs that several equal modules run: records for each module, and bytes once --------------


def records_of(
    runs: Sequence[tuple[_Graphs, str]],
    inputs_by_path: Mapping[str, Sequence[int]],
    model_inputs: Container[int],
) -> list[Record]:
    """Return the records of the graphs that one forward has run, each with the running module.

    `inputs_by_path` maps the path of a called, compiled module to the storages of its inputs. The
    user keeps the storages in `model_inputs` alive.
    """
    found: list[Record] = []
    counted: dict[int, tuple[int, bool]] = {}  # a given storage -> its number, is it kept
    for root, records, positions, path in ((*one, path) for graphs, path in runs for one in graphs):
        offset = 1 + max((record.storage for record in found), default=0)
        inputs = inputs_by_path.get(path, [])
        for record in records:
            moved = _moved(record, root, path, offset)
            position = positions.get(record.storage, len(inputs))
            if position < len(inputs):
                kept = record.planned == record.nbytes
                if kept and inputs[position] in model_inputs:
                    moved = moved._replace(nbytes=0, planned=0, reason=MODEL_INPUT)
                else:
                    moved = _once(moved, inputs[position], counted)
            found.append(moved)
    return found


def _moved(record: Record, root: str, path: str, offset: int) -> Record:
    """Return the record of a module's graph, for the module at another path."""
    module = record.site.module
    if module == root or module.startswith(f"{root}."):
        module = f"{path}{module[len(root) :]}"
    site = record.site._replace(module=module)
    return record._replace(site=site, storage=record.storage + offset)


def _once(record: Record, storage: int, counted: dict[int, tuple[int, bool]]) -> Record:
    """The record of a storage that other modules are given too, without what they count of it.

    The record has the bytes of its graph, and `storage` identifies the storage within the
    forward. `counted` maps it to its number and to whether it is kept; it is updated.
    """
    kept = record.planned == record.nbytes
    if storage not in counted:
        if record.nbytes:
            counted[storage] = record.storage, kept
        return record
    number, alive = counted[storage]
    counted[storage] = number, alive or (kept and record.nbytes > 0)
    planned = 0 if kept and alive else record.planned
    return record._replace(nbytes=0, planned=planned, storage=number)
