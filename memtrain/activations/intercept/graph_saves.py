"""Saved tensors of one compiled graph: how each is held, by the same rules as eager ones."""

import zlib
from collections.abc import Collection
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg

from memtrain.activations.intercept.compiler_internals import no_modes
from memtrain.activations.intercept.graph_nodes import (
    example,
    is_tensor,
    storage_nbytes,
    storage_of,
    stripped,
)
from memtrain.activations.intercept.graph_sites import MODEL_INPUT, GraphSites
from memtrain.activations.intercept.op_families import FAMILIES
from memtrain.activations.saved import payload_ops
from memtrain.activations.saved.attention import KERNELS
from memtrain.activations.saved.fit import FLOATS, fit
from memtrain.activations.saved.flatten import layout_of
from memtrain.activations.saved.payload import compress
from memtrain.activations.saved.saved_tensors import SavedTensors
from memtrain.activations.saved.site import CHECKPOINT_INPUT, RECOMPUTE, Record, Site
from memtrain.compressors import Compressor, Group, Host, Keep, Key
from memtrain.compressors.log_group import of_logarithms

NO_FAKE = "its compressor has no form on tensors without data, which graphs are traced with"
"""Begins the reason where a compressor of the user's own cannot be traced."""
HOST = Keep("inside torch.compile nothing is swapped out to the host")
LOG_PROBABILITIES = ("cross_entropy", "log_softmax", "nll_loss")
"""Ops that save log-probabilities alone."""
DERIVATIVE_BITS = 2
"""More bits than its derivative code: of a tensor that gives the op's output again, too."""


