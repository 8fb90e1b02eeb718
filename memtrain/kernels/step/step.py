"""One optimizer step over many tensors at once, with their states compressed."""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from memtrain.kernels import cpu
from memtrain.kernels.codebook import lloyd_max, rank1
from memtrain.kernels.step import shard, update_rules
from memtrain.kernels.step.codecs import (
    ROWS_AND_COLUMNS,
    Codec,
    Payload,
    codebook_and_bounds,
    ratio,
    upper_buckets,
)
from memtrain.kernels.step.shard import Shard
from memtrain.kernels.step.split import NO_MASTER, MasterWeight
from memtrain.kernels.step.update_rules import RULES, Scalars

SECOND = {"rank1": 1, "factored": 2}  # a second state that is not kept as the first one: 0
FIELDS, _MAX_DIMS = 32, 8
GRADIENT_FIELD, SCALARS_FIELD, SEED_FIELD = 1, 10, 22
"""Fields of a table row that change from step to step."""
SHAPE_FIELD = 23
"""First field of the dimensions of a rank-1 state, and of their sizes, for C++."""

Sums = dict[str, Tensor]
"""Results of the first pass: `scale` (rank-1's maxima), or `row`, `col` (sums of squares) and then
`mean` (of the new factors); nothing for other kinds."""


class Entry(NamedTuple):
    """One parameter's part of a step; the payloads and the parameter are written in place.

    `states` are the rule's states (AdamW: both moments; SGD and Lion: the momentum; SGD without
    momentum: none), stored by `codecs`. With a `shard`, all tensors are local
    shards; rank-1 scales and factored means refer to the full parameter (`sharded.step`). `master`
    is the storage of the float32 master of a 16-bit parameter. If `guard` (float32, one element,
    not negative, on the parameter's device) is not finite, nothing changes. Triton kernels and
    sharded steps read the guard on the device; other backends synchronize.
    """

    param: Tensor
    grad: Tensor
    states: tuple[Payload, ...]
    codecs: tuple[Codec, ...]
    rule: str
    scalars: Scalars
    shard: Shard | None = None
    master: MasterWeight = NO_MASTER
    guard: Tensor | None = None

    @property
    def kind(self) -> str:
        """The kind of the last state's codec; "none" without a state."""
        return self.codecs[-1].kind if self.codecs else "none"

    @property
    def bits(self) -> int:
        """Bits per element of the first state; 0 without a state."""
        return self.codecs[0].bits if self.codecs else 0

    @property
    def draws(self) -> bool:
        """Whether `update_rules.drawn` rounds the first state: Lion's 4 bits, others by codec."""
        return _draws(self.rule, self.codecs)

    @property
    def matrix(self) -> tuple[int, int]:
        """The parameter's rows and columns: dimension 0, and the rest."""
        shape = self.param.shape
        return (shape[0], shape[1:].numel()) if shape else (1, 1)


def _draws(rule: str, codecs: tuple[Codec, ...]) -> bool:
    return bool(codecs) and codecs[0].bits == 4 and (rule == "lion" or codecs[0].drawn)


def has_kernel(rule: str, codecs: Sequence[Codec]) -> bool:
    """Whether the kernels have a rule with these codecs of its states."""
    each = (codec.is_served(first=not number) for number, codec in enumerate(codecs))
    if len(codecs) not in RULES[rule].states or not all(each):
        return False
    if rule == "sgd" and any(codec.drawn for codec in codecs):
        return False
    if len(codecs) < 2:
        return all(codec.kind in ("exact", "block") for codec in codecs)
    first, second = codecs
    if second.kind == "rank1":
        return rule == "adamw" and (first.kind, first.bits) == ("block", 4)
    if second.kind == "factored":
        return rule == "adamw" and first.kind in ("block", "lloyd_max")
    return (
        first.kind in ("exact", "block") and first.kind == second.kind and first.bits == second.bits
    )


def is_supported(entry: Entry) -> bool:
    """Whether the kernels support an entry's dtypes and dimensions."""
    if entry.param.dim() > _MAX_DIMS and entry.kind == "rank1":
        return False
    return entry.param.dtype in cpu.FLOAT_TYPES and entry.grad.dtype in cpu.FLOAT_TYPES


def is_contiguous(entry: Entry) -> bool:
    """Whether a parameter and its correction are contiguous."""
    return entry.param.is_contiguous() and entry.master.is_contiguous()


