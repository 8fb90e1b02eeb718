"""Compression of one saved tensor as ops that a compiler's graph can hold."""

import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memtrain.activations.saved.flatten import Layout, flatten, memory_of, restore
from memtrain.activations.saved.specialized import Specialized
from memtrain.compressors import Compressor, Key, Packed
from memtrain.kernels.dispatch import is_ordinary, register


class _Form(NamedTuple):
    """How graphs hold a saved tensor."""

    compressor: Compressor
    names: tuple[str, ...]  # of the payload's tensors
    order: tuple[int, ...]  # as in `flatten.Layout`; no strides: sizes may be symbolic
    expanded: tuple[bool, ...]

    def layout(self, shape: Sequence[int]) -> Layout:
        return Layout(tuple(shape), self.order, self.expanded)

    def stored(self, shape: Sequence[int]) -> int:
        """Elements of a shape without the dimensions that are stored once."""
        numel = 1
        for size, once in zip(shape, self.expanded, strict=True):
            numel = numel if once else numel * size
        return numel


_FORMS: dict[str, _Form] = {}
_COUNTERS: dict[int, "_Counter"] = {}  # of objects that are alive
_SPECIALIZED: dict[tuple[Any, ...], Specialized | None] = {}  # by what the ops are given
_UNKNOWN: Any = object()
SIGNATURES = 2**12
"""Forms of tensors at most of which the ops remember the kernels."""
_NUMBERS = count(1)


class _Counter:
    """An object whose `step` counts forwards, and the run of a graph that compresses."""

    __slots__ = ("forwards", "graph", "places", "step")

    def __init__(self, forwards: "weakref.ref[Any]") -> None:
        self.forwards = forwards
        self.graph = 0  # none
        self.step = 0  # of every key in the run
        self.places: set[int] = set()  # of the ops that have run

    def step_of(self, graph: int, place: int) -> int:
        """The count as it was when the graph's run began; whichever op runs first adds one to it.

        A compiler orders the ops as it likes, and not always alike: none may be told by its order.
        """
        forwards = self.forwards()
        if forwards is None:
            return 0
        goes_on = self.graph == graph and self.step + 1 == forwards.step
        if not goes_on or place in self.places:
            self.graph, self.step, self.places = graph, forwards.step, set()
            forwards.step += 1
        self.places.add(place)
        return self.step


def form_of(compressor: Compressor, layout: Layout, names: Sequence[str]) -> str:
    """The text by which graphs know how they hold a saved tensor; the ops know what it stands for.

    Args:
        compressor: A frozen value.
        layout: Of the saved tensor; its shape does not count.
        names: Of its payload's tensors.
    """
    form = _Form(compressor, tuple(names), layout.order, layout.expanded)
    once = [dim for dim, expanded in enumerate(layout.expanded) if expanded]
    # Code that inductor has in its cache on disk names `compressor_at`: were that another, so would
    # be these words, by which the code is found.
    text = f"{compressor!r} in dimensions {[*layout.order]}, {once} of them expanded"
    if _FORMS.get(text) != form:  # a class that was defined again may have other kernels
        _SPECIALIZED.clear()
    _FORMS[text] = form
    return text


def counter_of(forwards: Any) -> int:
    """The number by which graphs know an object whose `step` counts forwards; held weakly."""
    known = [number for number, one in _COUNTERS.copy().items() if one.forwards() is forwards]
    if known:
        return known[0]
    number = next(_NUMBERS)
    _COUNTERS[number] = _Counter(weakref.ref(forwards, lambda _: _COUNTERS.pop(number, None)))
    return number


def graph_number() -> int:
    """A number for a graph that no other has."""
    return next(_NUMBERS)


def compress(x: Tensor, form: str, key: Sequence[int]) -> list[Tensor]:
    """The payload's tensors, as one op.

    Args:
        x: The saved tensor; fake ones may have symbolic sizes.
        form: Of `form_of`.
        key: Seed, number of the site, and of the forwards' counter, which is read when the op runs:
            equal graphs round differently from one forward to the next; then the number of the
            graph, and the op's own in it.
    """
    return compress_op(x, form, key)


def decompress(
    parts: Sequence[Tensor], form: str, shape: Sequence[Any], dtype: torch.dtype
) -> Tensor:
    """The saved tensor again, as one op, dense in the memory order that it had."""
    return decompressing(parts)(parts, form, shape, dtype)


def decompressing(parts: Sequence[Tensor]) -> Any:
    """The op that decompresses a payload, and that no CUDA graph holds where the host reads a part.

    Args:
        parts: The payload's tensors, fake ones too. One that is not where others are lies on the
            host, as of `Host`.
    """
    on_host = len({part.device for part in parts}) > 1
    return (decompress_on_host_op if on_host else decompress_op).default


def compressor_at(form: str, key: Sequence[int]) -> Callable[[Tensor], Sequence[Tensor]]:
    """`compress` of one place in a graph, for code that need not ask torch's dispatcher.

    Args:
        form: As for `compress`.
        key: As for `compress`.
    """
    known: tuple[Any, Any, Any, Specialized | None] = None, None, None, None

    def compress_here(x: Tensor) -> Sequence[Tensor]:
        nonlocal known
        if not is_ordinary():  # a mode is to see the op, or another backend to serve
            return compress_op(x, form, key)
        shape, strides, held = x.shape, x.stride(), _FORMS[form]
        here = known  # at once: another thread may run the graph for other shapes
        if here[0] != shape or here[1] != strides or here[2] is not held:
            here = known = shape, strides, held, _bound_of(x, form)
        special, own = here[3], _key(key)
        return _payload(x, form, own) if special is None else special.compress(x, own.bits())

    return compress_here