class GraphSaves:
    """The saved tensors of one graph, while it is being compiled.

    The forward is partitioned, and its hooks are inlined one by one, those that pack first.
    `positions` maps storages of the graph's inputs to the inputs of its module.
    """

    def __init__(
        self,
        saved: SavedTensors,
        forward: Graph,
        backward: Graph,
        sites: GraphSites,
        positions: dict[int, int],
    ) -> None:
        self.saved, self.forward, self.backward, self.sites = saved, forward, backward, sites
        self._positions = positions
        self._number = payload_ops.graph_number()
        outputs = cast(Any, forward.output_node().args[0])
        hooked = [node for node in outputs if sites.is_hooked(node)]
        self._last = hooked[-1]  # handed to the hooks after all others
        self.records: list[Record] = []
        """Of what it saves."""
        # Form, number of tensors and key of a payload; None where the tensor is kept.
        self._packings: dict[Node, tuple[str, int, tuple[int, ...]] | None] = {}
        self._kept: dict[int, int] = {}  # storage -> its number
        self._finished = False

    @property
    def positions(self) -> dict[int, int]:
        """Numbers of storages in the records -> which of its module's inputs they are."""
        kept, positions = self._kept, self._positions
        return {
            kept[storage]: position for storage, position in positions.items() if storage in kept
        }

    def pack(self, x: Tensor, node: Node) -> Any:
        """Return what the graph holds in place of a saved tensor."""
        if node not in self._packings:
            with no_modes():
                self._packings[node] = self._decide(node)
        packing = self._packings[node]
        if packing is None:
            return x
        signature, _, key = packing
        parts = payload_ops.compress_op(x, signature, key)
        sizes = [size for size in x.shape if not isinstance(size, int)]
        return [*parts, *sizes]

    def unpack(self, packed: Any, node: Node) -> Tensor:
        """Return the saved tensor from the result of `pack`."""
        if node is self._last and not self._finished:
            self._finish()
        packing = self._packings[node]
        if packing is None:
            return packed
        signature, parts, _ = packing
        x = node.meta["val"]
        sizes = iter(packed[parts:])
        shape = [size if isinstance(size, int) else next(sizes) for size in x.shape]
        return payload_ops.decompress(packed[:parts], signature, shape, x.dtype)

    def _finish(self) -> None:
        """Change what the hooks of the tensors before the last have put into the graphs.

        The last tensor's unpacking comes after this, at the head of a backward that needs it first.
        """
        self._finished = True
        last = [self._last.name] if self._packings[self._last] is not None else []
        recompute_attention(self.backward, last)
        compress_early(self.forward)
        decompress_late(self.backward)

    # -- how a tensor is held ---------------------------------------------------------------

    def _decide(self, node: Node) -> tuple[str, int, tuple[int, ...]] | None:
        """Return how a saved tensor is packed; None where it is kept."""
        x, saved = example(node), self.saved
        site, chosen = self._choose(node, x)
        if isinstance(chosen, Compressor) and not chosen.is_identity:
            try:
                signature, parts, nbytes = _payload(chosen, x)
            except Exception as error:  # noqa: BLE001 (a compressor of the user's own may raise any)
                chosen = Keep(f"{NO_FAKE}: {type(chosen).__name__}: {error}")
            else:
                if nbytes < x.numel() * x.element_size():
                    number, counter = zlib.crc32(site.name.encode()), payload_ops.counter_of(saved)
                    key = (saved.seed, number, counter, self._number, len(self._packings))
                    self._record(site, node, x, nbytes, repr(chosen))
                    return signature, parts, key
                chosen = Keep("its payload would be no smaller")
        kept = isinstance(chosen, Keep)
        reason, name = (chosen.reason, "") if kept else ("", repr(chosen))
        self._record(site, node, x, None, name, reason)
        return None

    def _choose(self, node: Node, x: Tensor) -> tuple[Site, Compressor | Keep]:
        """The strictest of the choices for what reads the tensor, and the site that it is for."""
        sites, saved = self.sites, self.saved
        uses = sites.uses(node)
        found = [*uses] or [sites.site(node)]
        why = sites.why_keep(node, uses, saved.options.min_elements)
        if why:
            return found[0], Keep(why)
        if sites.checkpointed(node):
            site = Site(found[0].module, RECOMPUTE, "input")
            return site, CHECKPOINT_INPUT
        # Noise may put an element on the other side of a jump of the derivative.
        wide = any(site.op in FAMILIES["@piecewise"] for site in uses) or sites.is_chained(node)
        limit = sites.limit(node)
        options = [(site, _fit(saved.choose(site), x, limit, wide=wide)) for site in found]
        site, chosen = max(options, key=lambda option: _strictness(option[1], x))
        if not isinstance(chosen, Keep) and all(one.op in LOG_PROBABILITIES for one in found):
            chosen = of_logarithms(chosen)  # what reads the values themselves has them whole
        return site, chosen

    def _record(
        self,
        site: Site,
        node: Node,
        x: Tensor,
        planned: int | None,
        compressor: str,
        reason: str = "",
    ) -> None:
        base = stripped(node)
        storage = storage_of(base if is_tensor(base) else node)
        first = storage not in self._kept and reason != MODEL_INPUT
        number = self._kept.setdefault(storage, len(self._kept))
        nbytes = storage_nbytes(node) if first else 0
        dtype = str(x.dtype).removeprefix("torch.")
        planned = nbytes if planned is None else planned
        shape = tuple(x.shape)
        self.records.append(Record(site, shape, dtype, nbytes, planned, compressor, reason, number))


def _fit(chosen: Compressor | Keep, x: Tensor, limit: int | None, *, wide: bool) -> Any:
    """Return the compressor for this dtype, where what reads the tensor computes it again too."""
    if isinstance(chosen, Keep) or chosen.is_identity:
        return chosen
    if chosen.gives_derivative:
        chosen = Group(bits=min(8, chosen.bits + DERIVATIVE_BITS))
    chosen = fit(chosen, "", x.dtype, limit)
    if isinstance(chosen, Keep) or x.dtype not in FLOATS:
        return chosen
    if isinstance(chosen, Host):
        return HOST
    chosen = chosen.for_saved(x.shape)
    if wide and isinstance(chosen.bits, int) and chosen.bits < 8:
        chosen = chosen.with_width(8)
    return chosen


def _strictness(chosen: Compressor | Keep, x: Tensor) -> float:
    if isinstance(chosen, Keep) or chosen.is_identity:
        return float("inf")
    try:
        return _payload(chosen, x)[2]
    except Exception:  # noqa: BLE001 (`_decide` records it)
        return float("inf")


