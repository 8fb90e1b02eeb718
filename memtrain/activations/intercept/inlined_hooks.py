"""Saved tensors of compiled graphs: the pack and unpack functions that AOTAutograd inlines.

The one module that touches what torch.compile does not promise to keep: the instance that traces a
frame, the compiler that its graph is given to, and the node whose saved tensor is being packed.
"""

import sys
import weakref
import zlib
from collections.abc import Callable
from functools import cache, wraps
from itertools import count
from operator import methodcaller
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from memtrain.activations.intercept.graph_kinks import (
    Kink,
    erase_unread,
    find_kinks,
    keep_answers,
    stand_in,
)
from memtrain.activations.intercept.graph_order import compress_early, decompress_late
from memtrain.activations.intercept.graph_recomputed import Held, compress_recomputed
from memtrain.activations.intercept.graph_sites import (
    OWN_INPUT,
    GraphSites,
    example,
    is_static,
    is_tensor,
    storage_nbytes,
    storage_of,
    stripped,
)
from memtrain.activations.intercept.reentrancy import top_hooks
from memtrain.activations.saved import payload_ops
from memtrain.activations.saved.expected import BETWEEN
from memtrain.activations.saved.fit import FLOATS, INTEGERS
from memtrain.activations.saved.flatten import flatten
from memtrain.activations.saved.origin import foreign
from memtrain.activations.saved.pack_hook import SavedTensors
from memtrain.activations.saved.site import RECOMPUTE, Record, Site
from memtrain.compressors import Compressor, Group, Host, Integers, Keep, Key, Mask

_unpack = methodcaller("unpack")

UNSUPPORTED = "it ran inside torch.compile, whose graphs this version of torch keeps to itself"
"""Why a compiled forward is left alone where torch's inside is another one."""
DERIVATIVE_BITS = 2
"""More bits than its derivative code: of a tensor that gives the op's output again, too."""

_AOT, _INDUCTOR = "torch._functorch.config", "torch._inductor.config"
_SETTINGS = {
    _AOT: {
        "saved_tensors_hooks_filtering_mode": "no_static",  # hooks are handed all but parameters
        # What a matrix product of the backward reads (the output of a normalization or of a
        # nonlinearity, a copy of a weight in another dtype) may be computed again from what is
        # saved beside it. Torch saves it to spare the backward that op; compressed, it would cost
        # bytes and errors twice.
        "ban_recompute_materialized_backward": False,
        # The backward is compiled at once, and so by what is set here too.
        "force_non_lazy_backward_lowering": True,
    },
    # A buffer that waits for the next tensor of its size is alive between the two: inductor lets
    # it wait where it expects the peak elsewhere, as it is without us.
    _INDUCTOR: {"allow_buffer_reuse": False},
}
"""Of torch's modules, while our graphs are compiled."""
PLAIN = {_AOT: {"saved_tensors_hooks_filtering_mode": "no_static"}}
"""The same where graphs are to save what they do without us, to see what that is."""


class _Packing(NamedTuple):
    """The way that one saved tensor of a graph is packed."""

    form: payload_ops.Form
    key: tuple[int, ...]
    parts: int


