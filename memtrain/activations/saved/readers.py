"""Results of ops that are compressed only if every op that reads them is known to allow it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memtrain.activations.saved.known_ops import MULTIPLIES, SAME_VALUES
from memtrain.activations.saved.store import Geometry, Storage


class _Result:
    """A result that its own op saves."""

    def __init__(
        self, x: Tensor, storage: Storage, readers: frozenset[type], save: Callable[[bool], None]
    ) -> None:
        self.readers = readers
        self._storage = storage
        self._geometry: Geometry = (x.shape, x.stride(), x.storage_offset())
        self._dtype = x.dtype
        self._save: Callable[[bool], None] | None = save

    def decide(self, *, compress: bool) -> None:
        """Save the result, if that was not done; undo a compression by a kept tensor."""
        save, self._save = self._save, None
        if save is not None:
            save(compress and not self._storage.is_kept)
        elif not compress and not self._storage.is_kept:
            storages: Any = torch.UntypedStorage
            memory = storages._new_with_weak_ptr(self._storage.reference.cdata)
            if memory is not None:
                x = torch.empty(0, dtype=self._dtype, device=memory.device)
                size, stride, offset = self._geometry
                self._storage.keep(x.set_(memory, offset, size, stride))

    def end(self) -> None:
        """Keep the result, if no op has read it."""
        if self._save is not None:
            self.decide(compress=False)


class Readers:
    """Results that wait for the ops that read them, by the nodes of a forward.

    Whichever order the readers run in, one that is not known ends with the result kept, since it is
    alive until that op has run. (Behind a dropout, whose result is a copy, it may be gone: then a
    reader that comes after a matrix product finds it compressed.)
    """

    def __init__(self) -> None:
        self._results: dict[int, _Result] = {}

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
            x: The result.
            storage: Of the result.
            readers: Nodes of the ops that may read a compressed result.
            save: Compresses the result, or keeps it.
        """
        self._results[node._sequence_nr()] = _Result(x, storage, readers, save)

    def visit(self, node: Any, *, passes: bool = False) -> None:
        """See what a node reads.

        Args:
            node: Made after those that it reads.
            passes: Whether its output has its input's elements, times one number, or 0.
        """
        if not self._results:
            return
        kind = type(node)
        for above, _ in node.next_functions:
            found = None if above is None else self._results.get(above._sequence_nr())
            if found is None:
                continue
            if passes or kind in SAME_VALUES or _scales(node):
                self._results[node._sequence_nr()] = found
            else:
                found.decide(compress=kind in found.readers)

    def end(self) -> None:
        """Keep the results that nothing has read."""
        for found in self._results.values():
            found.end()
        self._results.clear()


def _scales(node: Any) -> bool:
    """Whether a node multiplies by a constant: a mask, or torch's own dropout."""
    return type(node) in MULTIPLIES and any(above is None for above, _ in node.next_functions)