@lru_cache(maxsize=4096)
def _sizes(
    rule: str, codecs: tuple[Codec, ...], states: int, shape: torch.Size
) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Return names and elements of each state's tensors, cached."""
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} is unknown; allowed: {', '.join(RULES)}")
    if not has_kernel(rule, codecs) or states != len(codecs):
        raise ValueError(f"rule {rule!r} has no kernel for {states} states kept as {list(codecs)}")
    if len(shape) < 2 and codecs and codecs[-1].kind in ROWS_AND_COLUMNS:
        raise ValueError(f"{codecs[-1]} needs at least 2 dimensions, got shape {tuple(shape)}")
    return tuple(tuple(codec.sizes(shape).items()) for codec in codecs)


def check_entry(entry: Entry) -> None:
    """Raise `ValueError` for a rule without a kernel, and for tensors of other sizes or devices."""
    shape, device, n = entry.param.shape, entry.param.device, entry.param.numel()
    sizes = _sizes(entry.rule, entry.codecs, len(entry.states), shape)
    found = [("the gradient", entry.grad, n)]
    if entry.master.correction is not None:
        found.append(("the correction", entry.master.correction, n))
    for state, parts in zip(entry.states, sizes, strict=True):
        found += [(name, state[name], size) for name, size in parts]
    for what, tensor, size in found:  # kernels write by address
        if tensor.numel() == size and tensor.device == device:
            continue
        what = what if what.startswith("the ") else f"{what!r} of a state"
        if tensor.device != device:
            raise ValueError(
                f"{what} is on {tensor.device}, its parameter of shape {tuple(shape)} on {device}: "
                "a model that is moved after a step needs a new optimizer, or this one's "
                "state_dict() loaded into it again"
            )
        raise ValueError(
            f"{what} has {tensor.numel():,} elements; a parameter of shape {tuple(shape)} "
            f"needs {size:,}. A parameter that has changed its size needs a new optimizer"
        )


def step_reference(entry: Entry) -> None:
    """Step one whole entry in pure torch."""
    sums = reduce_reference(entry)
    if entry.kind == "factored":
        average_factors(entry, sums, Shard(tuple(entry.param.shape), ()))
    update_reference(entry, sums)


def reduce_reference(entry: Entry) -> Sums:
    """Return pass 1 in torch: the maxima of rank-1's new state, or sums of squared gradients."""
    if entry.kind not in ROWS_AND_COLUMNS:
        return {}
    h: Any = entry.scalars
    g = update_rules.gradient(h, entry.grad, entry.master.read(entry.param))
    if entry.kind == "rank1":
        v = entry.codecs[1].decode(entry.states[1], entry.param.shape)
        return {"scale": rank1.maxima(h.second_moment(g, v.to(g.dtype)))}
    square = (g * g).float().reshape(g.shape[0], g.shape[1:].numel())
    return {"row": square.sum(1), "col": square.sum(0)}


def average_factors(entry: Entry, sums: Sums, part: Shard) -> None:
    """Write the new factors from sums over the whole tensor; add their mean to `sums`."""
    h: Any = entry.scalars
    state = entry.states[1]
    row, col = state["row"], state["col"]
    with unless_refused(entry, [row, col]):
        row.copy_(h.b2 * row + h.w2 * (sums["row"] / torch.Size(part.shape[1:]).numel()))
        col.copy_(h.b2 * col + h.w2 * (sums["col"] / part.shape[0]))
    sums["mean"] = shard.mean_of(row, col, part)


def update_reference(entry: Entry, sums: Sums) -> None:
    """Run pass 2 in torch: decode, update, encode."""
    written = [part for state in entry.states for part in state.values()]
    written += [x for x in (entry.param, entry.master.correction) if x is not None]
    with unless_refused(entry, written):
        _update(entry, sums)


def _update(entry: Entry, sums: Sums) -> None:
    shape, is_factored = entry.param.shape, entry.kind == "factored"
    before = entry.master.read(entry.param)
    h: Any = entry.scalars
    p, g = before, update_rules.gradient(h, entry.grad, before)
    stored = list(zip(entry.codecs, entry.states, strict=True))
    if is_factored:
        _, factors = stored.pop()
    old = [codec.decode(state, shape).to(p.dtype) for codec, state in stored]
    if is_factored and stored[0][0].kind == "lloyd_max":
        share = ratio(**factors, mean=sums["mean"])
        row, col = lloyd_max.root(share), lloyd_max.root(factors["col"])
        m = h.first_moment(g, old[0])
        new: list[Tensor] = []
        p = _store_over_factors(h, p, m, stored[0][1], row, col)
    elif is_factored:
        v = ratio(**factors, mean=sums["mean"]).unsqueeze(1) * factors["col"]
        p, new = h.update(p, g, [*old, v.view(shape).to(p.dtype)], factored=True)
    else:
        p, new = h.update(p, g, old)
    u = update_rules.drawn(new[0], before) if entry.draws else None
    entry.master.write(p, entry.param)
    for (codec, state), value in zip(stored, new, strict=False):
        codec.encode(state, value, sums.get("scale") if codec.kind == "rank1" else None, u)
        u = None  # only the first state is rounded by it


