"""Derived outputs: an op's output that another op saves, recomputed from payloads that are kept.

A norm's output is linear in the norm's own payload, so that it stays unbiased. Outputs of SiLU and
GELU, and with `derive_products` of products, are recomputed from the payloads that their node
saves: products are unbiased, as the payloads are independent; SiLU and GELU are not linear, and
their bias is the curvature times half the variance of the codes. An output is recomputed only if
nothing can have written to it since: views and casts alone lie between its node and the saved
tensor, the version is what it was, and the memory was never exposed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memtrain.activations.saved.flatten import Layout, Memory, flatten, memory_of, restore
from memtrain.activations.saved.function_payloads import decompress, saved_payloads
from memtrain.activations.saved.known_ops import CASTS, MULTIPLIES, VIEWS, node_classes
from memtrain.activations.saved.node_tensors import flows_into
from memtrain.activations.saved.origin import foreign, storage_id
from memtrain.activations.saved.store import Store, check_version, without_elements

_STEPS = 6

Formula = tuple[tuple[str, ...], Callable[[Any], Callable[..., Tensor]]]
"""Attributes of the saved tensors that a node's output follows from; the node -> how it does."""


def _formulas() -> dict[type, Formula]:
    silu: Formula = ("self",), lambda node: F.silu
    gelu: Formula = ("self",), lambda node: partial(F.gelu, approximate=node._saved_approximate)
    product: Formula = ("self", "other"), lambda node: torch.mul
    by_name = {"SiluBackward0": silu, "GeluBackward0": gelu, "MulBackward0": product}
    return {node: formula for name, formula in by_name.items() for node in node_classes(name)}


FORMULAS = _formulas()
"""Class of a node -> how its output follows from what it saves."""
SMOOTH = {node: formula for node, formula in FORMULAS.items() if node not in MULTIPLIES}
"""Those of nonlinearities."""
FINE = 4
"""Bits per element from which the curvature of a nonlinearity makes little bias."""


class _Output(NamedTuple):
    """An output, just made."""

    nodes: frozenset[int]  # numbers of those whose payloads the output is recomputed from
    op: str
    counter: Tensor  # of the output's version
    version: int
    storage: int
    memory: Memory
    dtype: torch.dtype


class Derived:
    """Packed object of an op's output, or of a cast of it: recomputes the output from a payload.

    Args:
        x: The saved tensor.
        layout: Its layout.
        content: Computes the output.
        nbytes: Bytes of the copies of a norm's weight and bias.
        output: Of the op.
    """

    __slots__ = (
        "__weakref__",
        "_content",
        "_counter",
        "_dtype",
        "_layout",
        "_version",
        "nbytes",
        "nodes",
        "op",
    )

    def __init__(
        self, x: Tensor, layout: Layout, content: Callable[[], Tensor], nbytes: int, output: _Output
    ) -> None:
        self._counter, self._version = without_elements(x), x._version
        self._dtype, self._layout, self._content = x.dtype, layout, content
        self.nbytes, self.op, self.nodes = nbytes, output.op, output.nodes

    def unpack(self) -> Tensor:
        """Return the output for the backward."""
        check_version(self._counter, self._version)
        with torch.no_grad():
            y = self._content().to(self._dtype)
            return restore(y if y.is_contiguous() else flatten(y)[0], self._layout)


