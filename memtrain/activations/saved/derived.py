"""Derived outputs: an op's output that another op saves, recomputed from payloads that are kept.

A norm's output is linear in the norm's own payload, so that it stays unbiased. Outputs of SiLU and
GELU, and with `derive_products` of products, adapters and attention, are recomputed from what their
node saves: products are unbiased, as the payloads are independent; SiLU and GELU are not linear,
and their bias is the curvature times half the variance of the codes. An output is recomputed only
if nothing has written to it: views and casts alone lie between its node and the saved tensor, and
the storage still has the mark that `mark_unwritten` gave it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor

from memtrain.activations.saved.attention import FusedAttention
from memtrain.activations.saved.flatten import Layout, Memory, flatten, memory_of, restore
from memtrain.activations.saved.handles import Kept
from memtrain.activations.saved.known_ops import CASTS, VIEWS, node_classes
from memtrain.activations.saved.node_tensors import flows_into, tensors_of
from memtrain.activations.saved.origin import is_parameter, storage_id, unsupported
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

Formula = Callable[[Any], Callable[..., Tensor]]
"""A node -> the function that gives its output from the tensors that it saves."""

(_SILU,), (_GELU,), (_MUL,), (_MM,) = (
    node_classes(f"{name}Backward0") for name in ("Silu", "Gelu", "Mul", "Mm")
)
NONLINEAR: dict[type, Formula] = {
    _SILU: lambda node: F.silu,
    _GELU: lambda node: partial(F.gelu, approximate=node._saved_approximate),
}
"""Class of a nonlinearity's node -> how its output follows from what it saves."""
FORMULAS = {**NONLINEAR, _MUL: lambda node: torch.mul, _MM: lambda node: torch.mm}
"""Those of products, too. Fused attention recomputes its result itself."""
LOW_RANK = 64
"""Rank of an adapter's weight up to which the product with the weight is recomputed."""
FINE = 4
"""Bits per element from which the curvature of a nonlinearity makes little bias."""


class _Output(NamedTuple):
    """An output, just made."""

    op: str
    memory: Memory
    made: torch.dtype  # before casts
    source: Any  # the node whose output it is, or is a cast or a view of
    nodes: frozenset[int]  # numbers of those whose payloads the output is recomputed from
    counter: Any = None  # of the output's version
    version: int = 0
    storage: int = 0
    dtype: torch.dtype | None = None