class CompiledGraphs:
    """Compresses what the compiled parts of a model's forward save.

    The hooks of a forward are graphs themselves, where Dynamo is there: AOTAutograd then inlines
    them at the end of a compiled forward and at the beginning of its backward. When it runs, no
    hook does, and nothing here. Outside of compiled parts they are the hooks that they stand for.

    Args:
        model: Its modules are named.
        saved: Knows the rules, the seed, and the number of forwards.
        on_graphs: Called with the records of what graphs save that have been compiled.
    """

    def __init__(
        self, model: nn.Module, saved: SavedTensors, on_graphs: Callable[[list[Record]], None]
    ) -> None:
        self.model, self.saved, self.on_graphs = model, saved, on_graphs
        self.why = ""
        """Why a graph was left alone, if one was."""
        self.root = ""
        """Path of the module whose forward runs now, not traced."""
        self.settings: dict[str, dict[str, Any]] = _SETTINGS
        self._clear()

    def _clear(self) -> None:
        self._modules: tuple[Any, Any] | None = None
        self._open: list[_Graph] = []
        self._before: dict[str, dict[str, Any]] = {}  # torch's, as they were before the forward
        # Of the forward's modules that are compiled by themselves: the tensors that each is given.
        self._given: dict[str, list[tuple[weakref.ref[Tensor], StorageWeakRef]]] = {}

    def __getstate__(self) -> dict[str, object]:
        runtime = ("_modules", "_open", "_before", "_given")
        return {name: value for name, value in vars(self).items() if name not in runtime}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._clear()

    def hooks(self) -> tuple[Any, Any]:
        """The pack and the unpack function of a forward that begins."""
        if "torch._dynamo" not in sys.modules:
            return self.saved.pack, _unpack
        if not _supported():
            self.why = UNSUPPORTED
            return self.saved.pack, _unpack
        if self._modules is None:  # one pair for good: graphs are guarded by which it is
            self._modules = (
                _one_call(self.saved.pack, self._pack),
                _one_call(_unpack, self._unpack),
            )
        self._before = _configure(self.settings)
        return self._modules

    def end(self) -> list[Record]:
        """End the forward that has begun; what the graphs save that were compiled in it."""
        _configure(self._before)
        self._before = {}
        graphs, self._open = self._open, []
        given, self._given = self._given, {}
        found: list[Record] = []
        counted: dict[int, tuple[int, bool]] = {}  # a given storage -> its number, is it kept
        for graph in graphs:
            for path in [graph.root, *self._siblings(graph.root, graphs)]:
                offset = 1 + max((record.storage for record in found), default=0)
                inputs = [storage.cdata for _, storage in given.get(path, [])]
                for record in graph.records:
                    place = graph.places.get(record.storage, len(inputs))
                    moved = _moved(record, graph.root, path, offset)
                    if place < len(inputs):
                        moved = _once(moved, inputs[place], counted)
                    found.append(moved)
        return found

    def called(self, path: str, args: Any, kwargs: Any) -> None:
        """Note what a module that is compiled by itself is given: others may share it."""
        if self._before:
            tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
            self._given[path] = [
                (weakref.ref(x), StorageWeakRef(x.untyped_storage()))
                for x in tensors
                if not foreign(x)
            ]

    def claim(self) -> None:
        """Compress what the graph saves that is traced now, though no forward began outside of it.

        It is not told of which module: equal modules run one graph, as long as nothing that was
        read while it was traced tells them apart.
        """
        if top_hooks() is not None:  # ours, or another's: `hooks` has seen to it
            return
        try:
            output = _tracing()
            install = output.maybe_install_saved_tensors_hooks_subgraphs
            compiler = output.compiler_fn
        except (AttributeError, ImportError):
            self.why = UNSUPPORTED
            return
        if hasattr(compiler, "_memtrain"):
            return
        hooks = self.hooks()
        _configure(self._before)
        if self._modules is None:
            return
        with saved_tensors_hooks(*hooks):  # so that caches of whole compilations pass it over
            output.saved_tensors_hooks_subgraph_names = install()
        output.compiler_fn = self._around(compiler)

    vars()["claim"]._dynamo_marked_constant = True  # run by the tracer, not traced

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

    def _graph(self, given: Any) -> "_Graph":
        forward = given["_fw_graph"]
        for graph in self._open:
            if graph.forward is forward:
                return graph
        _name_alike(forward, given["_bw_graph"])
        modules = {name for name, _ in self.model.named_modules()}
        sharded = any(_is_sharded(module) for module in self.model.modules())
        sites = GraphSites(
            forward, given["_bw_graph"], modules, self.root, _static(), sharded=sharded
        )
        inputs = [x() for x, _ in self._given.get(self.root, [])]
        places = _places(sites.given, inputs)
        self._open.append(_Graph(self.saved, forward, given["_bw_graph"], sites, self.root, places))
        return self._open[-1]

    def _pack(self, x: Tensor, given: Any) -> Any:
        return self._graph(given).pack(x, given["_node"])

    def _unpack(self, packed: Any, given: Any) -> Tensor:
        graph = self._graph(given)
        if given["_node"] is graph.last:
            # What the hooks of the tensors before have put into the graphs; the last tensor's
            # unpacking comes after this, at the head of a backward that needs it first.
            keep_answers(given["_fw_graph"], given["_bw_graph"], graph.kinks)
            compress_early(given["_fw_graph"])
            decompress_late(given["_bw_graph"])
            with _no_modes():
                graph.compress_recomputed()
        return graph.unpack(packed, given["_node"])

    def _siblings(self, root: str, graphs: list["_Graph"]) -> list[str]:
        """Paths of modules compiled by themselves that run the graphs of one equal to them.

        Of several that have graphs (the first block's input needs no gradient) it is the last one
        before them.
        """
        if not root or not _is_compiled(self.model, root):
            return []
        own, roots = self.model.get_submodule(root), {graph.root for graph in graphs}
        alike = [
            name
            for name, module in self.model.named_modules()
            if name and _is_compiled(self.model, name) and _alike(module, own)
        ]
        found: list[str] = []
        latest = next(name for name in alike if name in roots)
        for name in alike:
            latest = name if name in roots else latest
            if latest == root != name:
                found.append(name)
        return found


