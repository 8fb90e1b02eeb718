"""Derived outputs: a norm's output that another op saves, recomputed from the norm's own payload.

The output is linear in that payload, so that it stays unbiased. It is recomputed only if nothing
can have written to the output since: views and casts alone lie between the norm's node and the
saved tensor, the version is what it was, and the memory was never exposed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memtrain.activations.saved.flatten import Layout, Memory, flatten, memory_of, restore
from memtrain.activations.saved.function_payloads import decompress, saved_payloads
from memtrain.activations.saved.known_ops import CASTS, VIEWS
from memtrain.activations.saved.node_tensors import flows_into
from memtrain.activations.saved.origin import foreign, storage_id
from memtrain.activations.saved.store import Store, check_version, without_elements

_STEPS = 6


class _Output(NamedTuple):
    """A norm's output, just made."""

    node: Any
    op: str
    counter: Tensor  # of the output's version
    version: int
    storage: int
    memory: Memory
    dtype: torch.dtype


class Derived:
    """Takes the place of a saved tensor that is a norm's output, perhaps cast.

    Args:
        x: The saved tensor.
        layout: Its layout.
        content: Computes the norm's output.
        nbytes: Bytes of the copies of the norm's weight and bias.
        op: The norm.
    """

    __slots__ = (
        "__weakref__",
        "_content",
        "_counter",
        "_dtype",
        "_layout",
        "_version",
        "nbytes",
        "op",
    )

    def __init__(
        self, x: Tensor, layout: Layout, content: Callable[[], Tensor], nbytes: int, op: str
    ) -> None:
        self._counter, self._version = without_elements(x), x._version
        self._dtype, self._layout, self._content = x.dtype, layout, content
        self.nbytes, self.op = nbytes, op

    def unpack(self) -> Tensor:
        """Return the output for the backward."""
        check_version(self._counter, self._version)
        with torch.no_grad():
            y = self._content().to(self._dtype)
            return restore(y if y.is_contiguous() else flatten(y)[0], self._layout)


class DerivedOutputs:
    """The outputs of one forward's norms.

    Args:
        store: Knows whose memory was exposed.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._outputs: dict[int, _Output] = {}
        self._contents: dict[int, tuple[Callable[[], Tensor], int]] = {}

    def add(self, y: Tensor, op: str) -> None:
        """Note the output of an op that has just run, if its node can recompute it.

        Args:
            y: The output.
            op: The op's name in sites.
        """
        node: Any = y.grad_fn
        if not hasattr(node, "output") or foreign(y):
            return
        layout, memory = memory_of(y)
        if memory is None or node.payloads[0][-1] != layout:
            return
        number = storage_id(y)
        self._store.of(y, number)  # so that no other storage takes its number
        self._outputs[node._sequence_nr()] = _Output(
            node, op, without_elements(y), y._version, number, memory, y.dtype
        )

    def find(self, x: Tensor, node: Any) -> Derived | None:
        """Return what takes the place of a saved tensor, if it is a norm's untouched output.

        Args:
            x: The saved tensor.
            node: Saves it.
        """
        if not self._outputs or x.grad_fn is None:
            return None
        output, was_cast = self._output_of(x.grad_fn)
        if output is None or output.counter._version != output.version:
            return None
        if flows_into(node, x.grad_fn, {output.node._sequence_nr()}):
            return None
        layout, memory = memory_of(x)
        number = storage_id(x)
        storage, own = self._store.get(number), self._store.get(output.storage)
        if own is None or own.epoch or own.is_kept or (storage is not None and storage.epoch):
            return None
        if was_cast:
            whole = memory == (0, output.memory[1]) and output.memory[0] == 0
            if not whole or x._version or x.dtype == output.dtype:
                return None
        elif number != output.storage or memory != output.memory or x.dtype != output.dtype:
            return None
        content, nbytes, is_new = self._content(output)
        return Derived(x, layout, content, nbytes if is_new else 0, output.op)

    def _output_of(self, node: Any) -> tuple[_Output | None, bool]:
        """The output that a node is a view or a cast of, and whether there is a cast."""
        was_cast = False
        for _ in range(_STEPS):
            found = self._outputs.get(node._sequence_nr())
            if found is not None:
                return found, was_cast
            kind = type(node)
            if kind in CASTS:
                was_cast = True
            elif kind not in VIEWS:
                return None, False
            node = node.next_functions[0][0]
            if node is None:
                return None, False
        return None, False

    def _content(self, output: _Output) -> tuple[Callable[[], Tensor], int, bool]:
        """A function that recomputes an output, the bytes that it keeps, and whether it is new.

        It copies the norm's weight and bias: they may change before it is called, and an update
        through `.data` has no version.
        """
        number = output.node._sequence_nr()
        known = self._contents.get(number)
        if known is not None:
            return *known, False
        node = output.node
        (payload,), (statistics, *weights) = saved_payloads(node)
        copies = [None if t is None else t.detach().clone() for t in weights]
        content = partial(_recompute, node.output, payload, node.compressor, [statistics, *copies])
        nbytes = sum(t.nbytes for t in copies if t is not None)
        self._contents[number] = content, nbytes
        return content, nbytes, True


def _recompute(
    output: Callable[..., Tensor],
    payload: Any,
    compressor: Any,
    others: list[Any],
) -> Tensor:
    return output(decompress(payload, compressor), *others)
