"""Decides what autograd holds in place of each saved tensor: the pack hook of a forward."""

import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from memtrain.activations.saved.bound import Bound
from memtrain.activations.saved.cache import Again, Copy, PayloadCache, Save, Source, derived
from memtrain.activations.saved.expected import (
    BETWEEN,
    Expectations,
    Expected,
    Settled,
    look_of,
)
from memtrain.activations.saved.fit import (
    ATTENTIONS,
    FLAT_WEIGHTS,
    FLOATS,
    LOGSUMEXP,
    RECURRENT,
    fit,
    is_logsumexp,
    needless,
)
from memtrain.activations.saved.flatten import memory_of
from memtrain.activations.saved.handles import Compressed, KeptTensor, Saved, Waiting
from memtrain.activations.saved.liveness import Held, still_held, watched
from memtrain.activations.saved.origin import (
    PLAIN,
    cast_source,
    foreign,
    is_parameter,
    of_checkpoint,
    storage_id,
)
from memtrain.activations.saved.site import (
    CHECKPOINT_INPUT,
    CUSTOM_FUNCTION,
    RECOMPUTE,
    Op,
    Record,
    Site,
)
from memtrain.compressors import Compressor, Keep, Key
from memtrain.kernels.dispatch import is_ordinary

# A statistic such as a mean or a log-sum-exp is this much smaller than what the op reads.
SIDE_RATIO = 16
HALVES = (torch.float16, torch.bfloat16)

Choose = Callable[[Site], Compressor | Keep]


class Watch(Protocol):
    """Observes what the ops of a forward save, and their results."""

    def begin(self, step: int, inputs: Iterable[Any]) -> bool:
        """Begin a forward; returns whether the compressors of sites have changed."""
        ...

    def saved(self, site: Site, x: Tensor, payload: Any = None) -> None:
        """Observe that `x` is saved; `payload` is the same object where saves share it."""
        ...

    def after(self, op: Op, result: Any) -> None:
        """Observe the result of the op that made the last saves."""
        ...


class Replaced(NamedTuple):
    """An op of a module that was replaced, for calls that are alike."""

    form: tuple[Any, ...]  # of the call
    run: Callable[..., Any]  # given the call's arguments, the compressor and the key
    compressor: Compressor
    site: Site


SETTLED = 2**14
"""Forms of saves at most whose choices are remembered."""


