"""Compress the tensors that autograd saves in a forward."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

from memtrain.activations.saved import known_ops
from memtrain.activations.saved.attention import KERNELS, FusedAttention
from memtrain.activations.saved.checks import Checks
from memtrain.activations.saved.derived import FINE, FORMULAS, NONLINEAR, DerivedOutputs
from memtrain.activations.saved.fit import Choose, decide
from memtrain.activations.saved.flatten import memory_of
from memtrain.activations.saved.handles import BITS, Kept, MaskBias
from memtrain.activations.saved.known_ops import LINEAR, LOSSLESS, MULTIPLIES, SHAPE, SavedBy
from memtrain.activations.saved.masked import JOINS, constants_of
from memtrain.activations.saved.node_tensors import (
    FUNCTION,
    hook,
    is_function,
    nodes_since,
    saved_names,
    tensors_of,
)
from memtrain.activations.saved.options import PRODUCTS, SMOOTH, Options
from memtrain.activations.saved.origin import is_parameter, storage_id, unsupported
from memtrain.activations.saved.payload import make_handle
from memtrain.activations.saved.readers import Readers, may_wait
from memtrain.activations.saved.records import Records
from memtrain.activations.saved.site import (
    CHECKPOINT_INPUT,
    CUSTOM_FUNCTION,
    MODEL_INPUT,
    NO_RULE,
    RECOMPUTE,
    UNKNOWN_OP,
    UNKNOWN_READER,
    Record,
    Site,
)
from memtrain.activations.saved.store import Handle, Storage, storage_of
from memtrain.compressors import Compressor, Keep, Key

_Chosen = Compressor | Keep | str
_Tensors = Sequence[Tensor]
_ALIVE = "its storage is kept alive by another save"
_WEIGHT = "a weight, or made of weights alone"
SHARED = "shared with an earlier save"
_DERIVED = "recomputed from what another op keeps"
_NOT_IN_TABLE = "its op reads its values, and is not linear in them"
_RECOMPUTED = "recomputed by the backward from the attention's other saved tensors"


class SavedTensors:
    """Compresses the saved tensors of one forward after another.

    After each op, `collect` visits the nodes that autograd has made for the op. For the saved
    tensors that the known-op table lists and a rule matches, `collect` registers hooks on the node:
    the graph then has a `Handle`. Other saved tensors are unchanged.
    """

    def __init__(self, choose: Choose, options: Options, seed: int) -> None:
        self.choose, self.options, self.seed = choose, options, seed
        self.step = 0
        """Forward passes so far."""
        self.draws: Mapping[str, int] = {}
        """Site -> number; another number gives the site other random bits."""
        self.watch: Any = None
        """Its `saved(site, x, node, payload)` is called for each compressed tensor."""
        self.lossless: Callable[[Tensor, bool], Compressor | None] | None = None
        """Gives a compressor that keeps a tensor, which a rule claims or not, bit for bit."""
        self.checks: Checks | None = None
        """Compares what is decompressed, and what replaced ops return, with the exact values."""
        self._numbers: dict[Site, int] = {}
        self.saw_hooks = False
        """Whether hooks of someone else were on in the last forward."""
        self._reset()

    def _reset(self) -> None:
        self.store: dict[int, Storage] = {}
        """Storages of this forward, by their numbers."""
        self.derived = DerivedOutputs(self.store)
        self._formulas = {SMOOTH: NONLINEAR, PRODUCTS: FORMULAS}.get(self.options.derives, {})
        self.readers = Readers()
        self.bool_mask = False
        """Whether the op that runs now was given an attention mask of bools."""
        self.attention = ""
        """The name in rules of the attention that runs now, if one does."""
        self.is_lossy = False
        """Whether a gradient of what has run may be approximate."""
        self._fused: FusedAttention | None = None
        """The fused attention whose node is visited now, if it is one."""
        self.hooked = False
        """Whether other saved-tensor hooks were active when the last op ran."""
        self.mark = 0
        """Nodes with smaller numbers have been visited, or are not this forward's."""
        self._first = 0  # number of the forward's first node
        self._input_nodes: set[int] = set()  # numbers of the nodes that made the inputs
        self._joins: dict[int, type] = {}  # of nodes that add, join or write constants
        self._calls: dict[Site, int] = {}
        self.records: Records | None = None
        """Of this forward, where it is recorded."""
        self.parameters: set[int] = set()
        """Storages of parameters and buffers."""
        self._inputs: set[int] = set()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name in _STATE}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _numbers={}, saw_hooks=False, checks=None)
        self._reset()

    def begin(
        self, parameters: _Tensors, inputs: _Tensors, arguments: _Tensors, record: bool
    ) -> None:
        """Start a forward pass.

        `parameters` (with buffers) are never compressed. `inputs` are the user's, which stay alive
        anyway; `arguments` are all tensors that the forward takes.
        """
        self._reset()
        if self.checks is not None and not self.checks.begin():
            self.checks = None
        self.parameters = {storage_id(x) for x in parameters}
        for x in inputs:
            if not unsupported(x):
                storage_of(self.store, x, storage_id(x)).is_kept = True
        self._inputs = {storage_id(x) for x in inputs}
        self.records = Records(self._inputs) if record else None
        self.saw_hooks = False
        self.mark = self._first = _get_sequence_nr()
        nodes = [x.grad_fn for x in (*parameters, *arguments)]
        self._input_nodes = {node._sequence_nr() for node in nodes if node is not None}

    def _distrust(self) -> None:
        """Reuse no payload made so far, and keep the results that wait for their readers.

        The ops of another thread, which are not visited, may have read or written to any tensor.
        """
        self.readers.keep_all()
        for storage in self.store.values():
            storage.epoch += 1

    def end(self, output: Sequence[Tensor] = ()) -> list[Record] | None:
        """End a forward pass; payloads live on in the graph, and only there.

        The user keeps the model's outputs: payloads would add bytes. Returns recorded records.
        """
        self.step += 1
        for x in output:
            known = None if unsupported(x) else self.store.get(storage_id(x))
            if known is not None and not known.is_kept:
                known.keep(x.detach())
        self.readers.end()
        self.derived.end()
        records = self.records
        self._reset()
        return None if records is None else records.end()

    def key(self, site: Site) -> Key:
        """Return the key of the random bits of the site's next payload."""
        call = self._calls.get(site, 0)
        self._calls[site] = call + 1
        number = self._numbers.get(site)
        if number is None:
            number = self._numbers[site] = zlib.crc32(site.name.encode())
        draw = self.draws.get(site.name, 0) if self.draws else 0
        return Key(self.seed, number, self.step, draw, call)

    def skip(self) -> None:
        """Leave the nodes made so far as they are."""
        self.mark = _get_sequence_nr()

    def under_hooks(self, now: bool) -> bool:
        """Record whether other saved-tensor hooks are active, and return the argument."""
        if self.hooked and not now:
            self.skip()
        self.hooked, self.saw_hooks = now, self.saw_hooks or now
        return now

    def collect(self, result: Any, function: Any, module: str, *, hooked: bool = False) -> None:
        """Visit the nodes that an op has made.

        If `hooked`, other saved-tensor hooks have packed the saved tensors.
        """
        if not torch.is_grad_enabled():
            return  # no node is made, and to ask a view for its node may raise
        results = (result,) if isinstance(result, Tensor) else result
        waiting = self.readers.results
        if not isinstance(results, tuple | list) or (hooked and not waiting):
            if hooked:
                self.skip()
            return
        new = nodes_since(self.mark, results, self._first, self._input_nodes, self._distrust)
        for node in new:
            if waiting:
                self.readers.visit(node)
            if not hooked:
                self._visit(node, function, module)
        if new and not hooked and (self.derived.parts or type(new[-1]) in known_ops.CASTS):
            self.derived.add_computed(result)
        self.derived.arguments = ()
        if waiting:
            self.readers.seen(results)
        if new or hooked:
            self.mark = _get_sequence_nr()

    def _visit(self, node: Any, function: Any, module: str) -> None:
        kind = type(node)
        arguments = self.derived.arguments
        self._joins |= constants_of(node, function, arguments) if kind in JOINS else {}
        row = known_ops.KNOWN.get(kind)
        if row is None:
            saves = self.records is not None or saved_names(kind)
            if saves and kind not in known_ops.REPLACED_NODES:
                self._keep_unknown(node, function, module)
            return
        # Read before hooks are on the node: what is read later is decompressed.
        tensors = dict(tensors_of(node, saved_names(kind)))
        op, kernel, self._fused = row.op(node, function), KERNELS.get(kind), None
        waits = may_wait(row, kind, tensors)
        if kernel is not None:
            op, self._fused = self.attention or op, FusedAttention(node, kernel, tensors)
            if self.checks is not None:
                self.checks.attention(self._fused, tensors, module, op)
        attends = self._fused is not None or self.attention
        for saved in row.tensors:
            allowed = saved.allows is None or saved.allows(node)
            x = tensors.pop(saved.attribute, None) if allowed else None
            if x is not None:
                site = Site(module, *known_ops.named(op, saved.role, function, self.attention))
                if not (attends and self._save_of_attention(node, saved.attribute, site, x)):
                    self._save(node, saved, site, x, waits and saved.readers is not None)
        for name, x in tensors.items():  # statistics, for example
            site = Site(module, op, "input3" if name in known_ops.MASKS else name)
            if not (attends and self._save_of_attention(node, name, site, x)):
                self.keep(x, site, _NOT_IN_TABLE, node, name)
        self._fused = None  # of saves that waited, too

    def _save_of_attention(self, node: Any, name: str, site: Site, x: Tensor) -> bool:
        """Save a mask in bits, or leave a result of attention to be recomputed."""
        is_coded = partial(self._is_coded, site, x)
        if self._fused is not None and self._fused.recomputes(name, x, is_coded):
            hook(node, name, self._fused, partial(FusedAttention.read, attribute=name))
            self.record(x, site, 0, "", _RECOMPUTED, self._fused)
            if self._formulas is FORMULAS and name == self._fused.output:
                self.derived.part(node, name, self._fused, site.op)
            return True
        return bool(self.attention) and self._save_mask(node, name, site, x)

    def _is_coded(self, site: Site, x: Tensor) -> bool:
        chosen = self.choose(site)
        return not (isinstance(chosen, Keep) or chosen.lossless or self.is_small(x))

    def _save_mask(self, node: Any, name: str, site: Site, x: Tensor) -> bool:
        """Store the bias of a boolean attention mask, or a dropout mask, in 1 bit per element."""
        bias = name in known_ops.MASKS and self.bool_mask
        factor = name == "other" and type(node) in MULTIPLIES and x.is_cpu
        if not (bias or factor) or x.requires_grad or unsupported(x):
            return False
        if not x.numel() or self.is_kept(x) or not self._is_coded(site, x):
            return False
        mask = MaskBias(x)
        if not bias and not mask.equals(x):
            return False  # a factor may have other numbers
        self._register(node, name, mask, x, site)
        self.record(x, site, mask.nbytes, str(BITS), "", mask)
        return True

    def _keep_unknown(self, node: Any, function: Any, module: str) -> None:
        """Keep what an op saves that the table does not know."""
        names = saved_names(type(node))
        if not names:
            opaque = type(node) not in known_ops.ALL and not is_function(type(node))
            if opaque and self.records is not None:
                self.records.note(
                    Site(module, "*", "*"), f"saved by a node without attributes: {node.name()}"
                )
            return
        name = str(getattr(function, "__name__", node.name())).strip("_")
        why = f"{UNKNOWN_OP} {node.name()}"
        if names is FUNCTION:
            name, why = "autograd.Function", CUSTOM_FUNCTION
        if type(node) is known_ops.CHECKPOINT:
            name, why = RECOMPUTE, CHECKPOINT_INPUT.reason
        for attribute, x in tensors_of(node, names):
            site = Site(module, name, "saved")
            exact = self._exact(x) if self.lossless is not None and attribute else None
            if exact is None:
                self.keep(x, site, why, node, attribute)
            else:
                self._compress(node, SavedBy(attribute, "saved", LOSSLESS), site, x, exact)

    def _exact(self, x: Tensor, *, claimed: bool = False) -> Compressor | None:
        """Return a compressor that keeps a tensor bit for bit, if there is one for it."""
        if self.lossless is None or not x.is_floating_point() or unsupported(x) or self.is_kept(x):
            return None
        if self.is_small(x) or memory_of(x)[1] is None or is_parameter(x):
            return None
        return self.lossless(x, claimed)

    def is_small(self, x: Tensor) -> bool:
        """Return whether a tensor has fewer elements than are compressed."""
        return x.numel() < self.options.min_elements

    def is_kept(self, x: Tensor) -> bool:
        """Return whether the storage of a tensor is kept, so that a payload would add bytes."""
        storage = self.store.get(storage_id(x))
        return storage is not None and storage.is_kept

    def record(self, x: Tensor, site: Site, planned: int, name: str, *others: Any) -> None:
        """Record a save, if this forward is recorded."""
        if self.records is not None:
            self.records.add(x, site, planned, name, *others)

    def _save(self, node: Any, saved: SavedBy, site: Site, x: Tensor, waits: bool) -> None:
        """Compress, keep or defer one saved tensor of a known op."""
        number, why = storage_id(x), ""
        if number < 0 or unsupported(x):
            why = unsupported(x)
        elif number not in self._inputs and (number in self.parameters or is_parameter(x)):
            why = _WEIGHT
        elif (known := self.store.get(number)) is not None and known.is_kept:
            why = MODEL_INPUT if number in self._inputs else _ALIVE
        if why:
            self.keep(x, site, why, node, saved.attribute)
            return
        chosen = decide(self.choose, self.options.min_elements, site, saved, node, x, self._joins)
        if saved.reason == SHAPE and not isinstance(chosen, Keep):
            handle = Kept(x, None)
            self._register(node, saved.attribute, handle, x, site)
            self.record(x, site, 0, "", "its shape only is read", handle)
            return
        exact = self._exact(x, claimed=chosen != NO_RULE)
        chosen = exact or chosen
        if isinstance(chosen, Keep) or chosen.is_identity:
            self.keep(x, site, chosen, node, saved.attribute)
            return
        derives = self.options.derives and saved.reason == LINEAR
        source = self.derived.find(x, node) if derives else None
        if waits and exact is None:
            self._defer(node, saved, site, x, chosen, source)
            return
        handle = self._compress(node, saved, site, x, chosen, source)
        if handle is None or type(node) not in self._formulas:
            return
        if self._formulas is FORMULAS or 8 * handle.entry.nbytes >= FINE * x.numel():
            self.derived.part(node, saved.attribute, handle, site.op)

    def _defer(
        self, node: Any, saved: SavedBy, site: Site, x: Tensor, chosen: Compressor, source: Any
    ) -> None:
        """Compress a result or a factor when its readers are known, or keep it."""
        version, kept, parts = x._version, None, dict[str, Any]()
        if type(node) in self._formulas:
            kept = Kept(x, x.detach())
            parts = self.derived.part(node, saved.attribute, source or kept, site.op)

        def save(compress: bool) -> None:
            handle, is_same = None, x._version == version  # if not, the backward raises
            if compress and is_same:
                handle = self._compress(node, saved, site, x, chosen, source)
            else:
                self.keep(x, site, UNKNOWN_READER, node, saved.attribute if is_same else "")
            parts[saved.attribute] = handle or kept

        at = storage_of(self.store, x, storage_id(x))
        self.readers.add(node, saved, x, at, save, self.records)

    def _compress(
        self, node: Any, saved: SavedBy, site: Site, x: Tensor, chosen: Any, source: Any = None
    ) -> Any:
        """Register a payload, or the derived output `source`; None if the tensor is kept."""
        if source is not None:
            source.nbytes = self.derived.nbytes.pop(source.source, 0)
            self._register(node, saved.attribute, source, x, site, chosen)
            self.record(x, site, source.nbytes, "derived", _DERIVED, source, source.op)
            return source
        handle = self.compress(x, site, chosen, node)
        if handle is None:
            self.keep(x, site, "its payload would be no smaller", node, saved.attribute)
            return None
        self._register(node, saved.attribute, handle, x, site, chosen)
        if self.watch is not None:
            self.watch.saved(site, x.detach(), node, handle.entry)
        return handle

    def compress(
        self, x: Tensor, site: Site, chosen: Compressor, node: Any = None
    ) -> Handle | None:
        """Compress a tensor; None where a payload would be no smaller."""
        self.is_lossy = self.is_lossy or not chosen.lossless
        storage = storage_of(self.store, x, storage_id(x))
        handle, is_new = make_handle(storage, x, chosen, lambda: self.key(site), node)
        if handle is not None and self.records is not None:
            planned, note = (handle.entry.nbytes, "") if is_new else (0, SHARED)
            self.record(x, site, planned, repr(chosen), note, handle)
        return handle

    def _register(
        self, node: Any, attribute: str, handle: Any, x: Tensor, site: Site, compressor: Any = None
    ) -> None:
        if self.checks is not None:
            handle = self.checks.around(handle, x, site, compressor)
        if self._fused is not None and self._fused.add(attribute, handle, compressor):
            hook(node, attribute, self._fused, partial(FusedAttention.read, attribute=attribute))
        else:
            hook(node, attribute, handle)

    def keep(
        self, x: Tensor, site: Site, chosen: _Chosen, node: Any = None, attribute: str = ""
    ) -> None:
        """Keep a tensor: payloads of its storage are dropped, and their handles return the tensor.

        For a small view of a larger storage, a copy is kept.
        """
        if not x.dim() and x.dtype in _PYTHON:
            return  # a number that Python may have given
        number = storage_id(x)
        if number < 0 or unsupported(x):
            if self.records is not None:
                self.records.note(site, f"{unsupported(x)}; its bytes are not counted", x)
            return
        waits = self.readers.waits(x) and not self.is_small(x)
        if (waits or self.lossless is not None) and attribute and not isinstance(x, nn.Parameter):
            # The graph then holds a tensor of its own, so that the user's can end.
            self._register(node, attribute, Kept(x, x.detach()), x, site)
        base = x if x._base is None else x._base
        if number in self.parameters or (chosen == _WEIGHT and base.is_leaf):
            return  # no bytes of the forward's
        storage, copy, planned = storage_of(self.store, x, number), None, 0
        if not storage.is_kept:
            planned = x.untyped_storage().nbytes()
            if attribute and self.is_small(x) and planned > 2 * x.nbytes:
                copy, planned = Kept(x, x.detach().clone()), x.nbytes
                self._register(node, attribute, copy, x, site)
            else:
                storage.keep(x.detach())
        reason = chosen if isinstance(chosen, str) else getattr(chosen, "reason", "")
        self.record(x, site, planned, "" if reason else repr(chosen), reason, copy)


_STATE = ("choose", "options", "seed", "step", "draws", "watch", "lossless")
_PYTHON = (torch.float64, torch.int64, torch.bool, torch.complex128)
