"""Defer the compression of a result until all ops that read the result are known."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from memtrain.activations.saved.averages import AVERAGES, FEW, elements_read
from memtrain.activations.saved.known_ops import (
    DERIVATIVE,
    FACTOR_READERS,
    KNOWN,
    MULTIPLIES,
    NORMS,
    PRODUCTS,
    SAME_VALUES,
    SQUARE_READERS,
    VIEWS,
    KnownOp,
    node_classes,
)
from memtrain.activations.saved.origin import is_parameter, storage_id
from memtrain.activations.saved.store import Geometry, Storage

_CARRIES = (
    SAME_VALUES
    | MULTIPLIES
    | node_classes(
        *("AddBackward0", "SubBackward0", "RsubBackward0", "RsubBackward1", "NegBackward0"),
        *("AmaxBackward0", "AminBackward0", "CatBackward0", "ConstantPadNdBackward0"),
        *("CopyBackwards", "CopySlices", "CumsumBackward0", "ExpBackward0", "FlipBackward0"),
        *("GatherBackward0", "IndexAddBackward0", "IndexBackward0", "IndexCopyBackward0"),
        *("IndexPutBackward0", "IndexSelectBackward0", "MaxBackward0", "MaximumBackward0"),
        *("MinBackward0", "MinimumBackward0", "RepeatBackward0", "RollBackward0"),
        *("ScatterAddBackward0",),
        *("SplitBackward0", "SplitWithSizesBackward0", "StackBackward0", "TrilBackward0"),
        *("TriuBackward0", "UnbindBackward0"),
    )
    | {node for node, row in KNOWN.items() if row.tensors[0].reason == DERIVATIVE}
)
"""Nodes whose output has the elements of an input, times or plus something else, or a function of
them."""
_QUOTIENTS = node_classes("DivBackward0")
"""Nodes that carry their first input in the same way."""
_POWERS = node_classes("PowBackward0")
"""Nodes that carry it if the exponent is 2."""
_EXPONENTIALS = node_classes("ExpBackward0")
"""Nodes that carry no square."""
_SQUARING = _POWERS | MULTIPLIES


class _Result:
    """A result of which its op saves the values, or a factor."""

    def __init__(
        self,
        node: int,
        x: Tensor,
        storage: Storage,
        readers: frozenset[type],
        save: Callable[[bool], None],
        *,
        is_factor: bool,
    ) -> None:
        self.readers, self.number = readers, storage_id(x)
        self._node, self.is_factor, self.is_square = node, is_factor, False
        self.copies: set[StorageWeakRef] = set()
        """Memory of other tensors with its elements, which ops may read when it is gone itself."""
        self._storage = storage
        self._geometry: Geometry = (x.shape, x.stride(), x.storage_offset())
        self._kind = {"dtype": x.dtype, "device": x.device}  # a fake storage is on meta
        self._save: Callable[[bool], None] | None = save

    @property
    def is_saved(self) -> bool:
        """Return whether the result is compressed or kept already."""
        return self._save is None

    def is_copy(self, node: Any) -> bool:
        """Whether the output of a node that carries its elements has them as they are.

        Of a factor, sums and products may be alive to the end, as a residual stream is.
        """
        return not self.is_factor or type(node) in SAME_VALUES or node._sequence_nr() == self._node

    def square(self) -> None:
        """Restrict the readers of a factor to those of a square."""
        if self.is_factor:
            self.is_square, self.readers = True, self.readers & SQUARE_READERS

    @property
    def has_copies(self) -> bool:
        """Return whether a copy of its elements is alive."""
        self.copies = {copy for copy in self.copies if not copy.expired()}
        return bool(self.copies)

    @property
    def is_held(self) -> bool:
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

    def add(
        self,
        node: Any,
        x: Tensor,
        storage: Storage,
        readers: frozenset[type],
        save: Callable[[bool], None],
        *,
        is_factor: bool,
    ) -> None:
        """Let a result or a factor wait."""
        number = node._sequence_nr()
        found = _Result(number, x, storage, readers, save, is_factor=is_factor)
        if type(node) in _SQUARING and _squares(node):
            found.square()
        self.results.setdefault(number, {})[found] = None
        self._made.append(found)

    def visit(
        self,
        node: Any,
        *,
        carries: bool = False,
        kind: type | None = None,
        elements: Callable[[Any, int], int] = elements_read,
    ) -> None:
        """Note what a node reads.

        It `carries` its input's elements if its output has them, times one number, or 0. For an own
        op, `kind` is the node of torch's form, and `elements` replaces `elements_read`.
        """
        kind = kind or type(node)
        squares = kind in _SQUARING and _squares(node)
        carries = carries or squares or kind in _CARRIES
        for place, (above, _) in enumerate(node.next_functions):
            waiting = () if above is None else self.results.get(above._sequence_nr(), ())
            if not waiting:
                continue
            few = kind in AVERAGES and elements(node, place) < FEW
            reads = kind in FACTOR_READERS and not few and not _scales(node)
            carried = carries or (few and kind not in NORMS) or (kind in _QUOTIENTS and place == 0)
            for found in waiting:
                if reads and kind in found.readers:
                    if found.has_copies:
                        self._allowed[found] = None
                    else:
                        found.save(compress=True)
                elif found.is_square and kind in _EXPONENTIALS:
                    found.save(compress=False)
                elif kind in VIEWS or (carried and not found.is_saved):
                    self.results.setdefault(node._sequence_nr(), {})[found] = None
                    if squares:
                        found.square()
                elif not (carried and found.is_factor):
                    found.save(compress=False)

    def seen(self, results: Sequence[Any]) -> None:
        """End the visits of an op's nodes."""
        for x in results:
            if isinstance(x, Tensor) and x.grad_fn is not None:
                number = storage_id(x)
                for found in self.results.get(x.grad_fn._sequence_nr(), ()):
                    if number >= 0 and number != found.number and found.is_copy(x.grad_fn):
                        found.copies.add(StorageWeakRef(x.untyped_storage()))
        for found in self._allowed:
            if not found.has_copies:
                found.save(compress=True)
        self._allowed = {found: None for found in self._allowed if not found.is_saved}

    def end(self) -> None:
        """End the forward: compress the results that allowed ops have read, and that are gone.

        A result that is alive, as one that a model stores in an attribute, may be read later.
        """
        for found in self._allowed:
            found.save(compress=not found.is_held)
        for found in self._made:
            if not found.is_saved or found.is_held:
                found.save(compress=False)
        self.results, self._made, self._allowed = {}, [], {}

    def keep_all(self) -> None:
        """Keep the results so far: ops that were not visited may have read them."""
        for found in self._made:
            found.save(compress=False)


