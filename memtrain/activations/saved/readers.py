"""Defer the compression of softmax and exp results until all ops that read them are known."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from memtrain.activations.saved.known_ops import MULTIPLIES, SAME_VALUES, VIEWS, sums_few
from memtrain.activations.saved.origin import storage_id
from memtrain.activations.saved.store import Geometry, Storage


class _Result:
    """A result of which its op saves the values, or the factor if it is a square."""

    def __init__(
        self, x: Tensor, storage: Storage, readers: frozenset[type], save: Callable[[bool], None]
    ) -> None:
        self.readers, self.number = readers, storage_id(x)
        self.copies: list[StorageWeakRef] = []
        """Memory of other tensors with its elements, which ops may read when it is gone itself."""
        self._storage = storage
        self._geometry: Geometry = (x.shape, x.stride(), x.storage_offset())
        self._kind = {"dtype": x.dtype, "device": x.device}  # a fake storage is on meta
        self._save: Callable[[bool], None] | None = save

    @property
    def is_saved(self) -> bool:
        """Whether the result is compressed or kept already."""
        return self._save is None

    @property
    def has_copies(self) -> bool:
        """Whether a copy of its elements is alive."""
        return not all(copy.expired() for copy in self.copies)

    @property
    def is_held(self) -> bool:
        """Whether it, or a copy of its elements, is alive."""
        return self.has_copies or not self._storage.reference.expired()

    def add(self, save: Callable[[bool], None]) -> None:
        """Save another tensor of the op, too: the second factor of a square."""
        first = self._save

        def both(compress: bool) -> None:
            if first is not None:
                first(compress)
            save(compress)

        self._save = both

    def save(self, *, compress: bool) -> None:
        """Save the result, if that was not done; undo a compression by a kept tensor."""
        save, self._save = self._save, None
        if save is not None:
            save(compress and not self._storage.is_kept)
        elif not compress and not self._storage.is_kept:
            storages: Any = torch.UntypedStorage
            memory = storages._new_with_weak_ptr(self._storage.reference.cdata)
            if memory is not None:
                x = torch.empty(0, **self._kind)
                size, stride, offset = self._geometry
                self._storage.keep(x.set_(memory, offset, size, stride))


class Readers:
    """Results that wait for the ops that read them, by the nodes of a forward.

    A result is compressed when an op that allows it has read it and no copy of its elements (by a
    dropout or a cast) is alive. If a later op reads the result
    and is not listed, the result is kept after all. A later copy has the same effect, and so has a
    result or copy that is alive when the forward ends.
    """

    def __init__(self) -> None:
        self.results: dict[int, _Result] = {}
        """Results, by the numbers of the nodes that give them or a copy of their elements."""
        self._allowed: list[_Result] = []

    def add(
        self,
        node: Any,
        x: Tensor,
        storage: Storage,
        readers: frozenset[type],
        save: Callable[[bool], None],
    ) -> None:
        """Let a result wait.

        Args:
            node: Of the op.
            x: The tensor that the op saves.
            storage: Of the tensor.
            readers: Nodes of the ops that may read a compressed result.
            save: Compresses the result, or keeps it.
        """
        number = node._sequence_nr()
        if number in self.results:
            self.results[number].add(save)
        else:
            self.results[number] = _Result(x, storage, readers, save)

    def visit(self, node: Any, *, copies: bool = False) -> None:
        """See what a node reads.

        Args:
            node: Made after those that it reads.
            copies: Whether its output has its input's elements, times one number, or 0.
        """
        kind = type(node)
        for above, _ in node.next_functions:
            found = None if above is None else self.results.get(above._sequence_nr())
            if found is None:
                continue
            if kind in VIEWS or (
                (copies or kind in SAME_VALUES or _scales(node)) and not found.is_saved
            ):
                self.results[node._sequence_nr()] = found
            elif kind not in found.readers or sums_few(node):
                found.save(compress=False)
            elif found.has_copies:
                self._allowed.append(found)
            else:
                found.save(compress=True)

    def seen(self, results: Sequence[Any]) -> None:
        """End the visits of an op's nodes.

        Args:
            results: Of the op.
        """
        for x in results:
            if isinstance(x, Tensor) and x.grad_fn is not None:
                found, number = self.results.get(x.grad_fn._sequence_nr()), storage_id(x)
                if found is not None and number >= 0 and number != found.number:
                    found.copies.append(StorageWeakRef(x.untyped_storage()))
        for found in self._allowed:
            if not found.has_copies:
                found.save(compress=True)
        self._allowed = [found for found in self._allowed if not found.is_saved]

    def end(self) -> None:
        """End the forward: compress the results that allowed ops have read, and that are gone.

        A result that is alive, as one that a model stores in an attribute, may be read later.
        """
        for found in self._allowed:
            found.save(compress=not found.is_held)
        for found in self.results.values():
            if not found.is_saved or found.is_held:
                found.save(compress=False)
        self.results, self._allowed = {}, []

    def keep_all(self) -> None:
        """Keep the results so far: ops that were not visited may have read them."""
        for found in self.results.values():
            found.save(compress=False)


def _scales(node: Any) -> bool:
    """Whether a node multiplies by a constant: a mask, or torch's own dropout."""
    return type(node) in MULTIPLIES and any(above is None for above, _ in node.next_functions)
