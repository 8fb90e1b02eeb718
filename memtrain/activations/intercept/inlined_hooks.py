"""Saved tensors of compiled graphs: the pack and unpack functions that AOTAutograd inlines."""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from operator import methodcaller
from typing import Any

from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from memtrain.activations.intercept import compiler_internals as internals
from memtrain.activations.intercept.executor import run_unwatched
from memtrain.activations.intercept.graph_saves import GraphSaves
from memtrain.activations.intercept.graph_sites import GraphSites
from memtrain.activations.intercept.reentrancy import is_free, top_hooks
from memtrain.activations.intercept.shared_graphs import records_of
from memtrain.activations.saved.handles import Compressed, KeptTensor
from memtrain.activations.saved.origin import foreign
from memtrain.activations.saved.pack_hook import SavedTensors
from memtrain.activations.saved.payload_ops import (
    DECOMPRESS,
    compress_op,
    compressor_at,
    decompressor_at,
)
from memtrain.activations.saved.site import Record

_Tensors = list[tuple[weakref.ref[Tensor], StorageWeakRef]]
_unpack = methodcaller("unpack")
_LEAVES = {Tensor, type(None), bool, int, float}

UNSUPPORTED = "it ran inside torch.compile, whose graphs this version of torch keeps to itself"
"""Why a compiled forward is left alone where torch's inside is another one."""


class CompiledGraphs:
    """Compresses what the compiled parts of a model's forward save.

    The hooks of a forward are graphs themselves, where Dynamo is there: AOTAutograd then inlines
    them at the end of a compiled forward and at the beginning of its backward. When it runs, no
    hook does, and nothing here. Outside of compiled parts they are the hooks that they stand for.

    Args:
        model: Gives the model, whose modules are named.
        saved: Knows the rules, the seed, and the number of forwards.
        on_graphs: Called with the records of what graphs save that have been compiled.
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
        self._before: internals.Settings = {}  # torch's, as they were before the forward
        self._inside: internals.Settings = {}  # ours, while another's graph is compiled in it
        # Of the forward's modules that are compiled by themselves: the tensors that each is given.
        self._given: dict[str, _Tensors] = {}
        # What the user gave the forward, and keeps alive; None where none began outside of Dynamo.
        self._own: _Tensors | None = None

    def __getstate__(self) -> dict[str, object]:
        runtime = ("_modules", "_open", "_before", "_inside", "_given", "_own")
        return {name: value for name, value in vars(self).items() if name not in runtime}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._clear()

    def hooks(self, given: Sequence[Tensor] | None = None) -> tuple[Any, Any]:
        """The pack and the unpack function of a forward that begins.

        Args:
            given: The user's tensors that it is called with, where they are known.
        """
        if "torch._dynamo" not in sys.modules:
            return self.saved.pack, _unpack
        if not internals.is_supported():
            self.why = UNSUPPORTED
            return self.saved.pack, _unpack
        self._before = internals.configure(self.settings)
        internals.on_compilation(self._step_out, self._step_back)
        self._own = None if given is None else _watched(given)
        return self._inlined()

    def _inlined(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        if self._modules is None:  # one pair for good: graphs are guarded by which it is
            self._modules = (
                internals.inlined_call(self.saved.pack, self._pack, (Tensor,)),
                internals.inlined_call(_unpack, self._unpack, (Compressed, KeptTensor)),
            )
        return self._modules

    def _step_out(self, _: object) -> None:
        # What checkpointing drops is saved by as many tensors where it runs again, which may be
        # compiled anew, outside of the forward.
        if not isinstance(top_hooks(), fx.GraphModule):
            self._inside = internals.configure(self._before)

    def _step_back(self, _: object) -> None:
        internals.configure(self._inside)
        self._inside = {}

    def end(self) -> list[Record]:
        """End the forward that has begun; what the graphs save that were compiled in it."""
        if self._before:
            internals.off_compilation(self._step_out, self._step_back)
        internals.configure(self._before)
        self._before = {}
        graphs, self._open = self._open, []
        given, self._given = self._given, {}
        own, self._own = self._own or [], None
        if not graphs:
            return []
        storages = {path: [storage.cdata for _, storage in xs] for path, xs in given.items()}
        return records_of(graphs, self.model(), storages, {storage.cdata for _, storage in own})

    def called(self, path: str, args: Any, kwargs: Any) -> None:
        """Note what a module that is compiled by itself is given: others may share it."""
        if self._before:
            values = (*args, *kwargs.values())
            flat = {*map(type, values)} <= _LEAVES  # mostly: pytrees take longer than the rest
            self._given[path] = _watched(values if flat else tree_leaves(values))

    def claim(self) -> None:
        """Compress what the graph saves that is traced now, though no forward began outside of it.

        It is not told of which module: equal modules run one graph, as long as nothing that was
        read while it was traced tells them apart. Where a forward did begin, the hooks are there;
        what is left is that the graph's ops need no one to watch them.
        """
        compiler = internals.frame_compiler()
        if hasattr(compiler, "_memtrain"):
            return
        free = is_free()
        if compiler is None or not internals.is_supported():
            self.why = UNSUPPORTED if free else self.why
            return
        if not isinstance(top_hooks(), fx.GraphModule):  # torch's own guard tells which those are
            internals.guard_frame(is_free)
        if not free:  # `hooks` has seen to it, or checkpointing drops what it saves
            internals.compile_frame_by(self._beside(compiler))
            return
        internals.compile_frame_by(self._around(compiler), self._inlined())

    def _beside(self, compiler: Callable[..., Any]) -> Callable[..., Any]:
        """The compiler of a graph, of which no one watches the ops that it runs."""

        @wraps(compiler)
        def inner(*args: Any, **kwargs: Any) -> Any:
            before = len(self._open)
            graph = compiler(*args, **kwargs)
            hooked = len(self._open) > before  # else its ops save by hooks that are told of each
            return run_unwatched(graph) if hooked else graph

        vars(inner)["_memtrain"] = True
        return inner

    def _around(self, compiler: Callable[..., Any]) -> Callable[..., Any]:
        """The compiler of a graph, with our hooks for it to inline."""

        @wraps(compiler)
        def inner(*args: Any, **kwargs: Any) -> Any:
            self.root = ""
            try:
                with saved_tensors_hooks(*self.hooks()):
                    return compiler(*args, **kwargs)
            finally:
                records = self.end()
                if records:
                    self.on_graphs(records)

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
        internals.name_alike(hooked.forward, hooked.backward)
        internals.call_directly(compress_op.default, compressor_at, "x")
        for op in DECOMPRESS:
            internals.call_directly(op, decompressor_at, "parts shape")
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
