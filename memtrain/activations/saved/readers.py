"""Defer the compression of a result until all ops that read the result are known."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from memtrain.activations.saved.averages import AVERAGES, FEW, elements_read, is_averaged
from memtrain.activations.saved.known_ops import (
    CONVOLUTIONS,
    DERIVATIVE,
    ELEMENTWISE_READERS,
    FACTOR_READERS,
    KNOWN,
    MULTIPLIES,
    NORMS,
    POWERS,
    PRODUCTS,
    RMS_NORM,
    SAME_VALUES,
    VIEWS,
    KnownOp,
    SavedBy,
    class_of,
    node_classes,
)
from memtrain.activations.saved.node_tensors import tensors_of
from memtrain.activations.saved.origin import is_parameter, storage_id
from memtrain.activations.saved.records import Records
from memtrain.activations.saved.store import Geometry, Storage

_CARRIES_PRODUCTS = (
    SAME_VALUES
    | MULTIPLIES
    | node_classes(
        *("AddBackward0", "SubBackward0", "RsubBackward0", "RsubBackward1", "NegBackward0"),
        *("CatBackward0", "ConstantPadNdBackward0", "CopyBackwards", "CopySlices"),
        *("CumsumBackward0", "FlipBackward0", "IndexAddBackward0", "IndexBackward0"),
        *("IndexCopyBackward0", "IndexPutBackward0", "IndexSelectBackward0", "RepeatBackward0"),
        *("RollBackward0", "ScatterAddBackward0", "SplitBackward0", "SplitWithSizesBackward0"),
        *("StackBackward0", "TrilBackward0", "TriuBackward0", "UnbindBackward0"),
        *("Col2ImBackward0", "Im2ColBackward0", "PixelShuffleBackward0", "UnfoldBackward0"),
        *(f"{kind}Pad{n}DBackward0" for kind in ("Reflection", "Replication") for n in (1, 2, 3)),
        *(f"UpsampleNearest{exact}{n}DBackward0" for exact in ("", "Exact") for n in (1, 2, 3)),
        *("UpsampleBicubic2DAaBackward0", "UpsampleBicubic2DBackward0"),
        *("UpsampleBilinear2DAaBackward0", "UpsampleBilinear2DBackward0"),
        *("UpsampleLinear1DBackward0", "UpsampleTrilinear3DBackward0"),
    )
)
"""Nodes whose output has the elements of an input, times or plus something else."""
_CARRIES = (
    _CARRIES_PRODUCTS
    | node_classes(
        *("AdaptiveMaxPool2DBackward0", "AdaptiveMaxPool3DBackward0", "AmaxBackward0"),
        *("AminBackward0", "ExpBackward0", "GatherBackward0", "MaxBackward0"),
        *("MaxPool2DWithIndicesBackward0", "MaxPool3DWithIndicesBackward0", "MaximumBackward0"),
        *("MinBackward0", "MinimumBackward0"),
    )
    | {node for node, row in KNOWN.items() if row.tensors[0].reason == DERIVATIVE}
)
"""These, and nodes whose output has functions of the elements, or those that a comparison chose.
Their gradient may be largest where a product of two tensors is smallest: at the nearest point."""
_QUOTIENTS = node_classes("DivBackward0")
"""Nodes that carry their first input in the same way, as RMS norms do."""
_CHOICES = {
    node: attribute
    for attribute, names in {
        "condition": ("WhereBackward0",),
        "mask": ("MaskedFillBackward0",),
        "index": ("IndexAddBackward0", "IndexCopyBackward0", "IndexSelectBackward0"),
        "indices": ("IndexBackward0", "IndexPutBackward0"),
    }.items()
    for node in node_classes(*names)
}
"""Nodes that carry chosen elements, and the attribute of what chooses."""


class _Result:
    """A result of which its op saves the values, or a factor."""

    def __init__(
        self, node: Any, saved: SavedBy, x: Tensor, storage: Storage, save: Callable[[bool], None]
    ) -> None:
        averaged = type(node) in MULTIPLIES and is_averaged(node, saved.attribute)
        self.readers = FACTOR_READERS if averaged else saved.readers or frozenset()
        self.number, self._node = storage_id(x), node._sequence_nr()
        self.is_factor = saved.attribute != "result"
        self._is_elementwise = self.readers is ELEMENTWISE_READERS
        self.copies: list[weakref.ref[Tensor]] = []
        """Other tensors with its elements, which ops may read when it is gone itself."""
        self._storage = storage
        self._geometry: Geometry = (x.shape, x.stride(), x.storage_offset())
        self._kind = {"dtype": x.dtype, "device": x.device}  # a fake storage is on meta
        self._save: Callable[[bool], None] | None = save

    @property
    def is_saved(self) -> bool:
        """Return whether the result is compressed or kept already."""
        return self._save is None

    @property
    def is_done(self) -> bool:
        """Return whether it is saved for good: kept, or compressed and gone."""
        return self.is_saved and (self._storage.is_kept or self._storage.reference.expired())

    def is_copy(self, node: Any) -> bool:
        """Whether the output of a node that carries its elements has them as they are.

        Of a factor, sums and products may be alive to the end, as a residual stream is.
        """
        return not self.is_factor or type(node) in SAME_VALUES or node._sequence_nr() == self._node

    def follows(self, node: Any, kind: type) -> bool:
        """Whether the output of a node has its elements in the way in which it is followed."""
        if self._is_elementwise:
            return kind in _CARRIES_PRODUCTS and not _chooses(node, kind)
        return kind in _CARRIES

    @property
    def has_copies(self) -> bool:
        """Return whether a copy of its elements is alive."""
        while self.copies and self.copies[-1]() is None:  # the latest mostly ends last
            self.copies.pop()
        return bool(self.copies)

    @property
    def is_alive(self) -> bool:
        """Return whether it, or a copy of its elements, is alive."""
        if self.is_factor:  # only the product shows what the factor is
            return self.has_copies
        return self.has_copies or not self._storage.reference.expired()

    def save(self, *, compress: bool) -> None:
        """Save the result, if that was not done; undo a compression by a kept tensor."""
        save, self._save = self._save, None
        if save is not None:
            save(compress and not self._storage.is_kept)
        elif not compress and not self._storage.is_kept:
            memory = self._storage.memory()
            if memory is not None:
                x = torch.empty(0, **self._kind)
                size, stride, offset = self._geometry
                self._storage.keep(x.set_(memory, offset, size, stride))


class Readers:
    """Results that wait for the ops that read them, by the nodes of a forward.

    Other tensors may have its elements: casts, products and sums with something else. The result is
    compressed when an op that allows it has read it or one of them, and none of them is alive. If
    a later op reads the result and is not listed, the result is kept after all. The same holds if
    it, or one of them, is alive when the forward ends.
    """

    def __init__(self) -> None:
        self.results: dict[int, dict[_Result, None]] = {}
        """Results, by the numbers of the nodes that give them or carry their elements."""
        self._made: list[_Result] = []
        self._allowed: dict[_Result, None] = {}
        self._open: set[_Result] = set()
        """Those of which a later op may still change what is saved."""

    def add(
        self,
        node: Any,
        saved: SavedBy,
        x: Tensor,
        storage: Storage,
        save: Callable[[bool], None],
        records: Records | None,
    ) -> None:
        """Let a result or a factor wait."""
        save = save if records is None else records.here(save)
        found = _Result(node, saved, x, storage, save)
        self.results.setdefault(node._sequence_nr(), {})[found] = None
        self._made.append(found)
        self._open.add(found)

    def visit(
        self,
        node: Any,
        elements: Callable[[Any, int], int] = elements_read,
    ) -> None:
        """Note what a node reads.

        For memtrain's form of an op, `elements` replaces `elements_read`.
        """
        for position, (above, _) in enumerate(node.next_functions):
            waiting = () if above is None else self.results.get(above._sequence_nr(), ())
            if not waiting:
                continue
            kind = class_of(node)
            squares = kind in POWERS and node._saved_exponent == 2
            few = kind in AVERAGES and elements(node, position) < FEW
            reads = kind in FACTOR_READERS and not few and not _scales(node)
            if kind in NORMS:
                carries = kind is RMS_NORM and position == 0 and not few
            else:
                carries = squares or few or (kind in _QUOTIENTS and position == 0)
            for found in waiting:
                if reads and kind in found.readers:
                    if found.has_copies:
                        self._allowed[found] = None
                    else:
                        self._save(found, compress=True)
                    continue
                follows = carries or found.follows(node, kind)
                if kind in VIEWS or (follows and not found.is_saved):
                    self.results.setdefault(node._sequence_nr(), {})[found] = None
                elif not (follows and found.is_factor):
                    self._save(found, compress=False)

    def seen(self, results: Sequence[Any]) -> None:
        """End the visits of an op's nodes."""
        for x in results:
            if isinstance(x, Tensor) and x.grad_fn is not None:
                for found in self.results.get(x.grad_fn._sequence_nr(), ()):
                    number = storage_id(x)
                    if number >= 0 and number != found.number and found.is_copy(x.grad_fn):
                        found.copies.append(weakref.ref(x))
        for found in [*self._allowed]:
            if not found.has_copies:
                self._save(found, compress=True)
        if self._made and not self._open:
            self.results, self._made = {}, []

    def end(self) -> None:
        """End the forward: compress the results that allowed ops have read, and that are gone.

        A result that is alive, as one that a model returns, may be read later.
        """
        for found in self._allowed:
            found.save(compress=not found.is_alive)
        for found in self._made:
            if not found.is_saved or found.is_alive:
                found.save(compress=False)

    def waits(self, x: Tensor) -> bool:
        """Return whether a result waits that has the tensor's elements."""
        return x.grad_fn is not None and x.grad_fn._sequence_nr() in self.results

    def _save(self, found: _Result, *, compress: bool) -> None:
        found.save(compress=compress)
        self._allowed.pop(found, None)
        if found.is_done:
            self._open.discard(found)

    def keep_all(self) -> None:
        """Keep the results so far: ops that were not visited may have read them."""
        for found in self._made:
            self._save(found, compress=False)


