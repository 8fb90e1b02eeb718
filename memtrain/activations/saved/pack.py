"""What autograd holds in place of a saved tensor: the pack and unpack of saved-tensor hooks."""

import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from memtrain.activations.saved.flatten import flatten, layout_of, memory_key, overlaps
from memtrain.activations.saved.handles import Compressed, Derived, Kept, Saved, Shared, witness_of
from memtrain.activations.saved.liveness import Holders
from memtrain.activations.saved.origin import foreign, is_parameter, of_checkpoint, storage_id
from memtrain.activations.saved.site import RECOMPUTE, STARTS, Op, Record, Site
from memtrain.compressors import (
    Compressor,
    Integers,
    Keep,
    Key,
    Mask,
    Packed,
)

# A statistic such as a mean or a log-sum-exp is this much smaller than what the op reads.
SIDE_RATIO = 16
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int16, torch.int32, torch.int64)

SHARED = "shared with an earlier save"

Choose = Callable[[Site], Compressor | Keep]


class Watch(Protocol):
    """Is told what the ops of a forward save, and what they give."""

    def begin(self, step: int, inputs: Iterable[Any]) -> bool:
        """A forward starts; whether the compressors of sites have changed."""
        ...

    def saved(self, site: Site, x: Tensor, payload: Any = None) -> None:
        """`x` is saved; `payload` is the same object where saves share it."""
        ...

    def after(self, op: Op, result: Any) -> None:
        """The op that saved what was told last has run."""
        ...


class _Cached(NamedTuple):
    storage: StorageWeakRef  # while it is held, no new storage can take the same id
    shared: "weakref.ref[Shared]"
    version: int


class _Output(NamedTuple):
    storage: StorageWeakRef
    source: Callable[[], Tensor]
    version: int
    op: str
    numel: int = 0


