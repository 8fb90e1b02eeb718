"""Defer the compression of a result until all ops that read the result are known."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from memtrain.activations.saved.known_ops import (
    CARRIES,
    KNOWN,
    MULTIPLIES,
    PRODUCTS,
    RESHAPES_AND_COPIES,
    VIEWS,
    sums_few,
)
from memtrain.activations.saved.origin import is_parameter, storage_id
from memtrain.activations.saved.store import Geometry, Storage


class _Result:
    """A result of which its op saves the values, or one factor if it is a square."""

    def __init__(
        self, x: Tensor, storage: Storage, readers: frozenset[type], save: Callable[[bool], None]
    ) -> None:
        self.readers, self.number = readers, storage_id(x)
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

    @property
    def has_copies(self) -> bool:
        """Return whether a copy of its elements is alive."""
        self.copies = {copy for copy in self.copies if not copy.expired()}
        return bool(self.copies)

    @property
    def is_held(self) -> bool:
        """Return whether it, or a copy of its elements, is alive."""
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
    ) -> None:
        """Let a result wait."""
        number, found = node._sequence_nr(), _Result(x, storage, readers, save)
        self.results.setdefault(number, {})[found] = None
        self._made.append(found)

    def visit(self, node: Any, *, carries: bool = False, bounded: bool = False) -> None:
        """Note what a node reads.

        It `carries` its input's elements if its output has them, times one number, or 0. The
        gradient of what it reads is `bounded` as that of cross-entropy.
        """
        kind = type(node)
        carries = carries or kind in CARRIES
        for above, _ in node.next_functions:
            for found in () if above is None else self.results.get(above._sequence_nr(), ()):
                if bounded or (kind in found.readers and not sums_few(node) and not _scales(node)):
                    if found.has_copies:
                        self._allowed[found] = None
                    else:
                        found.save(compress=True)
                elif kind in VIEWS or (carries and not found.is_saved):
                    self.results.setdefault(node._sequence_nr(), {})[found] = None
                else:
                    found.save(compress=False)

    def seen(self, results: Sequence[Any]) -> None:
        """End the visits of an op's nodes."""
        for x in results:
            if isinstance(x, Tensor) and x.grad_fn is not None:
                number = storage_id(x)
                for found in self.results.get(x.grad_fn._sequence_nr(), ()):
                    if number >= 0 and number != found.number:
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


_STEPS = 6


def is_square(node: Any, factors: Mapping[str, Tensor]) -> bool:
    """Return whether a product saves two factors that are, or may be, equal."""
    if len(factors) < 2 or factors["self"] is factors["other"]:
        return len(factors) == 2
    one, other = node.next_functions
    if factors["self"].shape == factors["other"].shape:
        one, other = _source(*one), _source(*other)
    return one[1] == other[1] and _may_be_equal(one[0], other[0], _STEPS)


def _source(node: Any, index: int) -> tuple[Any, int]:
    """The node and the index of an output, of which an output is a copy or has another shape."""
    while type(node) in RESHAPES_AND_COPIES:
        node, index = node.next_functions[0]
    return node, index


def _may_be_equal(one: Any, other: Any, steps: int) -> bool:
    """Return whether two nodes are one, or apply equal ops to tensors that may be equal."""
    if one is other:
        return True
    above = () if one is None or type(one) is not type(other) else one.next_functions
    if not above or len(above) != len(other.next_functions):
        return False
    for (each, index), (same, same_index) in zip(above, other.next_functions, strict=True):
        if index != same_index or (steps and not _may_be_equal(each, same, steps - 1)):
            return False
    return _options(one) == _options(other)


def _options(node: Any) -> list[Any]:
    """What a node keeps besides tensors, such as the ends of a slice."""
    names = set(dir(node))
    saved = sorted(name for name in names if name.startswith("_saved_"))
    return [getattr(node, name) for name in saved if f"_raw{name}" not in names]


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