def _payload(compressor: Compressor, x: Tensor) -> tuple[str, int, int]:
    """Return the form, the number of tensors and the bytes of a payload."""
    packed, _ = compress(x, compressor, Key())
    signature = payload_ops.signature_of(compressor, layout_of(x), [*packed.tensors])
    return signature, len(packed.tensors), packed.nbytes


# -- where a graph compresses and decompresses: next to a tensor's other uses ----------------------

_SIZES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int, torch.ops.aten.sym_numel)


def compress_early(graph: Graph) -> None:
    """Move each compressing op behind the last other op that reads its tensor, or a view of it.

    AOTAutograd puts what a hook packs at the end of the forward, so that all saved tensors would be
    alive there beside their payloads.
    """
    position = {node: number for number, node in enumerate(graph.nodes)}
    for node in _calls(graph, torch.ops.memtrain.compress_saved.default):
        saved = node.args[0]
        if isinstance(saved, Node):
            last = max(_readers(saved, node), key=position.__getitem__)
            parts = [user for user in node.users if user.target is getitem]
            for moved in reversed([node, *parts]):
                if position[last] < position[node]:
                    while last.op == last.next.op == "placeholder":  # behind all inputs
                        last = last.next
                    last.append(moved)


def decompress_late(graph: Graph) -> None:
    """Move each decompressing op in front of the first op that reads what it gives."""
    position = {node: number for number, node in enumerate(graph.nodes)}
    for node in _calls(graph, *payload_ops.DECOMPRESS):
        if node.users:
            min(node.users, key=position.__getitem__).prepend(node)


def recompute_attention(graph: Graph, coded: Collection[str]) -> None:
    """Recompute the results of fused attention if they or its inputs are coded (`FusedAttention`).

    The gradient of scores is a difference of what is computed of the values and of the result.
    """
    kernels = {kernel.backward: kernel for kernel in KERNELS.values()}
    for node in _calls(graph, *kernels):
        kernel: Any = kernels[node.target]
        names = [argument.name for argument in kernel.backward._schema.arguments]
        args: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        if not any(_is_coded(args[name], coded) for name in ("query", "key", "value", "out")):
            continue
        options = {name: args[name] for name in ("is_causal", "scale") if name in args}
        tensors = [args.get(name) for name in kernel.inputs]
        masks = dict(zip(kernel.inputs[3:], tensors[3:], strict=True))
        with graph.inserting_before(node), no_modes():
            options |= {**masks, **kernel.options}
            new = graph.call_function(kernel.forward, tuple(tensors[:3]), options)
            values = map_arg((new.args, new.kwargs), lambda argument: argument.meta["val"])
            new.meta = {**node.meta, "val": kernel.forward(*values[0], **values[1])}
            for index in (0, 1) if not args["dropout_p"] else (1,):  # the mask is gone
                result = graph.call_function(getitem, (new, index))
                result.meta = {**node.meta, "val": new.meta["val"][index]}
                saved = args[("out", "logsumexp")[index]]
                saved.replace_all_uses_with(result, delete_user_cb=lambda user, at=node: user is at)
                while not saved.users and saved.op == "call_function":  # nothing decompresses it
                    above = saved.all_input_nodes[0]
                    graph.erase_node(saved)
                    saved = above


def _is_coded(node: Node, coded: Collection[str]) -> bool:
    waiting, seen = [node], set[Node]()
    while waiting:
        one = waiting.pop()
        if one.target in payload_ops.DECOMPRESS or one.name in coded:
            return True
        if one not in seen:
            seen.add(one)
            waiting += one.all_input_nodes
    return False


def _calls(graph: Graph, *ops: object) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target in ops]


def _readers(saved: Node, compresses: Node) -> list[Node]:
    """Return the node itself, and the ops before the output that read its elements."""
    others = (user for user in saved.users if user is not compresses and user.op != "output")
    return [saved, *(user for user in others if user.target not in _SIZES)]