class SavedTensors:
    """Packs the saved tensors of one forward after another.

    Args:
        choose: Site -> compressor, or the reason to keep the tensor.
        min_elements: Smaller tensors are kept.
        seed: Feeds the keys of stochastic rounding.
        checkpointed: A compressor for the inputs of checkpointed modules, or the reason to keep
            them.
        hooks_all: Whether the hooks are to see every save, those of replaced ops too.
    """

    def __init__(
        self,
        choose: Choose,
        min_elements: int,
        seed: int,
        checkpointed: Compressor | Keep = CHECKPOINT_INPUT,
        *,
        hooks_all: bool = False,
    ) -> None:
        self.choose, self.min_elements, self.seed = choose, min_elements, seed
        self.checkpointed, self.hooks_all = checkpointed, hooks_all
        self.step = 0  # forward passes so far
        self.draws: Mapping[str, int] = {}  # site -> number; another one gives it other random bits
        self.watch: Watch | None = None
        # what keeps a rounded tensor bit for bit, where no rule claims it
        self.exact: Callable[[Tensor, Keep], Compressor | None] | None = None
        self.defers = False  # whether an op's result is packed once it has been rounded
        self.expectations = Expectations()
        self._settled: dict[tuple[Any, ...], Settled] = {}
        self._settled_by: Choose | None = None  # made these choices; None: this forward makes them
        self.replaced: dict[tuple[str, Any], Replaced] = {}
        """Ops that were replaced, by module and function, where choices are settled."""
        self._numbers: dict[Site, int] = {}
        self._nothing: dict[tuple[torch.dtype, torch.device], Tensor] = {}  # what witnesses hold
        self._recorded: list[Held] | None = None
        self._reset()

    def _reset(self) -> None:
        self.hook: Any = self.pack
        """The pack function of the hooks that are on: it calls `pack`."""
        self.surprised: Callable[[], None] | None = None
        """Called where a save is not the expected one: ops are watched from then on."""
        self.op: Op | None = None
        """The op that runs now."""
        self.custom = Op("", "autograd.Function")
        """The op of the `autograd.Function`s that the module which runs now may call."""
        self.shell = False
        """Whether a module runs on no elements, since its result is made as one op."""
        self.drops = False
        """Whether the hooks that are on drop what is saved: it is made again in the backward."""
        self.cache = PayloadCache()
        self._first_call = 0  # number of a site's first payload
        self._ordinary = False  # whether kernels that are bound to a form of saves serve
        self._waiting: list[Waiting] = []
        self._calls: dict[Site, int] = {}
        self._kept: dict[int, StorageWeakRef] = {}  # storages that a KeptTensor holds
        # number and hold of storages whose bytes are in a record
        self._counted: dict[int, tuple[int, StorageWeakRef]] = {}
        # Parameters and buffers, and numbers of theirs. One that the forward replaces is held, else
        # it would leave its numbers to another tensor, which would be kept as it is.
        self._held: Sequence[Tensor] = ()
        self._own: dict[int, int] = {}  # with their versions as the forward begins
        self._parameters: set[int] = set()
        self._inputs: set[int] = set()

    def __getstate__(self) -> dict[str, object]:
        runtime = ("hook", "surprised", "op", "custom", "shell", "drops", "cache", "expectations")
        runtime += ("replaced",)
        return {k: v for k, v in vars(self).items() if k not in runtime and not k.startswith("_")}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _settled={}, _settled_by=None, replaced={})
        vars(self).update(_numbers={}, _nothing={}, _recorded=None, expectations=Expectations())
        self._reset()

    def begin(
        self,
        own: Sequence[Tensor],
        inputs: set[int],
        *,
        record: bool,
        form: Any = None,
        first_call: int = 0,
    ) -> None:
        """Start a forward pass.

        Args:
            own: Parameters and buffers: never touched.
            inputs: Storage ids of the model's own inputs: they stay alive anyway.
            record: Whether to record what is saved.
            form: Of what is equal for forwards whose modules save alike where they are called
                alike. None: all their ops are watched.
            first_call: Number of the first payload of each site, for its key.
        """
        self._reset()
        self._first_call = first_call
        self._held, self._inputs = own, inputs
        self._parameters = {storage_id(x) for x in own}
        self._own = {id(x): 0 if x.is_inference() else x._version for x in own if type(x) in PLAIN}
        self._recorded = [] if record else None
        told = self.watch is not None or self.exact is not None or self.defers
        by = None if record or told else self.choose
        if by is not self._settled_by:
            self._settled, self._settled_by, self.replaced = {}, by, {}
            self.expectations.forget()
        self.expectations.begin(None if by is None else form)
        self._ordinary = is_ordinary()

    @property
    def replays(self) -> bool:
        """Whether ops that were replaced are, in later forwards, without being recognised anew."""
        return self._settled_by is not None and not self.hooks_all

    @property
    def records(self) -> bool:
        """Whether this forward's saves are recorded."""
        return self._recorded is not None

    def end(self, *, whole: bool = True) -> list[Record] | None:
        """End a forward pass: payloads live on in the graph, and only there.

        Args:
            whole: False where an exception ended it.

        Returns:
            The records, where the pass was recorded.
        """
        self.step += 1
        self.expectations.end(whole=whole)
        self._reset()  # first: what outputs are derived from is held here too
        recorded, self._recorded = self._recorded, None
        return None if recorded is None else still_held(recorded)

    def key(self, site: Site) -> Key:
        """The key of the random bits of the site's next payload."""
        call = self._calls.get(site, self._first_call)
        self._calls[site] = call + 1
        number = self._numbers.get(site)
        if number is None:
            number = self._numbers[site] = zlib.crc32(site.name.encode())
        draw = self.draws.get(site.name, 0) if self.draws else 0
        return Key(self.seed, number, self.step, draw, call)

    def pack(self, x: Tensor, op: Op | None = None, requires_grad: bool | None = None) -> Saved:
        """The pack function of saved-tensor hooks.

        Args:
            x: The tensor.
            op: The op that saves it, where it has ended; else the one that runs now.
            requires_grad: Whether the tensor had a gradient, where it was detached since.
        """
        due = self.expectations.due
        if due is not None and self.op is None and op is None and not self.shell:
            if id(x) in self._own:
                return KeptTensor(x.detach(), x._version)
            return self._pack_expected(x, due)
        replaced = self.op is not None and self.op.replaced and op is None
        if self.shell or (replaced and self._recorded is None):
            return KeptTensor(x.detach(), x._version)  # a payload's part, or a parameter
        storage = storage_id(x)
        if storage in self._parameters and not self.defers and type(x) in PLAIN:
            return KeptTensor(x.detach(), x._version)
        if self._settled_by is not None and op is None:
            if self.op is not None:
                return self._pack_settled(x, self.op, storage)
            self.expectations.watch()  # of a custom Function
        if op is None:
            op, deferred = self.op or self.custom, self.defers and self.op is not None
            if deferred and op.inputs and not op.replaced and op.role(x, storage) == "saved":
                # Perhaps the op's result, which is rounded when the op has run.
                waiting = Waiting(x.detach(), op, x.requires_grad)
                self._waiting.append(waiting)
                return waiting
        return self._pack(x, op, storage, requires_grad=requires_grad)

    def _pack_settled(self, x: Tensor, op: Op, storage: int) -> Saved:
        """As `_pack`, by the choice for the save before that was alike in all that choices ask."""
        usual = type(x) is Tensor and storage > 0 and op.inputs and not x.is_neg()
        if not usual or (x.dtype in HALVES and cast_source(x, op.inputs) is not None):
            self.expectations.watch()
            return self._pack(x, op, storage)
        if storage in self._inputs or storage in self._kept or is_parameter(x):
            if self.expectations.tells:
                self.expectations.tell(op, x, None)
            return self._pack(x, op, storage)
        form = self._form(x, op, storage)
        settled = self._settled.get(form)
        handle = None if settled is None else self._pack_as(x, storage, settled)
        handle = handle or self._pack(x, op, storage, form)
        if self.expectations.tells:
            settled = settled or self._settled.get(form)
            if settled is None or op.limit is not None:  # a choice of this op's alone
                self.expectations.watch()
            else:
                self.expectations.tell(op, x, settled)
        return handle

    def _pack_as(self, x: Tensor, storage: int, settled: Settled) -> Saved:
        """The handle of a save for which a choice was made before."""
        site, layout, key, chosen, nothing, bound = settled
        saved = x.detach()
        if bound is not None and nothing is not None and self._ordinary:
            handle = self.cache.share_again(saved, x, storage, settled, self.key)
            if handle is not None:
                saved.data = nothing  # from now on the witness
                return handle
        save = Save(saved, storage, layout, key, site, saved, node=x.grad_fn)
        if nothing is None or isinstance(chosen, Keep):
            if x.numel() < self.min_elements:  # perhaps a small view of a large storage
                return self._keep(save._replace(witness=self._witness(x)), chosen)
            self._kept[storage] = StorageWeakRef(saved.untyped_storage())
            return KeptTensor(saved, saved._version)
        handle, _, note, _ = self.cache.share(save, chosen, self.key, derive=True)
        if handle is None:
            return self._keep(save, Keep(note))
        saved.data = nothing  # from now on the witness
        return handle

    def _pack_expected(self, x: Tensor, due: Iterator[Expected]) -> Saved:
        """As `pack`, which calls it, of an op that no one watches."""
        storage = storage_id(x)
        if storage in self._parameters and type(x) in PLAIN:
            return KeptTensor(x.detach(), x._version)
        expected = next(due, None)
        if (
            expected is None
            or type(x) is not Tensor
            or storage <= 0
            or x.is_neg()
            or expected.look != look_of(x)
            or not _calls_from(expected, sys._getframe(2))
        ):
            return self._pack_surprise(x, storage)
        _, _, _, origin, settled = expected
        if storage in self._inputs or storage in self._kept:
            return KeptTensor(x.detach(), x._version)
        base = x._base  # as in `made_by`
        maker = type((x if base is None else base).grad_fn)
        if (settled is None or origin is None or maker is not origin) and is_parameter(x):
            return KeptTensor(x.detach(), x._version)
        if settled is None:  # an input of the model then, or what another save kept
            return self._pack_surprise(x, storage)
        return self._pack_as(x, storage, settled)

    def _pack_surprise(self, x: Tensor, storage: int) -> Saved:
        """As `pack`, of a save that is not the expected one."""
        self.expectations.watch()
        if self.surprised is not None:
            self.surprised()
        return self._pack(x, self.custom, storage)

    def _form(self, x: Tensor, op: Op, storage: int) -> tuple[Any, ...]:
        """Equal for saves for which all choices are the same, but those that ask who else saved."""
        where = op.place(storage)
        own = (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad)
        if op.form is None:
            op.form = (
                op.dropout,
                *[
                    (t.shape, t.stride(), t.dtype, t.requires_grad, number in self._parameters)
                    for t, number in zip(op.inputs, op.storages or (), strict=True)
                ],
            )
        return op.module, op.name, op.limit, where, own, op.form

    def _pack(
        self,
        x: Tensor,
        op: Op,
        storage: int,
        form: tuple[Any, ...] | None = None,
        *,
        requires_grad: bool | None = None,
    ) -> Saved:
        if storage < 0 or type(x) not in PLAIN:
            note = f"{foreign(x)}; its bytes are not counted"
            kept = KeptTensor(x.detach(), x._version)
            return self._note(kept, Site(op.module, op.name, "saved"), x, note)
        source = cast_source(x, op.inputs) if x.dtype in HALVES and not op.replaced else None
        if source is not None and source.is_leaf:
            if self._own.get(id(source), source._version) != source._version:
                return KeptTensor(x.detach(), x._version)  # it may have changed since it was cast
            return self._cast_again(x, source, op)
        if storage in self._parameters or (storage not in self._inputs and is_parameter(x)):
            return KeptTensor(x.detach(), x._version)
        saved = x.detach()
        if x.is_neg():
            saved = saved.resolve_neg()
            storage = storage_id(saved)
        if not op.inputs and of_checkpoint():
            op = Op(op.module, RECOMPUTE, ((saved,) if x.requires_grad else (), {}))
        site = Site(op.module, op.name, op.replaced or op.role(saved, storage))
        if op.replaced:
            kept = KeptTensor(saved, saved._version)
            if self._recorded is not None:
                save = Save(saved, storage, *memory_of(saved), site, saved)
                self._record(kept, save, saved.nbytes, "payload")
            return kept
        save = Save(saved, storage, *memory_of(saved), site, self._witness(x), form, x.grad_fn)
        copy = source if source is None else _cast_of(source, saved)
        known = x.requires_grad if requires_grad is None else requires_grad
        return self._compress(save, op, copy, requires_grad=known)

    def _witness(self, x: Tensor) -> Tensor:
        """A tensor with the version counter of `x`, and no elements."""
        witness = x.detach()  # shares the counter; what `data` is set to does not change that
        if type(x) is FakeTensor:
            witness.data = x.new_empty(0)
            return witness
        witness.data = self._empty_like(x)
        return witness

    def _empty_like(self, x: Tensor) -> Tensor:
        """No elements of the dtype and device of `x`: one tensor for all."""
        kind = x.dtype, x.device
        if kind not in self._nothing:
            self._nothing[kind] = x.new_empty(0)
        return self._nothing[kind]

    def pack_deferred(self) -> None:
        """Pack the results that were deferred: their op has run, and they have been rounded."""
        deferred, self._waiting = self._waiting, []
        for one in deferred:
            one.pack(self.pack)

    def derive(self, y: Tensor, source: Source, op: str) -> None:
        """Let saves of an op's output `y` hold `source`, unless they are kept anyway."""
        storage = storage_id(y) if type(y) in PLAIN else -1
        if storage < 0 or storage in self._parameters or storage in self._inputs:
            return
        key = memory_of(y)[1]
        if key is not None:
            self.cache.derive(y, storage, key, source, op)

    def copied(self, y: Tensor, x: Tensor, again: Again) -> None:
        """Let saves of `y`, which `again` just made of `x` alone, hold what `x` comes from.

        Args:
            y: A copy in another dtype or memory order.
            x: Its source, referred to weakly.
            again: Makes the copy.
        """
        # A tensor of torch.inference_mode() has no version that would tell of changes.
        if not foreign(y) and not x.is_inference() and storage_id(y) not in self._parameters:
            self.cache.copied(y, Copy.of(x, again))

    def _cast_again(self, x: Tensor, leaf: Tensor, op: Op) -> Compressed:
        """The handle of a parameter's copy in another dtype: the parameter, to be cast again."""
        saved, witness = x.detach(), self._witness(x)
        storage = storage_id(saved)
        kept = KeptTensor(leaf.detach(), leaf._version)
        seen_as = (saved.shape, saved.stride(), saved.storage_offset())
        content = partial(_view_of_cast, kept, saved.dtype, seen_as)
        handle = Compressed(None, content, witness, witness._version)
        if self._recorded is not None:
            site = Site(op.module, op.name, op.role(saved, storage))
            save = Save(saved, storage, *memory_of(saved), site, witness)
            self._record(handle, save, 0, "", "a parameter's copy: cast again")
        return handle

    def _compress(
        self, save: Save, op: Op, copy: Copy | None, *, requires_grad: bool
    ) -> KeptTensor | Compressed:
        """The save's handle: compressed where the rules say so and nothing speaks against it."""
        x = save.tensor
        _, version, source, numel = self.cache.weights.get(save.storage, _NO_WEIGHT)
        if version == x._version and numel == x.numel():
            note = "a weight: rounded again from its parameter"
            return self._note(derived(save, source), save.site, x, note)
        if requires_grad and op.name.startswith("conv") and needless(op):
            return self._drop(save)
        why = self._why_keep(save, op, requires_grad=requires_grad)
        if why:
            self._settle(save, Keep(why))
            return self._keep(save, Keep(why))
        chosen = self.checkpointed if op.name == RECOMPUTE else self.choose(save.site)
        if not isinstance(chosen, Keep):
            chosen, copy = fit(save, op, chosen, copy, requires_grad=requires_grad)
        exact = None
        if self.exact is not None and isinstance(chosen, Keep) and x.dtype in FLOATS:
            exact = self.exact(x, chosen)
        chosen = exact or chosen
        self._settle(save, chosen, copy)
        if isinstance(chosen, Keep) or chosen.is_identity:
            return self._keep(save, chosen)
        derive = exact is None
        handle, planned, note, from_op = self.cache.share(
            save, chosen, self.key, derive=derive, copy=copy
        )
        if handle is None:
            return self._keep(save, Keep(note))
        if self._recorded is not None:
            name = "derived" if handle.shared is None else repr(chosen)
            self._record(handle, save, planned, name, note, from_op)
        if self.watch is not None and handle.shared is not None:
            self.watch.saved(save.site, x, handle.shared)
        return handle

    def _settle(self, save: Save, chosen: Compressor | Keep, copy: Copy | None = None) -> None:
        """Let saves of this form, if it has one, be handled so from now on."""
        if save.form is not None and copy is None:
            if len(self._settled) >= SETTLED:  # shapes that vary would collect without end
                self._settled.clear()
            nothing = bound = None
            if not isinstance(chosen, Keep) and not chosen.is_identity:
                nothing = self._empty_like(save.tensor)
                bound = Bound.of(save.tensor, save.layout, save.key, chosen)
            choice = (save.layout, save.key, chosen, nothing, bound)
            self._settled[save.form] = Settled(save.site, *choice)

    def _drop(self, save: Save) -> Compressed:
        """The handle of a save of which the backward reads the shape only."""
        x = save.tensor
        content = partial(x.new_empty(0).new_empty_strided, x.shape, x.stride())
        handle = Compressed(None, content, save.witness, save.witness._version)
        if self._recorded is not None:
            self._record(handle, save, 0, "", "a convolution's, whose weight is frozen: not needed")
        return handle

    def _why_keep(self, save: Save, op: Op, *, requires_grad: bool) -> str:
        """Why the save is kept whatever the rules say, or an empty string."""
        x = save.tensor
        if save.storage in self._inputs:
            return "the model's own input: stays alive anyway"
        # What has no gradient may be a mask, of numbers that no group holds side by side.
        kept = isinstance(self.checkpointed, Keep) or not requires_grad
        if op.name == RECOMPUTE and kept:
            return CHECKPOINT_INPUT.reason
        if x.numel() < self.min_elements:
            return f"under {self.min_elements:,} elements"
        if save.storage in self._kept:
            return "its storage is kept alive by another save"
        if not op.inputs:
            return CUSTOM_FUNCTION
        if op.name in RECURRENT and x.dim() == 1 and x.dtype in FLOATS:
            return FLAT_WEIGHTS
        if save.key is None:
            return "its elements overlap in memory"
        return self._statistic(save, op)

    def _statistic(self, save: Save, op: Op) -> str:
        """Which statistic the save is, or an empty string."""
        x = save.tensor
        if save.site.tensor == "saved":
            if x.dim() > 1 and x.shape[-1] == 1:
                return "a statistic: its last dimension is 1"
            if op.name in ATTENTIONS and is_logsumexp(x, op.inputs[0]):
                return LOGSUMEXP
        weights = self.cache.weights
        reads = [
            read.numel()
            for read, storage in zip(op.inputs, op.storages or (), strict=True)
            if storage not in self._parameters and storage not in weights
        ]
        if op.name not in RECURRENT and x.numel() * SIDE_RATIO <= max(reads, default=0):
            return f"a statistic: {SIDE_RATIO} times smaller than what its op reads"
        return ""

    def _keep(self, save: Save, chosen: Compressor | Keep) -> KeptTensor:
        x, version, witness = save.tensor, save.tensor._version, None
        alive = save.storage in self._inputs or save.storage in self._kept
        if not alive and x.numel() < self.min_elements and x.untyped_storage().nbytes() > x.nbytes:
            witness = save.witness
            x = x.clone()  # a small view must not keep a large storage alive
            save = save._replace(tensor=x, storage=storage_id(x))
        kept = KeptTensor(x, version, witness)
        if self._recorded is not None:
            reason = chosen.reason if isinstance(chosen, Keep) else ""
            planned = 0 if alive else x.untyped_storage().nbytes()
            self._record(kept, save, planned, "" if reason else repr(chosen), reason)
        if save.storage not in self._kept:
            self._kept[save.storage] = StorageWeakRef(x.untyped_storage())
        return kept

    def _note(
        self, saved: KeptTensor | Compressed, site: Site, x: Tensor, reason: str
    ) -> KeptTensor | Compressed:
        """Record a save whose bytes are not counted."""
        if self._recorded is not None:
            dtype = str(x.dtype).removeprefix("torch.")
            self._recorded.append(watched(Record(site, (), dtype, 0, 0, "", reason), saved))
        return saved

    def _record(
        self,
        saved: KeptTensor | Compressed,
        save: Save,
        planned: int,
        name: str,
        reason: str = "",
        source: str = "",
    ) -> None:
        """Record what a save costs; called where that is asked for."""
        x, storage = save.tensor, save.storage
        first = storage not in self._counted and storage not in self._inputs
        nbytes = x.untyped_storage().nbytes() if first else 0
        new = (len(self._counted), StorageWeakRef(x.untyped_storage()))
        number, _ = self._counted.setdefault(storage, new)
        dtype = str(x.dtype).removeprefix("torch.")
        shape = tuple(x.shape)
        record = Record(save.site, shape, dtype, nbytes, planned, name, reason, number, source)
        if self._recorded is not None:
            self._recorded.append(watched(record, saved))


BETWEEN.update(
    function.__code__
    for function in (SavedTensors.pack, SavedTensors._pack_settled, SavedTensors._pack_expected)
)


_NO_WEIGHT: tuple[None, int, Source, int] = (None, -1, torch.Tensor, 0)


def _calls_from(expected: Expected, frame: FrameType | None) -> bool:
    """Whether the instruction that calls an op, in this frame or below ours, is expected."""
    code = expected.code
    while frame is not None and frame.f_code is not code:  # to ask first if it is ours takes longer
        frame = frame.f_back if frame.f_code in BETWEEN else None
    return frame is not None and frame.f_lasti == expected.instruction


def _cast_of(source: Tensor, x: Tensor) -> Copy | None:
    """The copy that `x` is of `source`; None where it is a part of one."""
    return Copy.of(source, partial(_cast, x.dtype)) if source.numel() == x.numel() else None


def _cast(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x.to(dtype)


def _view_of_cast(kept: KeptTensor, dtype: torch.dtype, seen_as: tuple[Any, ...]) -> Tensor:
    return kept.unpack().to(dtype).as_strided(*seen_as)