class DerivedOutputs:
    """The outputs of one forward that can be recomputed, by the node itself.

    Numbers of nodes do not identify them: each thread counts its own.

    Args:
        store: Knows whose memory was exposed.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._outputs: dict[Any, _Output] = {}
        self._contents: dict[Any, Callable[[], Tensor]] = {}
        self._nbytes: dict[Any, int] = {}  # that the first use of a content adds
        self.parts: dict[Any, tuple[str, dict[str, Any]]] = {}

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
        if memory is not None and node.payloads[0][-1] == layout:
            self._note(y, op, memory, frozenset({node._sequence_nr()}))

    def part(self, node: Any, attribute: str, handle: Any, op: str) -> None:
        """Note what takes the place of a saved tensor of a node in `FORMULAS`.

        Args:
            node: Saves the tensor.
            attribute: Under which.
            handle: Its `unpack()` returns the tensor.
            op: The op's name in sites.
        """
        self.parts.setdefault(node, (op, {}))[1][attribute] = handle

    def add_computed(self, y: Any) -> None:
        """Note the output of an op whose saved tensors have just been visited."""
        node: Any = y.grad_fn if isinstance(y, Tensor) else None
        op, parts = self.parts.pop(node, ("", {}))
        if not parts or foreign(y):
            return
        names, formula = FORMULAS[type(node)]
        layout, memory = memory_of(y)
        if memory is None or not parts.keys() >= {*names}:
            return
        handles = [parts[name] for name in names]
        self._contents[node] = partial(_compute, formula(node), handles, layout)
        nodes = [handle.nodes for handle in handles if isinstance(handle, Derived)]
        self._note(y, op, memory, frozenset({node._sequence_nr()}.union(*nodes)))

    def add_dropped(self, y: Tensor, x: Tensor) -> None:
        """Note the output of memtrain's dropout, if its input can be recomputed.

        Args:
            y: The output.
            x: The input.
        """
        node: Any = y.grad_fn
        if not hasattr(node, "mask") or foreign(y):
            return
        (layout, memory), source = memory_of(y), self.find(x, node)
        if memory is None or source is None:
            return
        compute = partial(node.mask, node.saved_tensors[0])
        self._contents[node] = partial(_compute, compute, [source], layout)
        self._nbytes[node] = source.nbytes
        self._note(y, "dropout", memory, source.nodes)

    def _note(self, y: Any, op: str, memory: Memory, nodes: frozenset[int]) -> None:
        number = storage_id(y)
        self._store.of(y, number)  # so that no other storage takes its number
        self._outputs[y.grad_fn] = _Output(
            nodes, op, without_elements(y), y._version, number, memory, y.dtype
        )

    def find(self, x: Tensor, node: Any) -> Derived | None:
        """Return what takes the place of a saved tensor, if it is a known output, untouched.

        Args:
            x: The saved tensor.
            node: Saves it.
        """
        if not self._outputs or x.grad_fn is None:
            return None
        source, was_cast = self._source_of(x.grad_fn)
        output = self._outputs.get(source)
        if output is None or output.counter._version != output.version:
            return None
        if flows_into(node, x.grad_fn, output.nodes):
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
        content = self._content(source)
        return Derived(x, layout, content, self._nbytes.pop(source, 0), output)

    def _source_of(self, node: Any) -> tuple[Any, bool]:
        """The node whose output a node views or casts, or None, and whether it is a cast."""
        was_cast = False
        for _ in range(_STEPS):
            if node is None or node in self._outputs:
                return node, was_cast
            if type(node) not in CASTS | VIEWS:
                break
            was_cast |= type(node) in CASTS
            node = node.next_functions[0][0]
        return None, False

    def _content(self, node: Any) -> Callable[[], Tensor]:
        """A function that recomputes the output of a node.

        It copies a norm's weight and bias: they may change before it is called, and an update
        through `.data` has no version.
        """
        known = self._contents.get(node)
        if known is not None:
            return known
        (payload,), (statistics, *weights) = saved_payloads(node)
        copies = [None if t is None else t.detach().clone() for t in weights]
        content = partial(_recompute, node.output, payload, node.compressor, [statistics, *copies])
        self._contents[node] = content
        self._nbytes[node] = sum([t.nbytes for t in copies if t is not None])
        return content


def _recompute(
    output: Callable[..., Tensor],
    payload: Any,
    compressor: Any,
    others: list[Any],
) -> Tensor:
    return output(decompress(payload, compressor), *others)


def _compute(compute: Callable[..., Tensor], handles: list[Any], layout: Layout) -> Tensor:
    return flatten(compute(*(handle.unpack() for handle in handles)), layout)[0]