class Derived:
    """Packed object of an op's output, or of a cast of it: recomputes the output from a payload.

    `nbytes` are those of the copies of a norm's weight and bias.
    """

    __slots__ = (
        *("__weakref__", "_content", "_counter", "_dtype", "_layout", "_version"),
        *("nbytes", "nodes", "op", "source"),
    )

    def __init__(
        self, x: Tensor, layout: Layout, content: Callable[[], Tensor], output: _Output
    ) -> None:
        self._counter, self._version = without_elements(x), x._version
        self._dtype, self._layout, self._content = x.dtype, layout, content
        self.nbytes, self.op, self.nodes, self.source = 0, output.op, output.nodes, output.source

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
        self._products: dict[Any, Layout] = {}  # with weights
        self._parts: dict[Any, dict[str, Any]] = {}  # that a content is computed from
        self.nbytes: dict[Any, int] = {}
        """Bytes that the first use of a node's output adds."""
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
            self._note(y, _Output(op, memory, y.dtype, node, frozenset({node._sequence_nr()})))

    def part(self, node: Any, attribute: str, handle: Any, op: str) -> dict[str, Any]:
        """Note what takes the place of a saved tensor of a node in `FORMULAS`.

        Returns the parts of the node. A part may be replaced until the backward reads it.
        """
        parts = self.parts.setdefault(node, (op, {}))[1]
        parts[attribute] = handle
        return parts

    def add_computed(self, y: Any) -> None:
        """Note the output of an op whose saved tensors have just been visited."""
        node: Any = y.grad_fn if isinstance(y, Tensor) else None
        if type(node) in CASTS and self._outputs:
            output, was_cast = self._output_of(y)
            if was_cast and self._is_cast(y, output):
                self._note(y, output)
        while type(node) in VIEWS:  # of a matrix product, as `linear` makes it
            node = node.next_functions[0][0]
        op, parts = self.parts.pop(node, ("", {}))
        if not parts or unsupported(y) or y.output_nr:
            return
        layout, memory = memory_of(y)
        kind = type(node)
        if memory is None or len(parts) != 1 + (kind is _MUL) or _share_memory(parts.values()):
            return
        if kind is _MM and _is_low_rank(node, y):
            self._products[node] = layout
        elif kind is not _MM and node is y.grad_fn:
            formula = FORMULAS.get(kind, lambda node: torch.detach)
            self._contents[node] = partial(_compute, formula(node), parts, layout)
        else:
            return
        self._parts[node] = parts
        self._note(y, _Output(op, memory, y.dtype, node, frozenset({node._sequence_nr()})))

    def add_dropped(self, y: Tensor, x: Tensor) -> None:
        """Note the output of memtrain's dropout, if its input can be recomputed."""
        node: Any = y.grad_fn
        if not hasattr(node, "mask") or unsupported(y):
            return
        (layout, memory), source = memory_of(y), self.find(x, node)
        if memory is None or source is None:
            return
        compute = partial(node.mask, node.saved_tensors[0])
        self._contents[node] = partial(_compute, compute, {"": source}, layout)
        self.nbytes[node] = self.nbytes.pop(source.source, 0)
        self._note(y, _Output("dropout", memory, y.dtype, node, source.nodes))

    def _note(self, y: Any, output: _Output) -> None:
        kind = {"version": y._version, "storage": storage_id(y), "dtype": y.dtype}
        storage_of(self._store, y, kind["storage"])  # so that no other storage takes its number
        if mark_unwritten(y):
            self._outputs[y.grad_fn] = output._replace(counter=without_elements(y), **kind)

    def find(self, x: Tensor, node: Any) -> Derived | None:
        """Return what takes the place of a saved tensor, if it is a known output, untouched."""
        if not self._outputs or x.grad_fn is None:
            return None
        output, was_cast = self._output_of(x)
        if output is None:
            return None
        if output.source in self._parts:
            output = output._replace(nodes=output.nodes.union(*self._savers(output.source)))
        if flows_into(node, x.grad_fn, output.nodes):
            return None
        storage = self._store.get(output.storage)
        if storage is None or storage.epoch:  # fake tensors have no marks
            return None
        if not (self._is_cast(x, output) if was_cast else _is_view(x, output)):
            return None
        content = self._content(output.source)
        return None if content is None else Derived(x, memory_of(x)[0], content, output)

    def _savers(self, node: Any) -> Iterator[Iterable[int]]:
        """Yield the numbers of nodes that save the payloads which an output is recomputed from."""
        parts = [*self._parts.get(node, {}).values()]
        for part in parts:
            if isinstance(part, FusedAttention):
                parts += part.inputs
            elif isinstance(part, Kept):  # its payload may be one of those that the store has
                storage = None if part.kept is None else self._store.get(storage_id(part.kept))
                yield from [] if storage is None else [e.savers for e in storage.current()]
            else:
                yield getattr(part, "nodes", getattr(getattr(part, "entry", None), "savers", ()))

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
        if output.dtype not in (output.made, *_WIDER.get(output.made, ())):
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

    def _content(self, node: Any) -> Callable[[], Tensor] | None:
        """Return a function that recomputes the output of a node, or None if its weight is gone.

        It copies weights and biases: they may change before it is called, and an update through
        `.data` has no version.
        """
        known = self._contents.get(node)
        if known is not None:
            return known
        if node in self._products:
            weights = [x for _, x in tensors_of(node, ("mat2",)) if x.untyped_storage().nbytes()]
            if not weights:  # changed in place, or freed: FSDP frees gathered weights after use
                return None
            copies = [weights[0].detach().clone()]
            multiply = partial(torch.mm, mat2=copies[0])
            content = partial(_compute, multiply, self._parts[node], self._products[node])
        else:
            (payload,), (statistics, *weights) = saved_payloads(node)
            copies = [None if t is None else t.detach().clone() for t in weights]
            others = [statistics, *copies]
            content = partial(_recompute, node.output, payload, node.compressor, others)
        self._contents[node] = content
        self.nbytes[node] = sum([t.nbytes for t in copies if t is not None])
        return content


def _is_view(x: Tensor, output: _Output) -> bool:
    """Return whether a tensor has all elements of an output, to which nothing has written."""
    if storage_id(x) != output.storage or x.dtype != output.dtype or not is_unwritten(x):
        return False
    return output.counter._version == output.version and memory_of(x)[1] == output.memory


def _recompute(
    output: Callable[..., Tensor], payload: Any, compressor: Any, others: list[Any]
) -> Tensor:
    return output(decompress(payload, compressor), *others)


def _compute(compute: Callable[..., Tensor], parts: dict[str, Any], layout: Layout) -> Tensor:
    y = compute(*(part.unpack() for part in parts.values()))
    return flatten(y.view(layout.shape), layout)[0]


def _share_memory(parts: Iterable[Any]) -> bool:
    """Return whether two factors are one tensor: the square of its payload would have a bias."""
    kept = [part.kept for part in parts if isinstance(part, Kept) and part.kept is not None]
    return len({(storage_id(x), memory_of(x)[1]) for x in kept}) < len(kept)


def _is_low_rank(node: Any, y: Tensor) -> bool:
    """Return whether `y` is a matrix times a weight of low rank, whose copy takes few bytes."""
    weight = node._saved_mat2  # None if no gradient needs the weight
    if weight is None or not y.is_contiguous() or not is_parameter(weight):
        return False
    few = weight.shape[0] <= min(LOW_RANK, weight.shape[1]) and 4 * weight.nbytes <= y.numel()
    return few and y.numel() == prod(node._input_metadata[0].shape)
