"""Payloads of one forward, and which of its saves share one."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from memtrain.activations.saved.expected import Settled
from memtrain.activations.saved.flatten import (
    Layout,
    Memory,
    flatten,
    layout_of,
    memory_of,
    restore,
)
from memtrain.activations.saved.handles import Compressed, Shared
from memtrain.activations.saved.origin import leads_to, node_number, storage_id
from memtrain.activations.saved.site import Site
from memtrain.compressors import Compressor, Key, Packed
from memtrain.compressors.log_group import LogGroup

SHARED = "shared with an earlier save"

Source = Callable[[], Tensor]
Again = Callable[[Tensor], Tensor]
_Place = tuple[object, ...]  # equal for the same elements in the same memory order
# How it was made (a compressor, with a form where that is shaped), of which version, and itself.
_Payload = tuple[object, int, Callable[[], Shared | None]]


class Save(NamedTuple):
    """A tensor that autograd saves, described once."""

    tensor: Tensor  # detached
    storage: int  # its storage's id
    layout: Layout
    key: Memory | None  # see `memory_of`
    site: Site
    witness: Tensor  # no elements and no memory of the tensor, but its version counter
    form: tuple[object, ...] | None = None  # equal for saves that are chosen for alike
    node: object = None  # of the graph, that gave the tensor


class Copy(NamedTuple):
    """Source of a saved tensor that was cast, or copied in another memory order."""

    find: Callable[[], Tensor | None]  # None once it is gone: its payload may be there still
    storage: int
    held: StorageWeakRef  # else another storage may take the number when the source is gone
    layout: Layout
    key: Memory | None
    witness: Tensor  # of changes to the source, and of its dtype
    version: int
    again: Again  # of the source: the copy, in the memory order that it had

    @classmethod
    def of(cls, x: Tensor, again: Again) -> "Copy":
        """A copy that `again` just made of `x` alone; `x` is referred to weakly."""
        witness = x.detach()
        witness.data = x.new_empty(0)
        held = StorageWeakRef(x.untyped_storage())
        own = *memory_of(x), witness, x._version
        return cls(weakref.ref(x), storage_id(x), held, *own, again)


class _Memory:
    """Payloads and sources of the elements at one place of a storage, which no other takes."""

    __slots__ = ("copy", "output", "payloads", "storage")

    def __init__(self, storage: StorageWeakRef) -> None:
        self.storage = storage
        self.payloads: list[_Payload] = []  # of one version, the latest last
        # Of a version, with the number of the graph's node that made it.
        self.output: tuple[int, Source | None, str, int | None] = _NO_OUTPUT
        self.copy: tuple[int, Copy | None, int | None] = _NO_COPY

    def payload(self, form: object, version: int) -> Shared | None:
        """The payload of these elements as they are at this version, if it is there still.

        Args:
            form: The compressor, and the tensor's form where that is `shaped`.
            version: The tensor's.
        """
        for made_as, then, known in self.payloads:
            if then == version and (made_as is form or made_as == form):
                return known()
        return None

    def latest(self, version: int) -> Shared | None:
        """The latest one, whatever the compressor."""
        if not self.payloads:
            return None
        _, then, known = self.payloads[-1]
        return known() if then == version else None

    def hold(self, form: object, version: int, shared: Shared) -> None:
        """Let `payload` find one that was made; it is not kept alive."""
        held = self.payloads
        held[:] = [one for one in held if one[1] == version and one[2]() is not None]
        held.append((form, version, weakref.ref(shared)))


_NO_OUTPUT: tuple[int, None, str, None] = (-1, None, "", None)
_NO_COPY: tuple[int, None, None] = (-1, None, None)


class PayloadCache:
    """Makes one payload per memory, version and compressor; dropped when the forward ends.

    What is known of a memory has a weak reference to the storage: while it is held, no new storage
    can take the same id. What is known of another version than the tensor's is stale.
    """

    def __init__(self) -> None:
        self._known: dict[_Place, _Memory] = {}
        self.weights: dict[int, tuple[StorageWeakRef, int, Source, int]] = {}
        """Rounded ones, by storage."""

    def _memory(self, x: Tensor, storage: int, key: Memory | None) -> _Memory:
        """Find or begin the record of a tensor's memory, which was just made."""
        place = (storage, key, x.dtype)
        known = self._known.get(place)
        if known is None:
            known = self._known[place] = _Memory(StorageWeakRef(x.untyped_storage()))
        return known

    def share(  # noqa: C901 (a chain of what a save may be)
        self,
        save: Save,
        compressor: Compressor,
        key: Callable[[Site], Key],
        *,
        derive: bool,
        copy: Copy | None = None,
    ) -> tuple[Compressed | None, int, str, str]:
        """The handle of a save that is compressed.

        Args:
            save: The save.
            compressor: Of its site.
            key: Gives the random bits of a new payload.
            derive: Whether an op's output may be computed again from the payload of its input.
            copy: Its source, where it is a copy that `copied` was not told of.

        Returns:
            handle: None where a payload would be no smaller than the tensor's storage.
            planned: Bytes of a new payload, on the tensor's device.
            note: How the handle gives the tensor where it has no new payload.
            source: The op that a derived output is computed again from.
        """
        x, version, shaped = save.tensor, save.tensor._version, compressor.shaped
        place = (save.storage, save.key, x.dtype)
        memory = self._known.get(place)
        if memory is not None:
            then, source, op, number = memory.output
            if derive and then == version and source is not None and leads_to(save.node, number):
                return derived(save, source), 0, f"computed again from what {op} keeps", op
            then, known, number = memory.copy
            if copy is None and then == version and leads_to(save.node, number):
                copy = known
        if copy is not None and not shaped and self._serves(copy, save, compressor, derive=derive):
            return self._share_source(save, copy, compressor, key, derive=derive)
        form = (compressor, x.shape, x.stride(), x.storage_offset()) if shaped else compressor
        layout = None if shaped else save.layout
        witness = save.witness
        shared = None if memory is None else memory.payload(form, version)
        if shared is not None:
            content = shared.content if layout is None else partial(shared.seen_as, layout)
            return Compressed(shared, content, witness, witness._version), 0, SHARED, ""
        flat = x
        if layout is not None and not (compressor.reads_rows and x.is_contiguous()):
            flat = flatten(x, layout, rows=save.key if compressor.reads_rows else None)[0]
        compressor = compressor.for_saved(x.shape) if compressor.whole_rows else compressor
        packed = compressor.compress(flat, key=key(save.site))
        planned, storage = 0, x.untyped_storage()
        away = getattr(packed.tensors, "away", ())  # what is swapped out is not held
        for name, t in packed.tensors.items():
            if name not in away and t.device == x.device:
                planned += t.nbytes
        if planned >= storage.nbytes():
            return None, 0, "its payload would be no smaller", ""
        shared = Shared(packed, compressor, layout)
        if memory is None:
            memory = self._known[place] = _Memory(StorageWeakRef(storage))
        memory.hold(form, version, shared)
        content = shared.content if layout is None else partial(shared.seen_as, layout)
        return Compressed(shared, content, witness, witness._version), planned, "", ""

    def share_again(
        self, x: Tensor, given: Tensor, storage: int, settled: Settled, key: Callable[[Site], Key]
    ) -> Compressed | None:
        """As `share`, of a save for which its compression is bound; None: `share` knows more.

        Args:
            x: The tensor, detached, which is to be the witness.
            given: The tensor as autograd hands it over.
            storage: Its storage's id.
            settled: What was chosen for it.
            key: Gives the random bits of a new payload.
        """
        site, layout, own, compressor, _, bound = settled
        version, place = x._version, (storage, own, x.dtype)
        memory, shared = self._known.get(place), None
        if memory is not None:
            then, source, _, number = memory.output
            if then == version and source is not None and leads_to(given.grad_fn, number):
                return Compressed(None, partial(_seen_as, source, layout), x, version)
            if memory.copy[0] == version:
                return None
            shared = memory.payload(compressor, version)
        if bound is None:
            return None
        if shared is None:
            bytes_of = x.untyped_storage()
            if bound.nbytes >= bytes_of.nbytes():
                return None
            made_by = bound.compressor
            parts = bound.compress(x, key(site).bits())
            tensors = dict(zip(made_by.parts, parts, strict=True))
            shared = Shared(Packed(tensors, bound.stored, x.dtype), made_by, layout)
            if memory is None:
                memory = self._known[place] = _Memory(StorageWeakRef(bytes_of))
                memory.payloads = [(compressor, version, weakref.ref(shared))]
            else:
                memory.hold(compressor, version, shared)
        return Compressed(shared, partial(bound.read, shared), x, version)

    def _serves(self, copy: Copy, save: Save, compressor: Compressor, *, derive: bool) -> bool:
        """Whether the source's payload, or a new one, is no larger than the copy's own."""
        dtype = copy.witness.dtype
        if copy.witness._version != copy.version or copy.key is None:
            return False
        if copy.find() is not None and dtype.itemsize <= save.tensor.dtype.itemsize:
            return True
        memory = self._known.get((copy.storage, copy.key, dtype))
        if memory is None:
            return False
        made = memory.payload(compressor, copy.version) is not None
        return made or (derive and memory.output[0] == copy.version)

    def _share_source(
        self,
        save: Save,
        copy: Copy,
        compressor: Compressor,
        key: Callable[[Site], Key],
        *,
        derive: bool,
    ) -> tuple[Compressed | None, int, str, str]:
        """As `share`, by the payload of the copy's source."""
        given = copy.find()
        x, node = (copy.witness, None) if given is None else (given.detach(), given.grad_fn)
        own = copy.storage, copy.layout, copy.key
        source = Save(x, *own, save.site, copy.witness, node=node)
        handle, planned, note, op = self.share(source, compressor, key, derive=derive)
        if handle is not None:
            content = partial(_copied, copy.again, handle.content, save.layout)
            handle = Compressed(handle.shared, content, save.witness, save.witness._version)
        return handle, planned, note, op

    def source_of(self, x: Tensor) -> Source | None:
        """Gives the elements of `x` as they are now from a payload, if there is one."""
        memory = self._known.get((storage_id(x), memory_of(x)[1], x.dtype))
        if memory is None:
            return None
        shared = memory.latest(x._version)
        if shared is not None and not isinstance(shared.compressor, LogGroup):  # which cuts
            return shared.tensor
        then, source, _, number = memory.output
        return source if then == x._version and leads_to(x.grad_fn, number) else None

    def derive(self, y: Tensor, storage: int, key: Memory | None, source: Source, op: str) -> None:
        """Let saves of an op's output hold `source` in place of a payload of their own.

        Args:
            y: The output, just made; its elements do not overlap.
            storage: Its storage's id.
            key: See `memory_of`.
            source: Computes it again, in the same memory order, from payloads that are kept.
            op: The op's name, for the records.
        """
        self._memory(y, storage, key).output = y._version, source, op, node_number(y)

    def copied(self, y: Tensor, copy: Copy) -> None:
        """Let saves of `y`, just made, hold what its source comes from."""
        memory = self._memory(y, storage_id(y), memory_of(y)[1])
        memory.copy = y._version, copy, node_number(y)

    def derive_weight(self, x: Tensor, source: Source) -> None:
        """Let saves of `x`, a rounded weight, hold the rounding of its parameter."""
        storage = StorageWeakRef(x.untyped_storage())
        self.weights[storage_id(x)] = (storage, x._version, source, x.numel())


def derived(save: Save, source: Source) -> Compressed:
    """The handle of a save that `source` computes again, in the memory order that it had."""
    content = partial(_seen_as, source, save.layout)
    return Compressed(None, content, save.witness, save.witness._version)


def _copied(again: Again, content: Callable[[], Tensor], layout: Layout) -> Tensor:
    """The copy of what its source's content gives."""
    x = again(content())  # its rows may be padded
    return x if layout_of(x) == layout else restore(flatten(x)[0], layout)


def _seen_as(source: Source, layout: Layout) -> Tensor:
    x = source()
    return restore(x if x.is_contiguous() else flatten(x)[0], layout)
