"""Derived outputs: an op's output that another op saves, recomputed from payloads that are kept.

A norm's output is linear in the norm's own payload, so that it stays unbiased. Outputs of SiLU and
GELU, and with `derive_products` of products, are recomputed from the payloads that their node
saves: products are unbiased, as the payloads are independent; SiLU and GELU are not linear, and
their bias is the curvature times half the variance of the codes. An output is recomputed only if
nothing has written to it: views and casts alone lie between its node and the saved tensor, and the
storage still has the mark that `mark_unwritten` gave it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor

from memtrain.activations.saved.flatten import Layout, Memory, flatten, memory_of, restore
from memtrain.activations.saved.known_ops import CASTS, MULTIPLIES, VIEWS, node_classes
from memtrain.activations.saved.node_tensors import flows_into
from memtrain.activations.saved.origin import storage_id, unsupported
from memtrain.activations.saved.payload import decompress, saved_payloads
from memtrain.activations.saved.store import (
    Storage,
    check_version,
    is_unwritten,
    mark_unwritten,
    storage_of,
    without_elements,
)

_STEPS = 6
_WIDER = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}
"""The dtypes that have all values of a dtype."""

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
    source: Any  # the node whose output it is, or is a cast of


class Derived:
    """Packed object of an op's output, or of a cast of it: recomputes the output from a payload.

    `nbytes` are those of the copies of a norm's weight and bias.
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
    """

    def __init__(self, store: dict[int, Storage]) -> None:
        self._store = store
        self._outputs: dict[Any, _Output] = {}
        self._contents: dict[Any, Callable[[], Tensor]] = {}
        self._nbytes: dict[Any, int] = {}  # that the first use of a content adds
        self.parts: dict[Any, tuple[str, dict[str, Any]]] = {}
        self.arguments: Sequence[Any] = ()
        """Of the torch function that runs now, which may cast outputs."""
        self.first = 0
        """The number of the function's first node."""

    def end(self) -> None:
        """Remove the marks: `Tensor.record_stream` does nothing for a storage that has one."""
        for output in self._outputs.values():
            storage = self._store.get(output.storage)
            memory = None if storage is None else storage.memory()
            if memory is not None and type(output.counter) is not FakeTensor:
                memory.data_ptr()

    def add(self, y: Tensor, op: str) -> None:
        """Note the output of an op that has just run, if its node can recompute it."""
        node: Any = y.grad_fn
        if not hasattr(node, "output") or unsupported(y):
            return
        layout, memory = memory_of(y)
        if memory is not None and node.payloads[0][-1] == layout:
            self._note(y, op, memory, frozenset({node._sequence_nr()}), node)

    def part(self, node: Any, attribute: str, handle: Any, op: str) -> None:
        """Note what takes the place of a saved tensor of a node in `FORMULAS`."""
        self.parts.setdefault(node, (op, {}))[1][attribute] = handle

    def add_computed(self, y: Any) -> None:
        """Note the output of an op whose saved tensors have just been visited."""
        node: Any = y.grad_fn if isinstance(y, Tensor) else None
        if type(node) in CASTS and self._outputs:
            output, was_cast = self._output_of(y)
            if was_cast and self._is_cast(y, output):
                self._note(y, output.op, output.memory, output.nodes, output.source)
        op, parts = self.parts.pop(node, ("", {}))
        if not parts or unsupported(y):
            return
        names, formula = FORMULAS[type(node)]
        layout, memory = memory_of(y)
        if memory is None or not parts.keys() >= {*names}:
            return
        handles = [parts[name] for name in names]
        self._contents[node] = partial(_compute, formula(node), handles, layout)
        nodes = [handle.nodes for handle in handles if isinstance(handle, Derived)]
        self._note(y, op, memory, frozenset({node._sequence_nr()}.union(*nodes)), node)

    def add_dropped(self, y: Tensor, x: Tensor) -> None:
        """Note the output of memtrain's dropout, if its input can be recomputed."""
        node: Any = y.grad_fn
        if not hasattr(node, "mask") or unsupported(y):
            return
        (layout, memory), source = memory_of(y), self.find(x, node)
        if memory is None or source is None:
            return
        compute = partial(node.mask, node.saved_tensors[0])
        self._contents[node] = partial(_compute, compute, [source], layout)
        self._nbytes[node] = source.nbytes
        self._note(y, "dropout", memory, source.nodes, node)

    def _note(self, y: Any, op: str, memory: Memory, nodes: frozenset[int], source: Any) -> None:
        number = storage_id(y)
        storage_of(self._store, y, number)  # so that no other storage takes its number
        if mark_unwritten(y):
            self._outputs[y.grad_fn] = _Output(
                nodes, op, without_elements(y), y._version, number, memory, y.dtype, source
            )

    def find(self, x: Tensor, node: Any) -> Derived | None:
        """Return what takes the place of a saved tensor, if it is a known output, untouched."""
        if not self._outputs or x.grad_fn is None:
            return None
        output, was_cast = self._output_of(x)
        if output is None or flows_into(node, x.grad_fn, output.nodes):
            return None
        storage = self._store.get(output.storage)
        if storage is None or storage.epoch:  # fake tensors have no marks
            return None
        if not (self._is_cast(x, output) if was_cast else _is_view(x, output)):
            return None
        layout, source = memory_of(x)[0], output.source
        content = self._content(source)
        return Derived(x, layout, content, self._nbytes.pop(source, 0), output)

    def _output_of(self, x: Tensor) -> tuple[Any, bool]:
        """The known output that a tensor views or casts, or None, and whether it is a cast."""
        node: Any = x.grad_fn
        was_cast = False
        for _ in range(_STEPS):
            output = self._outputs.get(node)
            if output is not None:
                return output, was_cast
            if type(node) not in VIEWS and (was_cast or type(node) not in CASTS):
                break
            was_cast |= type(node) in CASTS
            node = node.next_functions[0][0]
        return None, False

    def _is_cast(self, x: Tensor, output: _Output) -> bool:
        """Return whether the function that runs now has made `x`, a cast of one of its arguments.

        Nothing else can have written to `x`, nor to the argument before the cast.
        """
        cast: Any = x.grad_fn
        while cast is not None and type(cast) not in CASTS:
            cast = cast.next_functions[0][0]
        if cast is None or cast._sequence_nr() < self.first or x._version:
            return False
        made = self._outputs[output.source].dtype
        if output.dtype not in (made, *_WIDER.get(made, ())):
            return False  # a cast of a rounded cast, which was rounded twice
        memory, number = memory_of(x)[1], storage_id(x)
        if memory is None or memory != output.memory or memory[0] or x.dtype == output.dtype:
            return False
        source, known = cast.next_functions[0][0], False
        for y in self.arguments:
            if isinstance(y, Tensor) and not unsupported(y):
                if storage_id(y) == number:
                    return False
                known |= y.grad_fn is source and _is_view(y, output)
        return known

    def _content(self, node: Any) -> Callable[[], Tensor]:
        """Return a function that recomputes the output of a node.

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


def _is_view(x: Tensor, output: _Output) -> bool:
    """Return whether a tensor has all elements of an output, to which nothing has written."""
    if storage_id(x) != output.storage or x.dtype != output.dtype or not is_unwritten(x):
        return False
    return output.counter._version == output.version and memory_of(x)[1] == output.memory


def _recompute(
    output: Callable[..., Tensor],
    payload: Any,
    compressor: Any,
    others: list[Any],
) -> Tensor:
    return output(decompress(payload, compressor), *others)


def _compute(compute: Callable[..., Tensor], handles: list[Any], layout: Layout) -> Tensor:
    return flatten(compute(*(handle.unpack() for handle in handles)), layout)[0]
