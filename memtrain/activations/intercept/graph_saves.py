"""Saved tensors of one compiled graph: how each is held, by the same rules as eager ones."""

import zlib
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.fx import Graph, Node

from memtrain.activations.intercept.compiler_internals import no_modes
from memtrain.activations.intercept.graph_order import (
    compress_early,
    decompress_late,
    recompute_attention,
)
from memtrain.activations.intercept.graph_sites import (
    OWN_INPUT,
    GraphSites,
    example,
    is_tensor,
    storage_nbytes,
    storage_of,
    stripped,
)
from memtrain.activations.saved import payload_ops
from memtrain.activations.saved.fit import FLOATS, fit
from memtrain.activations.saved.flatten import flatten
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


class _Payload(NamedTuple):
    """The payload that a compressor makes of a tensor."""

    form: str
    nbytes: int
    parts: int
    """Tensors."""


class GraphSaves:
    """The saved tensors of one graph, while it is being compiled.

    The forward is partitioned, and its hooks are inlined one by one, those that pack first.
    `places` maps storages of the graph's inputs to the inputs of its module.
    """

    def __init__(
        self,
        saved: SavedTensors,
        forward: Graph,
        backward: Graph,
        sites: GraphSites,
        places: dict[int, int],
    ) -> None:
        self.saved, self.forward, self.backward, self.sites = saved, forward, backward, sites
        self._places = places
        self._number = payload_ops.graph_number()
        outputs = cast(Any, forward.output_node().args[0])
        hooked = [node for node in outputs if sites.is_hooked(node)]
        self._last = hooked[-1]  # handed to the hooks after all others
        self.records: list[Record] = []
        """Of what it saves."""
        self._packings: dict[Node, tuple[_Payload, tuple[int, ...]] | None] = {}
        self._kept: dict[int, int] = {}  # storage -> its number
        self._finished = False

    @property
    def root(self) -> str:
        """Path of the module whose forward the graph is the first part of."""
        return self.sites.root

    @property
    def places(self) -> dict[int, int]:
        """Numbers of storages in the records -> which of its module's inputs they are."""
        kept, places = self._kept, self._places
        return {kept[storage]: place for storage, place in places.items() if storage in kept}

    def pack(self, x: Tensor, node: Node) -> Any:
        """Give the graph what it holds in place of a saved tensor."""
        if node not in self._packings:
            with no_modes():
                self._packings[node] = self._decide(node)
        packing = self._packings[node]
        if packing is None:
            return x
        payload, key = packing
        parts = payload_ops.compress_op(x, payload.form, key)
        sizes = [size for size in x.shape if not isinstance(size, int)]
        return [*parts, *sizes]

    def unpack(self, packed: Any, node: Node) -> Tensor:
        """The saved tensor of what `pack` gave."""
        if node is self._last and not self._finished:
            self._finish()
        packing = self._packings[node]
        if packing is None:
            return packed
        (form, _, parts), _ = packing
        x = node.meta["val"]
        sizes = iter(packed[parts:])
        shape = [size if isinstance(size, int) else next(sizes) for size in x.shape]
        return payload_ops.decompress(packed[:parts], form, shape, x.dtype)

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

    def _decide(self, node: Node) -> tuple[_Payload, tuple[int, ...]] | None:
        """Return the payload of a saved tensor and its key; None where the tensor is kept."""
        x, saved = example(node), self.saved
        site, chosen = self._choose(node, x)
        if isinstance(chosen, Compressor) and not chosen.is_identity:
            try:
                payload = _payload(chosen, x)
            except Exception as error:  # noqa: BLE001 (a compressor of the user's own may raise any)
                chosen = Keep(f"{NO_FAKE}: {type(chosen).__name__}: {error}")
            else:
                if payload.nbytes < x.numel() * x.element_size():
                    number, counter = zlib.crc32(site.name.encode()), payload_ops.counter_of(saved)
                    key = (saved.seed, number, counter, self._number, len(self._packings))
                    self._record(site, node, x, payload.nbytes, repr(chosen))
                    return payload, key
                chosen = Keep("its payload would be no smaller")
        kept = isinstance(chosen, Keep)
        reason, name = (chosen.reason, "") if kept else ("", repr(chosen))
        self._record(site, node, x, None, name, reason)
        return None

    def _choose(self, node: Node, x: Tensor) -> tuple[Site, Compressor | Keep]:
        """The strictest of the choices for what reads the tensor, and the site that it is for."""
        sites, saved = self.sites, self.saved
        uses = sites.uses(node)
        places = [use.site for use in uses] or [sites.site(node)]
        why = sites.why_keep(node, uses, saved.min_elements)
        if why:
            return places[0], Keep(why)
        if sites.checkpointed(node):
            place = Site(places[0].module, RECOMPUTE, "input")
            return place, CHECKPOINT_INPUT
        wide = any(use.jumps for use in uses) or sites.is_chained(node)
        limit = sites.limit(node)
        options = [(place, _fit(saved.choose(place), x, limit, wide=wide)) for place in places]
        place, chosen = max(options, key=lambda option: _strictness(option[1], x))
        if not isinstance(chosen, Keep) and all(one.op in LOG_PROBABILITIES for one in places):
            chosen = of_logarithms(chosen)  # what reads the values themselves has them whole
        return place, chosen

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
        first = storage not in self._kept and reason != OWN_INPUT
        number = self._kept.setdefault(storage, len(self._kept))
        nbytes = storage_nbytes(node) if first else 0
        dtype = str(x.dtype).removeprefix("torch.")
        held = nbytes if planned is None else planned
        shape = tuple(x.shape)
        self.records.append(Record(site, shape, dtype, nbytes, held, compressor, reason, number))


def _fit(chosen: Compressor | Keep, x: Tensor, limit: int | None, *, wide: bool) -> Any:
    """The compressor for this dtype, where what reads the tensor computes it again too."""
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
        return _payload(chosen, x).nbytes
    except Exception:  # noqa: BLE001 (`_decide` records it)
        return float("inf")


def _payload(compressor: Compressor, x: Tensor) -> _Payload:
    flat, layout = flatten(x)
    parts = compressor.compress(x if compressor.shaped else flat, key=Key()).tensors
    form = payload_ops.form_of(compressor, layout, list(parts))
    return _Payload(form, sum(part.nbytes for part in parts.values()), len(parts))