class SavedTensors:
    """Packs the saved tensors of one forward after another.

    Args:
        choose: Site -> compressor, or the reason to keep the tensor.
        min_elements: Smaller tensors are kept.
        seed: Feeds the keys of stochastic rounding.
        starts: A compressor for what recomputed modules start from, or the reason to keep it.
    """

    def __init__(
        self, choose: Choose, min_elements: int, seed: int, starts: Compressor | Keep = STARTS
    ) -> None:
        self.choose, self.min_elements, self.seed = choose, min_elements, seed
        self.starts = starts
        self.step = 0  # forward passes so far
        self.draws: dict[str, int] = {}  # site -> number; another one gives it other random bits
        self.watch: Watch | None = None
        # what keeps a rounded tensor bit for bit, where no rule claims it
        self.exact: Callable[[Tensor, Keep], Compressor | None] | None = None
        self.records: list[Record] | None = None
        self._reset()

    def _reset(self) -> None:
        self._cache: dict[tuple[object, ...], _Cached] = {}
        self._latest: dict[tuple[object, ...], _Cached] = {}  # whatever the compressor
        self._outputs: dict[tuple[object, ...], _Output] = {}
        self._weights: dict[int, _Output] = {}  # rounded ones
        self._calls: Counter[Site] = Counter()
        self._held: dict[int, StorageWeakRef] = {}  # storages that a Kept holds
        # number and hold of storages whose bytes are in a record
        self._counted: dict[int, tuple[int, StorageWeakRef]] = {}
        self._parameters: set[int] = set()
        self._inputs: set[int] = set()
        self._holders = Holders()  # of the records

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._reset()

    def begin(self, parameters: set[int], inputs: set[int]) -> None:
        """Start a forward pass.

        Args:
            parameters: Storage ids of parameters and buffers: never touched.
            inputs: Storage ids of the model's own inputs: they stay alive anyway.
        """
        self._reset()
        self._parameters, self._inputs = parameters, inputs

    def end(self) -> None:
        """End a forward pass: payloads live on in the graph, and only there."""
        self.step += 1
        holders = self._holders
        self._reset()  # first: what outputs are derived from is held here too
        if self.records is not None:
            self.records = holders.left(self.records)

    def key(self, site: Site) -> Key:
        """What feeds the random bits of the site's next payload."""
        call = self._calls[site]
        self._calls[site] += 1
        draw = self.draws.get(site.name, 0)
        return Key(self.seed, zlib.crc32(site.name.encode()), self.step, draw, call)

    def pack(self, x: Tensor, op: Op) -> Saved:
        """What autograd shall hold in place of `x`, which `op` saves."""
        records = self.records
        if records is None:
            return self._pack(x, op)
        before = len(records)
        saved = self._pack(x, op)
        for record in records[before:]:
            self._holders.add(saved, record)
        return saved

    def _pack(self, x: Tensor, op: Op) -> Kept | Compressed | Derived:
        why = foreign(x)
        if why:
            site = Site(op.module, op.name, "saved")
            self._note(site, x, f"{why}; its bytes are not counted")
            return Kept(x.detach(), x._version)
        storage = storage_id(x)
        if storage in self._parameters or (storage not in self._inputs and is_parameter(x)):
            return Kept(x.detach(), x._version)
        given, x = x, x.detach().resolve_neg()
        if not op.inputs and of_checkpoint():
            op = Op(op.module, RECOMPUTE, (x,) if given.requires_grad else ())
        site = Site(op.module, op.name, op.replaced or op.role(x))
        if op.replaced:
            self._record(site, x, x.nbytes, "payload", "")
            return Kept(x, x._version)
        witness = witness_of(given)
        weight = self._weights.get(storage)
        if weight is not None and weight.version == x._version and x.numel() == weight.numel:
            self._note(site, x, "a weight: rounded again from its parameter")
            return Derived(weight.source, layout_of(x), witness, witness._version)
        why = self._why_keep(x, op, site, given.requires_grad)
        if why:
            return self._keep(x, site, Keep(why))
        chosen = self._fit(self.starts if op.name == RECOMPUTE else self.choose(site), x, op)
        exact = self._exact(x, chosen)
        if exact is not None:
            return self._compress(x, site, exact, witness)
        if isinstance(chosen, Keep) or chosen.is_identity:
            return self._keep(x, site, chosen)
        return self._derived(x, site, witness) or self._compress(x, site, chosen, witness)

    def _why_keep(self, x: Tensor, op: Op, site: Site, requires_grad: bool) -> str:
        """Why `x` is kept whatever the rules say, or an empty string."""
        if storage_id(x) in self._inputs:
            return "the model's own input: stays alive anyway"
        # What has no gradient may be a mask, of numbers that no group holds side by side.
        if op.name == RECOMPUTE and (isinstance(self.starts, Keep) or not requires_grad):
            return STARTS.reason
        if x.numel() < self.min_elements:
            return f"under {self.min_elements:,} elements"
        if storage_id(x) in self._held:
            return "its storage is kept alive by another save"
        if not op.inputs:
            return "saved by a custom autograd Function"
        if overlaps(x):
            return "its elements overlap in memory"
        if site.tensor == "saved" and x.dim() > 1 and x.shape[-1] == 1:
            return "a statistic: its last dimension is 1"
        weights = self._parameters | self._weights.keys()
        reads = [t.numel() for t in op.inputs if storage_id(t) not in weights]
        if x.numel() * SIDE_RATIO <= max(reads, default=0):
            return f"a statistic: {SIDE_RATIO} times smaller than what its op reads"
        return ""

    def _fit(self, chosen: Compressor | Keep, x: Tensor, op: Op) -> Compressor | Keep:
        """The compressor for this dtype: masks and indices are packed without loss."""
        if isinstance(chosen, Keep) or chosen.is_identity:
            return chosen
        if x.dtype == torch.bool:
            return Mask()
        if x.dtype in INTEGERS:
            return Integers(limit=op.limit)
        if x.dtype not in FLOATS:
            return Keep(f"dtype {x.dtype}")
        if chosen.gives_derivative:
            return Keep("derivative codes serve replaced nonlinearities only")
        return chosen

    def _exact(self, x: Tensor, chosen: Compressor | Keep) -> Compressor | None:
        if self.exact is None or not isinstance(chosen, Keep) or x.dtype not in FLOATS:
            return None
        return self.exact(x, chosen)

    def _keep(self, x: Tensor, site: Site, chosen: Compressor | Keep) -> Kept:
        alive = storage_id(x) in self._inputs or storage_id(x) in self._held
        reason = chosen.reason if isinstance(chosen, Keep) else ""
        name = "" if reason else repr(chosen)
        version, witness = x._version, None
        if not alive and x.numel() < self.min_elements and x.untyped_storage().nbytes() > x.nbytes:
            witness = witness_of(x)
            x = x.clone()  # a small view must not keep a large storage alive
        self._record(site, x, 0 if alive else x.untyped_storage().nbytes(), name, reason)
        self._held.setdefault(storage_id(x), StorageWeakRef(x.untyped_storage()))
        return Kept(x, version, witness)

    def _compress(
        self, x: Tensor, site: Site, compressor: Compressor, witness: Tensor
    ) -> Kept | Compressed:
        shaped = compressor.shaped
        flat, layout = (x, None) if shaped else flatten(x)
        form = (x.shape, x.stride()) if shaped else memory_key(x)
        where = (storage_id(x), form, x.storage_offset(), x.dtype, compressor)
        cached = self._cache.get(where)
        shared = cached.shared() if cached and cached.version == x._version else None
        if shared is None:
            with torch.no_grad():
                packed = compressor.compress(flat, key=self.key(site))
            shared = Shared(packed, compressor, layout)
            nbytes = _held(packed, x)
            if nbytes >= x.untyped_storage().nbytes():
                return self._keep(x, site, Keep("its payload would be no smaller"))
            weak = StorageWeakRef(x.untyped_storage())
            cached = _Cached(weak, weakref.ref(shared), x._version)
            self._cache[where] = self._latest[_memory(x)] = cached
            self._record(site, x, nbytes, repr(compressor), "")
        else:
            self._record(site, x, 0, repr(compressor), SHARED)
        if self.watch is not None:
            self.watch.saved(site, x, shared)
        return Compressed(shared, layout, witness, witness._version)

    def source_of(self, x: Tensor) -> Callable[[], Tensor] | None:
        """What gives the elements of `x` as they are now from a payload, if there is one."""
        cached, output = self._latest.get(_memory(x)), self._outputs.get(_memory(x))
        shared = cached.shared() if cached and cached.version == x._version else None
        if shared is not None:
            return shared.tensor
        return output.source if output and output.version == x._version else None

    def derive(self, y: Tensor, source: Callable[[], Tensor], op: str) -> None:
        """Let saves of an op's output `y` hold `source` in place of a payload of their own.

        Args:
            y: The output, just made.
            source: Computes it again, in the same memory order, from payloads that are kept.
            op: The op's name, for the records.
        """
        if foreign(y) or overlaps(y) or storage_id(y) in self._parameters | self._inputs:
            return
        weak = StorageWeakRef(y.untyped_storage())
        self._outputs[_memory(y)] = _Output(weak, source, y._version, op)

    def remake(self, x: Tensor, source: Callable[[], Tensor]) -> None:
        """Let saves of `x`, a rounded weight, hold what rounds its parameter again."""
        weak = StorageWeakRef(x.untyped_storage())
        self._weights[storage_id(x)] = _Output(weak, source, x._version, "", x.numel())

    def _derived(self, x: Tensor, site: Site, witness: Tensor) -> Derived | None:
        output = self._outputs.get(_memory(x))
        if output is None or output.version != x._version:
            return None
        self._record(site, x, 0, "derived", f"computed again from what {output.op} keeps")
        return Derived(output.source, layout_of(x), witness, witness._version)

    def _note(self, site: Site, x: Tensor, reason: str) -> None:
        if self.records is not None:
            dtype = str(x.dtype).removeprefix("torch.")
            self.records.append(Record(site, (), dtype, 0, 0, "", reason))

    def _record(self, site: Site, x: Tensor, planned: int, name: str, reason: str) -> None:
        if self.records is None:
            return
        storage = storage_id(x)
        first = storage not in self._counted and storage not in self._inputs
        nbytes = x.untyped_storage().nbytes() if first else 0
        new = (len(self._counted), StorageWeakRef(x.untyped_storage()))
        number, _ = self._counted.setdefault(storage, new)
        dtype = str(x.dtype).removeprefix("torch.")
        shape = tuple(x.shape)
        self.records.append(Record(site, shape, dtype, nbytes, planned, name, reason, number))


def _held(packed: Packed, x: Tensor) -> int:
    """Bytes of a payload that lie on the device of `x`: what is swapped out is not held."""
    return sum(t.nbytes for t in packed.tensors.values() if t.device == x.device)


def _memory(x: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same elements in the same memory order."""
    return storage_id(x), memory_key(x), x.dtype