def decompressor_at(
    form: str, dtype: torch.dtype
) -> Callable[[Sequence[Tensor], Sequence[int]], Tensor]:
    """`decompress` of one place in a graph, as `compressor_at`.

    Args:
        form: As for `decompress`.
        dtype: Of the saved tensor.
    """
    known: tuple[Any, Any, Specialized | None] = None, None, None

    def decompress_here(parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        nonlocal known
        if not is_ordinary():
            return decompress(parts, form, shape, dtype)
        like, held, special = known
        if special is not None and like == shape and held is _FORMS[form]:
            return special.decompressed(parts)
        x = _decompress(parts, form, shape, dtype)
        known = shape, _FORMS[form], _SPECIALIZED.get((form, tuple(shape), dtype, x.device))
        return x

    return decompress_here


def _compress(x: Tensor, form: str, key: Sequence[int]) -> list[Tensor]:
    own = _key(key)
    special = _bound_of(x, form) if is_ordinary() else None
    return _payload(x, form, own) if special is None else [*special.compress(x, own.bits())]


def _key(key: Sequence[int]) -> Key:
    seed, site, number, graph, place = key
    counter = _COUNTERS.get(number)
    return Key(seed, site, 0 if counter is None else counter.step_of(graph, place))


def _bound_of(x: Tensor, form: str) -> Specialized | None:
    given = form, x.shape, x.stride(), x.dtype, x.device
    special = _SPECIALIZED.get(given, _UNKNOWN)
    return _bind(given, x, _FORMS[form]) if special is _UNKNOWN else special


def _bind(given: tuple[Any, ...], x: Tensor, form: _Form) -> Specialized | None:
    """Find the kernels for tensors like `x`, and remember them for ops that are given the same.

    None where it does not lie in memory as when the graph was traced (a fake kernel of the user's
    told other strides): the payload has the order that the graph knows.
    """
    if len(_SPECIALIZED) >= SIGNATURES:  # shapes that vary would collect without end
        _SPECIALIZED.clear()
    layout, (own, place) = form.layout(x.shape), memory_of(x)
    traced = _order(own) == _order(layout) and own.expanded == layout.expanded
    special = Specialized.of(x, layout, place, form.compressor) if traced else None
    _SPECIALIZED[given] = special
    return special


def _order(layout: Layout) -> list[int]:
    """The order of dimensions in memory, without those of size 1, which may be anywhere."""
    return [dim for dim in layout.order if layout.shape[dim] != 1]


def _compress_fake(x: Tensor, form: str, key: Sequence[int]) -> list[Tensor]:
    return _payload(x, form, Key())


def _payload(x: Tensor, form: str, key: Key) -> list[Tensor]:
    held = _FORMS[form]
    if not held.compressor.shaped:
        x, _ = flatten(x, held.layout(x.shape))
    return [*held.compressor.compress(x, key=key).tensors.values()]


def _decompress(
    parts: Sequence[Tensor], form: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    given = None
    if is_ordinary():
        given = form, tuple(shape), dtype, parts[0].device
        special = _SPECIALIZED.get(given)
        if special is not None:
            return special.decompressed(parts)
    held = _FORMS[form]
    tensors = dict(zip(held.names, parts, strict=True))
    if held.compressor.shaped:
        return held.compressor.decompress(Packed(tensors, torch.Size(shape), dtype))
    numel = torch.Size([held.stored(shape)])
    flat = held.compressor.decompress(Packed(tensors, numel, dtype))
    x = restore(flat, held.layout(shape))
    if given is not None and given not in _SPECIALIZED:
        _bind(given, x, held)
    return x


def _decompress_fake(
    parts: Sequence[Tensor], form: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    held = _FORMS[form]
    if held.compressor.shaped:
        return _decompress(parts, form, shape, dtype)
    # Not by the compressor: its `shape.numel()` would make one number of a symbolic size.
    flat = parts[0].new_empty([held.stored(shape)], dtype=dtype)
    return restore(flat, held.layout(shape))


# What the host reads as an op runs, a counter for random bits or a payload's part that lies there:
# a CUDA graph would repeat what came of it at the capture.
_HOST = tuple(filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)]))

compress_op = register(
    "compress_saved(Tensor x, str form, int[] key) -> Tensor[]",
    _compress,
    _compress_fake,
    tags=_HOST,
)
_DECOMPRESS = "(Tensor[] parts, str form, SymInt[] shape, ScalarType dtype) -> Tensor"
decompress_op = register(f"decompress_saved{_DECOMPRESS}", _decompress, _decompress_fake)
decompress_on_host_op = register(
    f"decompress_saved_on_host{_DECOMPRESS}", _decompress, _decompress_fake, tags=_HOST
)
DECOMPRESS = (decompress_op.default, decompress_on_host_op.default)
"""The ops that decompress, in a graph."""