class _Graph:
    """One graph that is being compiled."""

    def __init__(
        self,
        saved: SavedTensors,
        forward: fx.Graph,
        backward: fx.Graph,
        sites: GraphSites,
        root: str,
        places: dict[int, int],
    ) -> None:
        self.saved, self.forward, self.sites, self.root = saved, forward, sites, root
        self._places = places
        # Two: by the time that a backward runs, its forward may not be the last one that ran.
        self.number, self.backward_number = payload_ops.graph_number(), payload_ops.graph_number()
        outputs = cast(Any, forward.output_node().args[0])
        self.last = next((node for node in reversed(outputs) if sites.is_hooked(node)), None)
        """The saved tensor that is handed to the hooks after all others."""
        self.records: list[Record] = []
        self._packings: dict[fx.Node, _Packing | None] = {}
        self._kept: dict[int, int] = {}  # storage -> its number
        self.kinks: dict[int, Kink] = {}
        """By numbers from 1: those of which the forward's answer is kept."""
        self._recomputed: fx.Graph | None = backward
        self._backward_places = count()  # of the backward's own compressing ops
        with _no_modes():
            self._answer(backward)

    @property
    def places(self) -> dict[int, int]:
        """Numbers of storages in the records -> which of its module's inputs they are."""
        kept, places = self._kept, self._places
        return {kept[storage]: place for storage, place in places.items() if storage in kept}

    def _answer(self, backward: fx.Graph) -> None:
        """Choose the kinks whose answers are kept: where that takes fewer than 8 bits in all."""
        outputs = cast(Any, self.forward.output_node().args[0])
        hooked = {node for node in outputs if self.sites.is_hooked(node) and node is not self.last}
        found = find_kinks(
            self.forward, backward, lambda node: node in hooked and example(node).dtype in FLOATS
        )
        self.sites.answered = {node for kink in found for node in kink.behind}
        for carrier in dict.fromkeys(kink.carrier for kink in found):
            kinks = [kink for kink in found if kink.carrier is carrier]
            _, chosen = self._choose(carrier, example(carrier))
            bits = None if isinstance(chosen, Keep) or chosen.is_identity else chosen.bits
            if isinstance(bits, int) and bits + len(kinks) < 8:
                self.kinks.update(enumerate(kinks, 1 + len(self.kinks)))
        kept = self.kinks.values()
        self.sites.answered = {node for kink in kept for node in kink.behind}
        for kink in reversed(found):
            if kink not in kept:
                erase_unread(self.forward, kink.answer)

    def pack(self, x: Tensor, node: fx.Node) -> Any:
        """Give the graph what it holds in place of a saved tensor."""
        if node not in self._packings:
            with _no_modes():
                self._packings[node] = self._decide(node)
        packing = self._packings[node]
        if packing is None:
            return x
        parts = payload_ops.compress(x, packing.form, packing.key)
        sizes = [size for size in x.shape if not isinstance(size, int)]
        return [*parts, *sizes, *self._answers(x, node)]

    def unpack(self, packed: Any, node: fx.Node) -> Tensor:
        """The saved tensor of what `pack` gave."""
        packing = self._packings[node]
        if packing is None:
            return packed
        x = node.meta["val"]
        sizes = iter(packed[packing.parts :])
        shape = [size if isinstance(size, int) else next(sizes) for size in x.shape]
        return payload_ops.decompress(packed[: packing.parts], packing.form, shape, x.dtype)

    def compress_recomputed(self) -> None:
        """Let the backward compress what it computes again and reads late; once."""
        backward, self._recomputed = self._recomputed, None
        if backward is not None:
            compress_recomputed(backward, self._choose_recomputed)

    def _answers(self, x: Tensor, node: fx.Node) -> list[Tensor]:
        """The payloads that a saved tensor carries besides its own."""
        kinks = [(kink, number) for number, kink in self.kinks.items() if kink.carrier is node]
        return [part for kink, number in kinks for part in stand_in(x, kink, number)]

    def _decide(self, node: fx.Node) -> _Packing | None:
        x, saved = example(node), self.saved
        site, chosen = self._choose(node, x)
        parts: dict[str, Tensor] = {}
        if isinstance(chosen, Compressor) and not chosen.is_identity:
            flat, layout = flatten(x)
            try:
                parts = chosen.compress(x if chosen.shaped else flat, key=Key()).tensors
            except Exception as error:  # noqa: BLE001 (a compressor of the user's own may raise any)
                chosen = Keep(f"{NO_FAKE}: {type(chosen).__name__}: {error}")
            else:
                planned = sum(part.nbytes for part in parts.values())
                if planned < x.numel() * x.element_size():
                    form = payload_ops.form_of(chosen, layout, list(parts))
                    number, counter = zlib.crc32(site.name.encode()), payload_ops.counter_of(saved)
                    key = (saved.seed, number, counter, self.number, len(self._packings))
                    self._record(site, node, x, planned, repr(chosen))
                    self._record_answers(node, x)
                    return _Packing(form, key, len(parts))
                chosen = Keep("its payload would be no smaller")
        kept = isinstance(chosen, Keep)
        reason, name = (chosen.reason, "") if kept else ("", repr(chosen))
        self._record(site, node, x, None, name, reason)
        return None

    def _choose_recomputed(self, node: fx.Node, readers: list[fx.Node]) -> Held | None:
        """How to hold a tensor of the backward that waits for readers; None to keep it."""
        twin = self.sites.known.get(node.name)
        if twin is None or not is_static(twin):
            return None
        x = example(twin)
        site, chosen = self._choose(twin, x, readers)
        if isinstance(chosen, Keep) or chosen.is_identity:
            return None
        flat, layout = flatten(x)
        try:
            parts = chosen.compress(x if chosen.shaped else flat, key=Key()).tensors
        except Exception:  # noqa: BLE001 (`_decide` tells it of what is saved)
            return None
        if sum(part.nbytes for part in parts.values()) >= x.numel() * x.element_size():
            return None
        number = zlib.crc32(f"{site.name} again".encode())
        counter = payload_ops.counter_of(self.saved)
        key = (self.saved.seed, number, counter, self.backward_number, next(self._backward_places))
        return payload_ops.form_of(chosen, layout, list(parts)), key

    def _choose(
        self, node: fx.Node, x: Tensor, readers: list[fx.Node] | None = None
    ) -> tuple[Site, Compressor | Keep]:
        """The strictest of the choices for what reads the tensor, and the site that it is for."""
        sites, saved = self.sites, self.saved
        uses = sites.uses(node, readers)
        places = [use.site for use in uses] or [sites.site(node)]
        why = sites.why_keep(node, uses, saved.min_elements)
        if why:
            return places[0], Keep(why)
        if sites.checkpointed(node):
            place = Site(places[0].module, RECOMPUTE, "input")
            return place, saved.checkpointed
        jumps = any(use.jumps for use in uses)
        limit = sites.limit(node)
        options = [(place, _fit(saved.choose(place), x, limit, jumps=jumps)) for place in places]
        return max(options, key=lambda option: _strictness(option[1], x))

    def _record_answers(self, node: fx.Node, x: Tensor) -> None:
        for kink in self.kinks.values():
            if kink.carrier is node:
                mask = Mask()
                held = mask.compress(torch.empty_like(x, dtype=torch.bool), key=Key()).nbytes
                site = self.sites.kink_site(kink.asked)
                number = self._kept.setdefault(storage_of(kink.answer), len(self._kept))
                row = Record(site, tuple(x.shape), "bool", 0, held, repr(mask), "", number)
                self.records.append(row)

    def _record(
        self,
        site: Site,
        node: fx.Node,
        x: Tensor,
        planned: int | None,
        compressor: str,
        reason: str = "",
    ) -> None:
        base = stripped(node)
        storage = storage_of(base if is_tensor(base) else node)
        first = storage not in self._kept and reason != OWN_INPUT
        number = self._kept.setdefault(storage, len(self._kept))
        nbytes = storage_nbytes(node) if first else 0
        dtype = str(x.dtype).removeprefix("torch.")
        held = nbytes if planned is None else planned
        shape = tuple(x.shape)
        self.records.append(Record(site, shape, dtype, nbytes, held, compressor, reason, number))