def _chooses(node: Any, kind: type) -> bool:
    """Whether a node chooses elements one by one, as a mask or a constant of their shape does."""
    names = (_CHOICES[kind],) if kind in _CHOICES else ()
    if kind in MULTIPLIES:
        factors = zip(("self", "other"), node.next_functions, strict=True)
        names = [name for name, (above, _) in factors if above is None]
    entries = [x.numel() for _, x in tensors_of(node, names)]
    return FEW * max(entries, default=0) > prod(node._input_metadata[0].shape)


def _scales(node: Any) -> bool:
    """Whether a node multiplies by a constant matrix, such as one-hot vectors.

    They select elements, and a logarithm may read them then. A frozen weight is no such constant.
    """
    kind = type(node)
    if kind in CONVOLUTIONS:
        return node.next_functions[1][0] is None and not is_parameter(node._saved_weight)
    if kind not in PRODUCTS:
        return False
    factors = list(KNOWN[kind].tensors)
    for saved, (above, _) in zip(reversed(factors), reversed(node.next_functions), strict=False):
        x = getattr(node, f"_saved_{saved.attribute}") if above is None else None
        if x is not None and not is_parameter(x):
            return True
    return False


def may_wait(row: KnownOp, kind: type, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether factors wait for what reads their product; if not, they are saved at once.

    The factors of a matrix product wait only if both are computed.
    """
    for saved in reversed(row.tensors if kind in PRODUCTS else ()):  # a weight mostly is the second
        x = tensors.get(saved.attribute)
        if x is None or (x if x._base is None else x._base).is_leaf or is_parameter(x):
            return False
    return True
