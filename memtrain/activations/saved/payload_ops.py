"""Compression of one saved tensor as two ops that a compiler's graph can hold."""

import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memtrain.activations.saved.flatten import Layout, flatten, restore
from memtrain.compressors import Compressor, Key, Packed
from memtrain.kernels.dispatch import register


class Form(NamedTuple):
    """How graphs hold a saved tensor: what the two ops are given besides tensors."""

    compressor: str
    """Its text, which is its number in this process: see `form_of`."""
    order: tuple[int, ...]
    expanded: tuple[bool, ...]
    """As in `flatten.Layout`; strides are not kept, so that sizes may be symbolic."""


_COMPRESSORS: dict[str, tuple[Compressor, tuple[str, ...]]] = {}  # and the payload's names
_COUNTERS: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_RUNS: "weakref.WeakKeyDictionary[Any, _Run]" = weakref.WeakKeyDictionary()
_NUMBERS = count(1)


class _Run(NamedTuple):
    """One run of a graph that compresses."""

    graph: int
    step: int
    """Of every key in it."""
    places: set[int]
    """Of the ops that have run."""


def form_of(compressor: Compressor, layout: Layout, names: Sequence[str]) -> Form:
    """Make a compressor known to the ops of this process.

    Args:
        compressor: A frozen value: graphs hold its text.
        layout: Of the saved tensor.
        names: Of its payload's tensors.
    """
    _COMPRESSORS[repr(compressor)] = (compressor, tuple(names))
    return Form(repr(compressor), layout.order, layout.expanded)


def counter_of(forwards: Any) -> int:
    """The number by which graphs know an object whose `step` counts forwards; held weakly."""
    known = next((number for number, one in _COUNTERS.items() if one is forwards), None)
    number = next(_NUMBERS) if known is None else known
    _COUNTERS[number] = forwards
    return number


def graph_number() -> int:
    """A number for a graph that no other has."""
    return next(_NUMBERS)


def compress(x: Tensor, form: Form, key: Sequence[int]) -> list[Tensor]:
    """The payload's tensors, as one op.

    Args:
        x: The saved tensor; fake ones may have symbolic sizes.
        form: Of `form_of`.
        key: Seed, number of the site, and of the forwards' counter, which is read when the op runs:
            equal graphs round differently from one forward to the next; then the number of the
            graph, and the op's own in it.
    """
    return _compress_op(x, form.compressor, form.order, form.expanded, key)


def decompress(
    parts: Sequence[Tensor], form: Form, shape: Sequence[Any], dtype: torch.dtype
) -> Tensor:
    """The saved tensor again, as one op, dense in the memory order that it had."""
    return _decompress_op(parts, form.compressor, shape, form.order, form.expanded, dtype)


def _compress(
    x: Tensor,
    compressor: str,
    order: Sequence[int],
    expanded: Sequence[bool],
    key: Sequence[int],
) -> list[Tensor]:
    seed, site, number, graph, place = key
    forwards = _COUNTERS.get(number)
    step = 0 if forwards is None else _step(forwards, graph, place)
    return _payload(x, compressor, order, expanded, Key(seed, site, step))


def _step(forwards: Any, graph: int, place: int) -> int:
    """The counter as it was when the graph's run began; whichever op runs first adds one to it.

    A compiler orders the ops as it likes, and not always alike: none may be told by its order.
    """
    run = _RUNS.get(forwards)
    goes_on = run is not None and (run.graph, run.step + 1) == (graph, forwards.step)
    if run is None or not goes_on or place in run.places:
        run = _RUNS[forwards] = _Run(graph, forwards.step, set())
        forwards.step += 1
    run.places.add(place)
    return run.step


def _compress_fake(
    x: Tensor,
    compressor: str,
    order: Sequence[int],
    expanded: Sequence[bool],
    key: Sequence[int],
) -> list[Tensor]:
    return _payload(x, compressor, order, expanded, Key())


def _payload(
    x: Tensor, compressor: str, order: Sequence[int], expanded: Sequence[bool], key: Key
) -> list[Tensor]:
    chosen, _ = _COMPRESSORS[compressor]
    if not chosen.shaped:
        x, _ = flatten(x, Layout(tuple(x.shape), tuple(order), tuple(expanded)))
    return [*chosen.compress(x, key=key).tensors.values()]


def _decompress(
    parts: Sequence[Tensor],
    compressor: str,
    shape: Sequence[int],
    order: Sequence[int],
    expanded: Sequence[bool],
    dtype: torch.dtype,
) -> Tensor:
    chosen, names = _COMPRESSORS[compressor]
    tensors = dict(zip(names, parts, strict=True))
    if chosen.shaped:
        return chosen.decompress(Packed(tensors, torch.Size(shape), dtype))
    numel = torch.Size([_stored(shape, expanded)])
    flat = chosen.decompress(Packed(tensors, numel, dtype))
    return restore(flat, Layout(tuple(shape), tuple(order), tuple(expanded)))


def _decompress_fake(
    parts: Sequence[Tensor],
    compressor: str,
    shape: Sequence[int],
    order: Sequence[int],
    expanded: Sequence[bool],
    dtype: torch.dtype,
) -> Tensor:
    if _COMPRESSORS[compressor][0].shaped:
        return _decompress(parts, compressor, shape, order, expanded, dtype)
    # Not by the compressor: its `shape.numel()` would make one number of a symbolic size.
    flat = parts[0].new_empty([_stored(shape, expanded)], dtype=dtype)
    return restore(flat, Layout(tuple(shape), tuple(order), tuple(expanded)))


def _stored(shape: Sequence[int], expanded: Sequence[bool]) -> int:
    """Elements of a shape without the dimensions that are stored once."""
    numel = 1
    for size, once in zip(shape, expanded, strict=True):
        numel = numel if once else numel * size
    return numel


# Random bits depend on a counter of the host's: a CUDA graph would repeat those of its capture.
_HOST = tuple(filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)]))

_compress_op = register(
    "compress_saved(Tensor x, str compressor, int[] order, bool[] expanded, int[] key) -> Tensor[]",
    _compress,
    _compress_fake,
    tags=_HOST,
)
_decompress_op = register(
    "decompress_saved(Tensor[] parts, str compressor, SymInt[] shape, int[] order,"
    " bool[] expanded, ScalarType dtype) -> Tensor",
    _decompress,
    _decompress_fake,
)