def _squares(node: Any) -> bool:
    """Return whether a node multiplies a tensor by itself."""
    kind = type(node)
    if kind in MULTIPLIES:
        (one, _), (other, _) = node.next_functions
        return one is not None and one is other
    return node._saved_exponent == 2


def _scales(node: Any) -> bool:
    """Whether a node multiplies by a constant: a mask, torch's own dropout, or one-hot vectors.

    A product with one-hot vectors selects elements, and a logarithm may read them then. A frozen
    weight is no such constant.
    """
    kind = type(node)
    if kind in MULTIPLIES:
        return any(above is None for above, _ in node.next_functions)
    if kind not in PRODUCTS:
        return False
    factors = list(KNOWN[kind].tensors)
    for saved, (above, _) in zip(reversed(factors), reversed(node.next_functions), strict=False):
        x = getattr(node, f"_saved_{saved.attribute}") if above is None else None
        if x is not None and not is_parameter(x):
            return True
    return False


def may_wait(row: KnownOp, kind: type, tensors: Mapping[str, Tensor], *, derives: bool) -> bool:
    """Return whether factors wait for what reads their product; if not, they are saved at once.

    The factors of a matrix product wait only if both are computed. With `derives`, the output of a
    product is recomputed from its factors, which then wait only if they are one tensor.
    """
    if kind in PRODUCTS:
        for saved in reversed(row.tensors):  # a weight mostly is the second
            x = tensors.get(saved.attribute)
            if x is None or (x if x._base is None else x._base).is_leaf or is_parameter(x):
                return False
        return True
    if derives and kind in MULTIPLIES:
        return tensors.get("self") is tensors.get("other")
    return True