NO_FAKE = "its compressor has no form on tensors without data, which graphs are traced with"
"""Begins the reason where a compressor of the user's own cannot be traced."""
HOST = Keep("inside torch.compile nothing is swapped out to the host")
UNKNOWN_RANGE = Keep("integers whose range the compiler does not know")


def _fit(chosen: Compressor | Keep, x: Tensor, limit: int | None, *, jumps: bool) -> Any:
    """The compressor for this dtype, where what reads the tensor computes it again too."""
    if isinstance(chosen, Keep) or chosen.is_identity:
        return chosen
    if x.dtype == torch.bool:
        return Mask()
    if x.dtype in INTEGERS:
        return UNKNOWN_RANGE if limit is None else Integers(limit=limit)
    if x.dtype not in FLOATS:
        return Keep(f"dtype {x.dtype}")
    if isinstance(chosen, Host):
        return HOST
    if chosen.gives_derivative:
        chosen = Group(bits=min(8, chosen.bits + DERIVATIVE_BITS))
    if jumps and isinstance(chosen.bits, int) and chosen.bits < 8:
        chosen = chosen.with_width(8)
    return chosen


def _strictness(chosen: Compressor | Keep, x: Tensor) -> float:
    if isinstance(chosen, Keep) or chosen.is_identity:
        return float("inf")
    try:
        flat = x if chosen.shaped else flatten(x)[0]
        return sum(part.nbytes for part in chosen.compress(flat, key=Key()).tensors.values())
    except Exception:  # noqa: BLE001 (`_decide` tells it)
        return float("inf")


