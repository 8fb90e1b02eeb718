"""Compression of one saved tensor as ops that a compiler's graph can hold."""

import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from memtrain.activations.saved.flatten import Layout, flatten, memory_of, restore
from memtrain.activations.saved.payload import specialized
from memtrain.activations.saved.store import tensor_of
from memtrain.compressors import Compressor, Key, Packed
from memtrain.kernels.dispatch import is_ordinary, register

_SIGNATURES: dict[str, tuple[Compressor, tuple[str, ...], Layout]] = {}
"""Signature -> compressor, names of the payload's tensors, layout (its shape does not count:
sizes may be symbolic)."""
_COUNTERS: dict[int, "_Counter"] = {}  # of objects that are alive
_NUMBERS = count(1)


class _Counter:
    """An object whose `step` counts forwards, and the run of a graph that compresses."""

    __slots__ = ("forwards", "graph", "positions", "step")

    def __init__(self, forwards: "weakref.ref[Any]") -> None:
        self.forwards = forwards
        self.graph = 0  # none
        self.step = 0  # of every key in the run
        self.positions: set[int] = set()  # of the ops that have run

    def step_of(self, graph: int, position: int) -> int:
        """Return the count when the graph's run began; whichever op runs first adds one to it.

        A compiler orders the ops as it likes, and may change the order from run to run.
        """
        forwards = self.forwards()
        if forwards is None:
            return 0
        goes_on = self.graph == graph and self.step + 1 == forwards.step
        if not goes_on or position in self.positions:
            self.graph, self.step, self.positions = graph, forwards.step, set()
            forwards.step += 1
        self.positions.add(position)
        return self.step


def signature_of(compressor: Compressor, layout: Layout, names: Sequence[str]) -> str:
    """Return the text by which ops in graphs identify a compressor and a layout."""
    once = [dim for dim, expanded in enumerate(layout.expanded) if expanded]
    text = f"{compressor!r} in dimensions {[*layout.order]}, {once} of them expanded"
    _SIGNATURES[text] = compressor, tuple(names), layout
    return text


def counter_of(forwards: Any) -> int:
    """Return the number by which graphs know an object whose `step` counts forwards."""
    known = [number for number, one in _COUNTERS.copy().items() if one.forwards() is forwards]
    if known:
        return known[0]
    number = next(_NUMBERS)
    _COUNTERS[number] = _Counter(weakref.ref(forwards, lambda _: _COUNTERS.pop(number, None)))
    return number


def graph_number() -> int:
    """Return a number that no other graph has."""
    return next(_NUMBERS)


def decompress(
    parts: Sequence[Tensor], signature: str, shape: Sequence[Any], dtype: torch.dtype
) -> Tensor:
    """Decompress a saved tensor by one op, dense in its memory order."""
    return decompressing(parts)(parts, signature, shape, dtype)


def decompressing(parts: Sequence[Tensor]) -> Any:
    """Return the op that decompresses a payload.

    If a part is on another device than the others, the host reads it, as with `Host`, and no CUDA
    graph may hold the op.
    """
    on_host = len({part.device for part in parts}) > 1
    return (decompress_on_host_op if on_host else decompress_op).default


def _compress(x: Tensor, signature: str, key: Sequence[int]) -> list[Tensor]:
    (compressor, _, layout), (seed, site, number, graph, op) = _SIGNATURES[signature], key
    counter = _COUNTERS.get(number)
    full_key = Key(seed, site, 0 if counter is None else counter.step_of(graph, op))
    layout, (found, memory) = _of_shape(layout, x.shape), memory_of(x)
    # A fake kernel of the user's may have promised other strides than the tensor has.
    if is_ordinary() and found.expanded == layout.expanded and _order(found) == _order(layout):
        special = None if compressor.shaped else specialized(x, layout, memory, compressor)
        if special is not None:
            return [*special[1](x, full_key.bits())]
    return _payload(x, compressor, layout, full_key)


def _order(layout: Layout) -> list[int]:
    """Return the order of dimensions in memory, without those of size 1, which may be anywhere."""
    return [dim for dim in layout.order if layout.shape[dim] != 1]


def _compress_fake(x: Tensor, signature: str, key: Sequence[int]) -> list[Tensor]:
    compressor, _, layout = _SIGNATURES[signature]
    return _payload(x, compressor, _of_shape(layout, x.shape), Key())


def _payload(x: Tensor, compressor: Compressor, layout: Layout, key: Key) -> list[Tensor]:
    flat = x if compressor.shaped else flatten(x, layout)[0]
    return [*compressor.compress(flat, key=key).tensors.values()]


def _of_shape(layout: Layout, shape: Sequence[int]) -> Layout:
    return layout._replace(shape=tuple(shape))


def _stored(layout: Layout) -> int:
    """Return the elements of a layout without the dimensions that are stored once."""
    numel = 1
    for size, once in zip(layout.shape, layout.expanded, strict=True):
        numel = numel if once else numel * size
    return numel


def _decompress(
    parts: Sequence[Tensor], signature: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    compressor, names, layout = _SIGNATURES[signature]
    tensors, layout = dict(zip(names, parts, strict=True)), _of_shape(layout, shape)
    if compressor.shaped:
        return compressor.decompress(Packed(tensors, torch.Size(shape), dtype))
    return tensor_of(Packed(tensors, torch.Size([_stored(layout)]), dtype), compressor, layout)


def _decompress_fake(
    parts: Sequence[Tensor], signature: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    compressor, _, layout = _SIGNATURES[signature]
    if compressor.shaped:
        return _decompress(parts, signature, shape, dtype)
    # Not by the compressor: its `shape.numel()` would make one number of a symbolic size.
    layout = _of_shape(layout, shape)
    return restore(parts[0].new_empty([_stored(layout)], dtype=dtype), layout)


# What the host reads as an op runs, a counter for random bits or a payload's part that lies there:
# a CUDA graph would repeat what came of it at the capture.
_HOST = tuple(filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)]))

compress_op = register(
    "compress_saved(Tensor x, str form, int[] key) -> Tensor[]",
    _compress,
    _compress_fake,
    tags=_HOST,
)
"""Returns the tensors of the payload of `x`, whose sizes may be symbolic, by `signature_of`.

The key: seed, number of the site, and of the forwards' counter, which is read when the op runs, so
that equal graphs round differently from forward to forward; number of the graph, and of the op.
"""
_DECOMPRESS = "(Tensor[] parts, str form, SymInt[] shape, ScalarType dtype) -> Tensor"
decompress_op = register(f"decompress_saved{_DECOMPRESS}", _decompress, _decompress_fake)
decompress_on_host_op = register(
    f"decompress_saved_on_host{_DECOMPRESS}", _decompress, _decompress_fake, tags=_HOST
)
DECOMPRESS = (decompress_op.default, decompress_on_host_op.default)
"""The ops that decompress, in a graph."""
