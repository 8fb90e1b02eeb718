"""Decides what the graph of a forward holds in place of each saved tensor."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from torch._subclasses import FakeTensor

from memtrain.activations.saved.aliases import callables
from memtrain.activations.saved.checks import Checks
from memtrain.activations.saved.derived import DerivedOutputs
from memtrain.activations.saved.fit import fit
from memtrain.activations.saved.flatten import memory_of
from memtrain.activations.saved.handles import Kept, MaskBias, ShapeOnly
from memtrain.activations.saved.known_ops import (
    ALL,
    ATTENTION,
    CHECKPOINT,
    KNOWN,
    LINEAR,
    LOSSLESS,
    MASKS,
    MULTIPLIES,
    OWN,
    OWN_FORM,
    SENTINELS,
    SHAPE,
    SavedBy,
)
from memtrain.activations.saved.liveness import Watched, still_held
from memtrain.activations.saved.node_tensors import (
    FUNCTION,
    LEAF,
    is_function,
    saved_names,
    tensors_of,
)
from memtrain.activations.saved.origin import foreign, is_parameter, storage_id
from memtrain.activations.saved.payload import make_entry
from memtrain.activations.saved.readers import Readers
from memtrain.activations.saved.site import (
    CHECKPOINT_INPUT,
    CUSTOM_FUNCTION,
    FOREIGN_HOOKS,
    NO_RULE,
    OWN_INPUT,
    RECOMPUTE,
    UNKNOWN_OP,
    UNKNOWN_READER,
    Record,
    Site,
)
from memtrain.activations.saved.store import Handle, Store
from memtrain.compressors import Compressor, Keep, Key

Choose = Callable[[Site], Compressor | Keep]
ALIVE = "its storage is kept alive by another save"
WEIGHT = "a weight, or made of weights alone"
SHARED = "shared with an earlier save"
DERIVED = "recomputed from what the norm keeps"
SENTINEL = "a mask was applied: it may hold numbers that stand for minus infinity"
OPAQUE = "saved by a node that shows nothing of it"
NOT_IN_TABLE = "its op reads its values, and is not linear in them"
NOT_READ = "its shape only is read"
TORCHS_FORM = "torch's own form of the op ran: codes are of memtrain's form alone"


class Watch(Protocol):
    """Observes what the ops of a forward save, and the gradients of their results."""

    def begin(self, step: int) -> bool:
        """Begin a forward; returns whether the compressors of sites have changed."""
        ...

    def saved(self, site: Site, x: Tensor, node: Any, payload: Any = None) -> None:
        """Observe that `node` saves `x`; `payload` is the same object where saves share it."""
        ...


class SavedTensors:
    """Compresses the saved tensors of one forward after another.

    After each op, `collect` visits the nodes that autograd has made for the op. For the saved
    tensors that the known-op table lists, and a rule claims, it registers hooks on the node: the
    graph then holds a `Handle`. All other saved tensors stay what autograd made of them.

    Args:
        choose: Site -> compressor, or the reason to keep the tensor.
        min_elements: Smaller tensors are kept.
        seed: Feeds the keys of stochastic rounding.
        derive_outputs: Whether a norm's output is recomputed from the norm's own payload.
    """

    def __init__(
        self, choose: Choose, min_elements: int, seed: int, *, derive_outputs: bool = True
    ) -> None:
        self.choose, self.min_elements, self.seed = choose, min_elements, seed
        self.derive_outputs = derive_outputs
        self.step = 0
        """Forward passes so far."""
        self.draws: Mapping[str, int] = {}
        """Site -> number; another number gives the site other random bits."""
        self.watch: Watch | None = None
        self.lossless: Callable[[Tensor, bool], Compressor | None] | None = None
        """Gives a compressor that keeps a tensor, which a rule claims or not, bit for bit."""
        self.checks: Checks | None = None
        """Compares what is decompressed, and what replaced ops return, with the exact values."""
        self._numbers: dict[Site, int] = {}
        self.saw_hooks = False
        """Whether hooks of someone else were on in the last forward."""
        self._reset()

    def _reset(self) -> None:
        self.store = Store()
        self.derived = DerivedOutputs(self.store)
        self.readers = Readers()
        self.bool_mask = False
        """Whether the op that runs now was given an attention mask of bools."""
        self.attention = ""
        """The name in rules of the attention that runs now, if one does."""
        self._hooked = False
        self._mark = 0  # nodes made before have been visited, or are not this forward's
        self._calls: dict[Site, int] = {}
        self._records: list[Watched] | None = None
        self._counted: dict[int, tuple[int, Any]] = {}  # storages in the records, with numbers
        self._parameters: set[int] = set()
        self._inputs: set[int] = set()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name in _STATE}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _numbers={}, saw_hooks=False, checks=None)
        self._reset()

    def begin(self, own: Sequence[Tensor], inputs: Sequence[Tensor], *, record: bool) -> None:
        """Start a forward pass.

        Args:
            own: Parameters and buffers, which are never compressed.
            inputs: The user's own inputs of the model, which stay alive anyway.
            record: Whether to record what is saved.
        """
        self._reset()
        if self.checks is not None and not self.checks.begin():
            self.checks = None
        self._parameters = {storage_id(x) for x in own}
        for x in inputs:
            if not foreign(x):
                self.store.of(x, storage_id(x)).is_kept = True
        self._inputs = {storage_id(x) for x in inputs}
        self._records = [] if record else None
        self.saw_hooks = False
        self._mark = _get_sequence_nr()

    def end(self, output: Sequence[Tensor] = ()) -> list[Record] | None:
        """End a forward pass; payloads live on in the graph, and only there.

        Args:
            output: What the model returns: the user holds these tensors, so that compressing them
                would add bytes.

        Returns:
            The records, where the pass was recorded.
        """
        self.step += 1
        for x in output:
            known = None if foreign(x) else self.store.get(storage_id(x))
            if known is not None and not known.is_kept:
                known.keep(x.detach())
        self.readers.end()
        records = self._records
        self._reset()
        return None if records is None else still_held(records)

    @property
    def records(self) -> bool:
        """Whether this forward's saves are recorded."""
        return self._records is not None

    def key(self, site: Site) -> Key:
        """Return the key of the random bits of the site's next payload."""
        call = self._calls.get(site, 0)
        self._calls[site] = call + 1
        number = self._numbers.get(site)
        if number is None:
            number = self._numbers[site] = zlib.crc32(site.name.encode())
        draw = self.draws.get(site.name, 0) if self.draws else 0
        return Key(self.seed, number, self.step, draw, call)

    # -- after each op ------------------------------------------------------------------------

    def skip(self) -> None:
        """Leave the nodes made so far as they are."""
        self._mark = _get_sequence_nr()

    def under_hooks(self, now: bool) -> bool:
        """Note whether hooks of someone else are on; what is saved under them is theirs.

        Args:
            now: Whether they are.

        Returns:
            The same.
        """
        if self._hooked and not now:
            self.skip()
        self._hooked, self.saw_hooks = now, self.saw_hooks or now
        return now

    def note_hooks(self, module: str) -> None:
        """Record that the saves of a module are someone else's: those of `save_on_cpu`, say."""
        if self._records is not None:
            record = Record(Site(module, "*", "*"), (), "", 0, 0, "", FOREIGN_HOOKS)
            self._records.append(Watched(record, None, None))

    def collect(self, result: Any, function: Any, module: str, *, hooked: bool = False) -> None:
        """Visit the nodes that an op has made.

        Args:
            result: Of the op: a tensor, or a tuple or list of them.
            function: The torch function that was called, for the op's name in sites.
            module: Path of the module whose forward runs.
            hooked: Whether what they save is someone else's.
        """
        if not torch.is_grad_enabled():
            return  # no node is made, and to ask a view for its node may raise
        results = (result,) if isinstance(result, Tensor) else result
        if not isinstance(results, tuple | list) or (hooked and not self.readers):
            if hooked:
                self.skip()
            return
        nodes = [x.grad_fn for x in results if isinstance(x, Tensor) and x.grad_fn is not None]
        new: dict[int, Any] = {}
        while nodes:
            node = nodes.pop()
            number = node._sequence_nr()
            if self._mark <= number != LEAF and number not in new:
                new[number] = node
                nodes += [above for above, _ in node.next_functions if above is not None]
        for number in sorted(new):  # as they were made
            self.readers.visit(new[number])
            if not hooked:
                self._visit(new[number], function, module)
        self.readers.seen(results)
        if new or hooked:
            self._mark = _get_sequence_nr()

    def _visit(self, node: Any, function: Any, module: str) -> None:
        kind = type(node)
        row = KNOWN.get(kind)
        if row is None:
            if kind not in OWN:
                self._keep_unknown(node, function, module)
            return
        # Read before hooks are on the node: what is read later is decompressed.
        tensors, op = dict(tensors_of(node, saved_names(kind))), row.op(node, function)
        seen: set[str] = set()
        for saved in row.tensors:
            if saved.attribute in seen or (saved.allows is not None and not saved.allows(node)):
                continue
            seen.add(saved.attribute)
            x = tensors.pop(saved.attribute, None)
            if x is not None:
                site = self._site(module, op, saved.role, function)
                if not (self.attention and self._save_dropout(node, saved, site, x)):
                    self._save(node, saved, site, x)
        for name, x in tensors.items():
            self._keep_other(node, name, x, Site(module, op, name))

    def _site(self, module: str, op: str, role: str, function: Any) -> Site:
        """The site of a save, which is that of the function where torch writes one out."""
        if self.attention and op in _WRITTEN_OUT:
            return Site(module, self.attention, "saved")
        if self.attention and op == ATTENTION:
            return Site(module, self.attention, role)
        if op == "mul" and function in _DROPOUTS:
            return Site(module, "dropout", "saved")
        return Site(module, op, role)

    def _save_dropout(self, node: Any, saved: SavedBy, site: Site, x: Tensor) -> bool:
        """Save what attention written out on a CPU multiplies its probabilities by, in bits."""
        constant = saved.attribute == "other" and x.is_cpu and not x.requires_grad
        if type(node) not in MULTIPLIES or not constant or foreign(x):
            return False
        chosen = self.choose(site)
        if isinstance(chosen, Keep) or chosen.is_identity or x.numel() < max(1, self.min_elements):
            return False
        mask = MaskBias(x)
        if type(x) is not FakeTensor and not torch.equal(mask.unpack(), x):
            return False
        self._register(node, saved, mask, x, site)
        self._record(x, site, mask.nbytes, "Mask()", "", mask)
        return True

    def _keep_other(self, node: Any, name: str, x: Tensor, site: Site) -> None:
        """Keep the other tensors that a known op saves: statistics, for example."""
        if name in MASKS:
            site = site._replace(tensor="input3")
            chosen = self.choose(site)
            if self._is_bias(x) and not isinstance(chosen, Keep) and not chosen.is_identity:
                bias = MaskBias(x)
                self._register(node, SavedBy(name, "input3", LOSSLESS), bias, x, site)
                self._record(x, site, bias.nbytes, "Mask()", "", bias)
                return
        self._keep(x, site, NOT_IN_TABLE, node, name)

    def _is_bias(self, x: Tensor) -> bool:
        """Whether a saved tensor is what fused attention made of a mask of bools."""
        if not self.bool_mask or x.requires_grad or foreign(x) or x.numel() < self.min_elements:
            return False
        storage = self.store.get(storage_id(x))
        return storage is None or not storage.is_kept

    def _keep_unknown(self, node: Any, function: Any, module: str) -> None:
        """Keep what an op saves that the table does not know."""
        names = saved_names(type(node))
        if not names:
            if type(node) not in ALL and not is_function(type(node)) and self._records is not None:
                record = Record(
                    Site(module, "*", "*"), (), "", 0, 0, "", f"{OPAQUE}: {node.name()}"
                )
                self._records.append(Watched(record, None, None))
            return
        name = str(getattr(function, "__name__", node.name())).strip("_")
        why = f"{UNKNOWN_OP} {node.name()}"
        if names is FUNCTION:
            name, why = "autograd.Function", CUSTOM_FUNCTION
        if type(node) is CHECKPOINT:
            name, why = RECOMPUTE, CHECKPOINT_INPUT.reason
        for attribute, x in tensors_of(node, names):
            site = Site(module, name, "saved")
            exact = self._exact(x) if self.lossless is not None and attribute else None
            if exact is None:
                self._keep(x, site, why, node, attribute)
            else:
                self._compress(node, SavedBy(attribute, "saved", LOSSLESS), site, x, exact)

    def _exact(self, x: Tensor, *, claimed: bool = False) -> Compressor | None:
        """A compressor that keeps a tensor bit for bit; None where there is none for it."""
        if self.lossless is None or not x.is_floating_point() or foreign(x):
            return None
        storage = self.store.get(storage_id(x))
        kept = storage is not None and storage.is_kept
        if kept or x.numel() < self.min_elements or memory_of(x)[1] is None or is_parameter(x):
            return None
        return self.lossless(x, claimed)

    # -- one saved tensor -----------------------------------------------------------------------

    def _save(self, node: Any, saved: SavedBy, site: Site, x: Tensor) -> None:
        """Compress a saved tensor where a rule says so and nothing speaks against it."""
        number = storage_id(x)
        if number < 0 or foreign(x):
            self._note(x, site, f"{foreign(x)}; its bytes are not counted")
            return
        if number not in self._inputs and (number in self._parameters or is_parameter(x)):
            self._keep(x, site, WEIGHT, node, saved.attribute)
            return
        known = self.store.get(number)
        if known is not None and known.is_kept:
            reason = OWN_INPUT if number in self._inputs else ALIVE
            self._keep(x, site, reason, node, saved.attribute)
            return
        chosen = self._choice(site, saved, node, x)
        if saved.reason == SHAPE and not isinstance(chosen, Keep):
            handle = ShapeOnly(x)
            self._register(node, saved, handle, x, site)
            self._record(x, site, 0, "", NOT_READ, handle)
            return
        claimed = chosen != NO_RULE
        exact = self._exact(x, claimed=claimed)
        chosen = exact or chosen
        if isinstance(chosen, Keep) or chosen.is_identity:
            self._keep_small(node, saved, site, x, chosen)
            return
        if saved.readers is None or exact is not None:
            self._compress(node, saved, site, x, chosen)
            return

        def save(compress: bool) -> None:
            if compress:
                self._compress(node, saved, site, x, chosen)
            else:
                self._keep(x, site, UNKNOWN_READER, node, saved.attribute)

        self.readers.add(node, x, self.store.of(x, number), saved.readers, save)

    def _choice(self, site: Site, saved: SavedBy, node: Any, x: Tensor) -> Compressor | Keep:
        """Return the compressor for a saved tensor, a function of its op, site and metadata."""
        if x.numel() < self.min_elements:
            return Keep(f"under {self.min_elements:,} elements")
        chosen = self.choose(site)
        if isinstance(chosen, Keep) or chosen.is_identity or saved.reason == SHAPE:
            return chosen
        if saved.reason == OWN_FORM:
            return Keep(TORCHS_FORM)
        if memory_of(x)[1] is None:
            return Keep("its elements overlap in memory")
        if x.is_neg():
            return Keep("a negated view")
        if saved.reason == LINEAR and type(x.grad_fn) in SENTINELS:
            return Keep(SENTINEL)
        limit = None if saved.limit is None else saved.limit(node)
        return fit(chosen, saved.reason, x.dtype, limit)

    def _keep_small(
        self, node: Any, saved: SavedBy, site: Site, x: Tensor, chosen: Compressor | Keep
    ) -> None:
        """Keep a saved tensor; of a small view of a larger storage keep a copy."""
        small = x.numel() < self.min_elements
        if small and x.untyped_storage().nbytes() > 2 * x.nbytes:
            copy = Kept(x, x.detach().clone())
            self._register(node, saved, copy, x, site)
            reason = getattr(chosen, "reason", "")
            self._record(x, site, x.nbytes, "" if reason else repr(chosen), reason, copy)
        else:
            self._keep(x, site, chosen, node, saved.attribute)

    def _compress(
        self, node: Any, saved: SavedBy, site: Site, x: Tensor, chosen: Compressor
    ) -> None:
        derives = self.derive_outputs and saved.reason == LINEAR
        source = self.derived.find(x, node) if derives else None
        if source is not None:
            self._register(node, saved, source, x, site, chosen)
            self._record(x, site, source.nbytes, "derived", DERIVED, source, source.op)
            return
        storage = self.store.of(x, storage_id(x))
        handle, entry, is_new = make_entry(storage, x, chosen, lambda: self.key(site), node)
        if handle is None or entry is None:
            self._keep(x, site, "its payload would be no smaller", node, saved.attribute)
            return
        self._register(node, saved, handle, x, site, chosen)
        if self._records is not None:
            planned, note = (entry.nbytes, "") if is_new else (0, SHARED)
            self._record(x, site, planned, repr(chosen), note, handle)
        if self.watch is not None:
            self.watch.saved(site, x.detach(), node, entry)

    def _register(
        self,
        node: Any,
        saved: SavedBy,
        handle: Any,
        x: Tensor,
        site: Site,
        compressor: Compressor | None = None,
    ) -> None:
        if self.checks is not None:
            handle = self.checks.around(handle, x, site, compressor)
        with suppress(RuntimeError):  # someone else's hooks are on it already, and stay
            saved.register_hooks(node, lambda _: handle, _unpack)

    def _keep(
        self,
        x: Tensor,
        site: Site,
        chosen: Compressor | Keep | str,
        node: Any = None,
        attribute: str = "",
    ) -> None:
        """Leave a saved tensor to autograd: every save of its memory now gives it back."""
        if not x.dim() and x.dtype in _PYTHON:
            return  # a number that Python may have given
        number = storage_id(x)
        if number < 0 or foreign(x):
            self._note(x, site, f"{foreign(x)}; its bytes are not counted")
            return
        if self.lossless is not None and attribute and not isinstance(x, nn.Parameter):
            # As the graph would hold it, so that the user's own tensors are told from the graph's.
            kept = Kept(x, x.detach())
            self._register(node, SavedBy(attribute, "", LOSSLESS), kept, x, site)
        base = x if x._base is None else x._base
        if number in self._parameters or (chosen == WEIGHT and base.is_leaf):
            return  # no bytes of the forward's
        storage = self.store.of(x, number)
        alive = storage.is_kept
        if not alive:
            storage.keep(x.detach())
        if self._records is not None:
            reason = chosen if isinstance(chosen, str) else getattr(chosen, "reason", "")
            planned = 0 if alive else x.untyped_storage().nbytes()
            self._record(x, site, planned, "" if reason else repr(chosen), reason, None)

    # -- replaced ops -------------------------------------------------------------------------

    def replaced(self, site: Site, x: Tensor, result: Any) -> None:
        """Note an op that saved payloads itself.

        Args:
            site: Of the op.
            x: Its input.
            result: Its result.
        """
        y = result if isinstance(result, Tensor) else result[0]
        node: Any = y.grad_fn
        above: list[Any] = []  # views and casts
        while node is not None and type(node) not in OWN:
            above.append(node)
            node = node.next_functions[0][0] if node.next_functions else None
        if node is None or node._sequence_nr() < self._mark:  # of an earlier op
            return
        for one in (node, *reversed(above)):
            self.readers.visit(one, copies=one is not node or site.op == "dropout")
        self.readers.seen((y,))
        if self.derive_outputs and isinstance(result, Tensor):
            self.derived.add(y, site.op)
        if self.watch is not None:
            self.watch.saved(site, x.detach(), node)
        if self._records is not None:
            for part in node.saved_tensors:
                if part is None:
                    continue
                if storage_id(part) not in self._parameters and not is_parameter(part):
                    nbytes = part.untyped_storage().nbytes()
                    self._record(part, site, nbytes, "payload", "", None)
        self.skip()

    def stash(self, site: Site, x: Tensor, compressor: Compressor) -> Handle | None:
        """Return the handle of a tensor that no op saves; None where it is kept.

        Args:
            site: Of the tensor.
            x: A tensor that stands where a payload is smaller, and is not kept anyway.
            compressor: For it.
        """
        number = storage_id(x)
        storage = self.store.of(x, number)
        chosen = fit(compressor, LINEAR, x.dtype, None)
        small = x.numel() < self.min_elements or memory_of(x)[1] is None
        if small or storage.is_kept or isinstance(chosen, Keep) or is_parameter(x):
            self.keep_input(site, x)
            return None
        handle, entry, is_new = make_entry(storage, x, chosen, lambda: self.key(site))
        if handle is None or entry is None:
            self.keep_input(site, x)
            return None
        planned, note = (entry.nbytes, "") if is_new else (0, SHARED)
        self._record(x, site, planned, repr(chosen), note, handle)
        return handle

    def keep_input(self, site: Site, x: Tensor) -> None:
        """Keep a tensor that no op saves."""
        self._keep(x, site, CHECKPOINT_INPUT.reason)

    def expose(self, x: Tensor) -> None:
        """Keep the memory of a tensor that is now open to writes which no version counts."""
        if not foreign(x) and (number := storage_id(x)) not in self._parameters:
            self.store.of(x, number).keep(x.detach())

    def wrote(self, x: Tensor) -> None:
        """Trust nothing made of the memory of a tensor before: its address was read."""
        if not foreign(x) and (storage := self.store.get(storage_id(x))) is not None:
            storage.epoch += 1

    # -- records ------------------------------------------------------------------------------

    def _note(self, x: Tensor, site: Site, reason: str) -> None:
        """Record a save whose bytes are not counted."""
        if self._records is not None:
            dtype = str(x.dtype).removeprefix("torch.")
            self._records.append(Watched(Record(site, (), dtype, 0, 0, "", reason), None, None))

    def _record(
        self,
        x: Tensor,
        site: Site,
        planned: int,
        name: str,
        reason: str,
        handle: Any,
        source: str = "",
    ) -> None:
        """Record what a save costs, where that is asked for."""
        if self._records is None:
            return
        number = storage_id(x)
        first = number not in self._counted and number not in self._inputs
        nbytes = x.untyped_storage().nbytes() if first else 0
        reference = self.store.of(x, number).reference
        index, _ = self._counted.setdefault(number, (len(self._counted), reference))
        dtype = str(x.dtype).removeprefix("torch.")
        record = Record(site, tuple(x.shape), dtype, nbytes, planned, name, reason, index, source)
        self._records.append(Watched(record, handle, reference))


_STATE = (
    "choose",
    "min_elements",
    "seed",
    "derive_outputs",
    "step",
    "draws",
    "watch",
    "lossless",
)
_DROPOUTS = callables("dropout")
_WRITTEN_OUT = ("matmul", "softmax", "mul")
_PYTHON = (torch.float64, torch.int64, torch.bool, torch.complex128)


def _unpack(handle: Any) -> Tensor:
    return handle.unpack()