def inside_compiled(model: Any) -> nn.Module | None:
    """The module that `torch.compile(module)` was given, of what it returned; None of others.

    Example:
        >>> inside_compiled(nn.Linear(1, 1)) is None
        True
    """
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    compiled = dynamo is not None and isinstance(model, dynamo.OptimizedModule)
    return model._orig_mod if compiled else None


def _is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2's `fully_shard` has been called on it."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def _is_compiled(model: nn.Module, name: str) -> bool:
    """Whether a module is compiled by itself: in place, or by `torch.compile` around it."""
    module = model.get_submodule(name)
    above = model.get_submodule(name.rpartition(".")[0])
    return module._compiled_call_impl is not None or inside_compiled(above) is not None


def _moved(record: Record, root: str, path: str, offset: int) -> Record:
    """The record of a module's graph, for the module at another path."""
    module = record.site.module
    if module == root or module.startswith(f"{root}."):
        module = f"{path}{module[len(root) :]}"
    site = record.site._replace(module=module)
    return record._replace(site=site, storage=record.storage + offset)


def _once(record: Record, given: int, counted: dict[int, tuple[int, bool]]) -> Record:
    """The record of a storage that other modules are given too, without what they count of it.

    Args:
        record: Its bytes are those of its own graph.
        given: Tells the storage from others of the forward.
        counted: The number of each that is counted, and whether it is kept as it is; added to.
    """
    kept = record.planned == record.nbytes
    if given not in counted:
        if record.nbytes:
            counted[given] = record.storage, kept
        return record
    number, alive = counted[given]
    counted[given] = number, alive or (kept and record.nbytes > 0)
    planned = 0 if kept and alive else record.planned
    return record._replace(nbytes=0, planned=planned, storage=number)


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules have one class and parameters of the same names and shapes."""
    return type(one) is type(other) and _shapes(one) == _shapes(other)


def _shapes(module: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, p.shape) for name, p in module.named_parameters()]


# -- torch's inside ------------------------------------------------------------------------------


def _tracing() -> Any:
    """The output graph that Dynamo traces now."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output