@contextmanager
def unless_refused(entry: Entry, written: Sequence[Tensor]) -> Iterator[None]:
    """Restore the written tensors if the guard is not finite, without a synchronization."""
    old = [] if entry.guard is None else [x.clone() for x in written]
    yield
    if entry.guard is not None:
        allowed = entry.guard.isfinite()
        for x, before in zip(written, old, strict=True):
            x.copy_(torch.where(allowed, x, before))


def _store_over_factors(
    h: update_rules.AdamWScalars, p: Tensor, m: Tensor, state: Payload, row: Tensor, col: Tensor
) -> Tensor:
    """Quantize a first moment over the roots of the second's factors; return the parameter."""
    codes, scale = lloyd_max.encode(m, row, col)
    for name, value in (("codes", codes), ("scale", scale), ("row", row), ("col", col)):
        state[name].copy_(value)
    stored = lloyd_max.decode(codes, scale, row, col).view(p.shape).to(p.dtype)
    root = (row.unsqueeze(1) * col).view(p.shape).to(p.dtype)
    return h.update_with_residual(p, m, stored, root)


def table(entries: Sequence[Entry]) -> np.ndarray:
    """Return the kernels' table of contiguous entries, without scalars: int64, [entries, FIELDS].

    The first 23 fields of a row are those of struct Row in cpu/step/table.h.
    """
    rows: array[int] = array("q")
    for entry in entries:
        p, g, states = entry.param, entry.grad, entry.states
        names, tables, kind = _row_traits(entry.rule, entry.codecs, p.shape, p.device)
        rows.extend((p.data_ptr(), g.data_ptr()))
        for state, (first, second, *others), known in zip(states, names, tables, strict=True):
            scale = state[second].data_ptr() if second else 0
            rows.extend((state[first].data_ptr(), scale, *known))
            rows.extend([state[name].data_ptr() for name in others])
        rows.extend(_ZEROS[: 4 * (2 - len(states)) + 1])
        rows.extend((*kind, cpu.FLOAT_TYPES[p.dtype], cpu.FLOAT_TYPES[g.dtype]))
        rows.extend(_NO_MASTER_FIELDS if entry.master is NO_MASTER else entry.master.fields())
        rows.extend(_ZEROS)
    return np.frombuffer(rows, np.int64).reshape(-1, FIELDS)


SCALARS = 4 * update_rules.COUNT
"""Bytes of a row of `update_rules.stacked_rows`."""
_ZEROS = (0,) * (FIELDS - 23)
_NO_MASTER_FIELDS = NO_MASTER.fields()
_Names = tuple[str, ...]


@lru_cache(maxsize=4096)
def _row_traits(
    rule: str, codecs: tuple[Codec, ...], shape: torch.Size, device: torch.device
) -> tuple[list[_Names], list[tuple[int, ...]], tuple[int, ...]]:
    """Return names of each state's tensors, tables, sizes and numbers of a row, cached."""
    names: list[_Names] = []
    tables: list[tuple[int, ...]] = []
    for codec in codecs:
        first, *others = codec.sizes(shape)
        names.append((first, *(others or [""])))
        if codec.kind == "lloyd_max":  # rows and columns take the place of tables
            tables.append(())
            continue
        coded = (codebook_and_bounds, upper_buckets) if codec.kind in ("block", "rank1") else ()
        tables.append(tuple(find(codec, device).data_ptr() for find in coded) or (0, 0))
    matrix = (shape[0], shape[1:].numel()) if shape else (1, 1)
    bits = codecs[0].bits if codecs else 0
    second = SECOND.get(codecs[-1].kind if codecs else "", 0)
    kind = (list(RULES).index(rule), bits, second | _draws(rule, codecs) << 32)
    return names, tables, (shape.numel(), *matrix, *kind)