@cache
def _supported() -> bool:
    try:
        from torch._functorch import config
        from torch._functorch._aot_autograd import graph_compile
    except ImportError:
        return False
    inside = hasattr(graph_compile, "_get_saved_tensor_hook_context")
    return inside and hasattr(config, "saved_tensors_hooks_filtering_mode")


def run_untraced(*functions: Callable[..., Any]) -> None:
    """Let Dynamo run functions, and what they call, as they are where they are frames themselves.

    The hooks of a module that is compiled whole are. Where such a call is traced as a part of
    another frame, it is traced as ever.
    """
    from torch._C._dynamo import eval_frame

    try:
        action: Any = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(action, action)
        for function in functions:
            eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except AttributeError:
        return  # of a torch that has no graphs for us either


def _configure(settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Change what there is of settings, in modules that are imported; gives what it was before."""
    before: dict[str, dict[str, Any]] = {}
    for path, values in settings.items():
        config = sys.modules.get(path)
        if config is not None:
            known = {name: getattr(config, name) for name in values if hasattr(config, name)}
            for name in known:
                setattr(config, name, values[name])
            before[path] = known
    return before


def _places(placed: set[fx.Node], inputs: list[Tensor | None]) -> dict[int, int]:
    """Storages of a graph's inputs -> which of the tensors they are that it was traced with."""
    values = [node.meta["val"] for node in placed if is_tensor(node)]
    storages = {x.untyped_storage()._cdata for x in values}
    found: dict[int, int] = {}
    for place, x in enumerate(inputs if values else []):
        fake = None if x is None else values[0].fake_mode.fake_tensor_converter._get_memo(x)
        if fake is not None and fake.untyped_storage()._cdata in storages:
            found.setdefault(fake.untyped_storage()._cdata, place)
    return found


def _static() -> list[int]:
    """Numbers of the inputs that are parameters or buffers, of the graph that is packed now."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "maybe_inline_graph_saved_tensors_hooks":
            return [*frame.f_locals["static_input_indices"]]
        frame = frame.f_back
    raise RuntimeError("a graph is packed by another function than torch's own")


def _name_alike(forward: fx.Graph, backward: fx.Graph) -> None:
    """Give the inputs of a backward the names of the forward's outputs, by which torch finds them.

    Where activation checkpointing keeps states of random generators, they have names of their own.
    """
    inputs = [
        node
        for node in backward.find_nodes(op="placeholder")
        if not str(node.target).startswith("tangents")
    ]
    outputs = forward.output_node().args[0]
    last = cast(Any, outputs)[-len(inputs) :] if inputs else []
    given, taken = {node.name for node in inputs}, {node.name for node in last}
    others = [node for node in inputs if node.name not in taken]
    for node, output in zip(others, [n for n in last if n.name not in given], strict=False):
        for other in backward.nodes:
            if other.name == output.name:
                other._rename(f"{output.name}_again")
        node.name = output.name


def _no_modes() -> Any:
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def _one_call(eager: Callable[[Any], Any], traced: Callable[[Any, Any], Any]) -> fx.GraphModule:
    """A graph of one call, without a hash, so that no cache of AOTAutograd serves.

    One that did would not say what it holds; code that inductor has generated is found in its own
    cache, by the graph with the hooks inlined.

    Args:
        eager: Called outside of graphs.
        traced: Called while a graph is compiled, with the node whose saved tensor is at hand too,
            and both its graphs.
    """
    from torch._functorch._aot_autograd.graph_compile import _get_saved_tensor_hook_context

    def call(x: Any) -> Any:
        given = _get_saved_tensor_hook_context()
        return eager(x) if given is None else traced(x, given)

    BETWEEN.add(call.__code__)
    graph = fx.Graph()
    graph.output(graph.call_function(call, (graph.placeholder("x"),)))
    return fx.GraphModule(nn.Module(), graph)
