"""Kernel tables and launches for parameters that share kernels."""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from memtrain.kernels import cpu
from memtrain.kernels.codebook import lloyd_max, rank1
from memtrain.kernels.codebook.quantize import inverse
from memtrain.kernels.dispatch import is_simulated
from memtrain.kernels.step.codecs import ROWS_AND_COLUMNS, Payload, ratio
from memtrain.kernels.step.step import (
    GRADIENT_FIELD,
    SCALARS,
    SCALARS_FIELD,
    SEED_FIELD,
    SHAPE_FIELD,
    Entry,
    Sums,
    table,
)
from memtrain.kernels.step.update_rules import COUNT, Scalars, stacked_rows

ROWS, COLS = 256, 128
"""Rows and columns of a program of the Triton step's first pass."""


class Inputs(NamedTuple):
    """What changes from step to step, one value per entry."""

    scalars: Sequence[Scalars]
    grads: Sequence[Tensor]
    states: Sequence[Sequence[Payload]] = ()
    """Read where torch works on them: for rank-1, factored and Lloyd-Max states."""
    seeds: Sequence[int] = ()
    """Of stochastic rounding; empty without."""
    guards: Sequence[Tensor | None] = ()
    """Empty without."""

    def at(self, positions: Sequence[int]) -> "Inputs":
        """Return the inputs of some entries."""
        each: Any = ([values[k] for k in positions] if values else () for values in self)
        return Inputs(*each)


def inputs_of(entries: Sequence[Entry]) -> Inputs:
    """Return the inputs of entries."""
    guards = [entry.guard for entry in entries]
    return Inputs(
        [entry.scalars for entry in entries],
        [entry.grad for entry in entries],
        [entry.states for entry in entries],
        [entry.master.seed for entry in entries],
        guards if any(guard is not None for guard in guards) else (),
    )


def same_kernels(entry: Entry) -> Hashable:
    """Return a key that is equal for entries of one `EntryGroup`."""
    p = entry.param
    kind = entry.rule, entry.bits, entry.kind, entry.draws, entry.master.mode
    return p.device, p.dtype, entry.grad.dtype, kind, is_whole(entry)


def is_whole(entry: Entry) -> bool:
    """Whether 16-byte loads are possible: tensors are aligned, rows are whole blocks."""
    rows, cols = entry.matrix
    if entry.kind in ROWS_AND_COLUMNS:
        # A block lies in one row; and the vectors of entries follow each other.
        whole = cols % entry.codecs[0].block == 0 and rows % 4 == 0
    else:
        whole = rows * cols % 16 == 0
    if is_simulated():  # without addresses: what torch allocates is aligned
        return whole
    tensors = [entry.param, entry.grad, *(x for state in entry.states for x in state.values())]
    if entry.master.correction is not None:
        tensors.append(entry.master.correction)
    return whole and not any(tensor.data_ptr() % 16 for tensor in tensors)


def blocks(bits: int, whole: bool) -> int:
    """Return the blocks of 128 elements per program of the update: 32 if registers suffice.

    `bits` is 32 for exact states and 0 without states; `whole` as `is_whole`.
    """
    return 32 if whole and bits else 16


def elements(entry: Entry) -> int:
    """Return the elements per program of the update."""
    return blocks(entry.bits, is_whole(entry)) * 128


class CpuEntryGroup:
    """Entries that one C++ call steps: contiguous, on the CPU, without guards.

    The tables take 320 bytes per entry and keep no tensor alive.
    """

    reads_states = False

    def __init__(self, entries: Sequence[Entry]) -> None:
        count = len(entries)
        self._table, self._scalars = table(entries), np.empty((count, COUNT), np.float32)
        at = self._scalars.ctypes.data + SCALARS * np.arange(count)
        self._table[:, SCALARS_FIELD] = at
        for row, entry in zip(self._table, entries, strict=True):
            if entry.kind == "rank1":
                shape = entry.param.shape
                row[SHAPE_FIELD : SHAPE_FIELD + 1 + len(shape)] = len(shape), *shape
        self._arguments = self._table.ctypes.data, count
        masters = [entry.master for entry in entries]
        drawn = [master.stochastic for master in masters]
        self._drawn = np.array(drawn) if any(drawn) else None

    def step(self, inputs: Inputs) -> None:
        """Step the entries."""
        self._table[:, GRADIENT_FIELD] = [*map(Tensor.data_ptr, inputs.grads)]
        if self._drawn is not None:
            self._table[self._drawn, SEED_FIELD] = np.array(inputs.seeds)[self._drawn]
        self._scalars[:] = stacked_rows(inputs.scalars)
        cpu.call("mt_step", *self._arguments)


class EntryGroup:
    """The passes over contiguous parameters with equal `same_kernels`, without kernels.

    A group keeps no tensor of the entries alive. During a step with rank-1 and factored states it
    has vectors of rows and columns: 3/64 byte per element, factored.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        first = entries[0]
        self.reads_states = first.kind in ROWS_AND_COLUMNS
        """Whether `Inputs.states` are read: a first pass comes before the update."""
        self.kind, self.bits, self.device = first.kind, first.bits, first.param.device
        self.shapes = [entry.param.shape for entry in entries]
        self.sizes = [entry.matrix for entry in entries]
        deep = [k for k, shape in enumerate(self.shapes) if len(shape) != 2]
        self._deep = deep if self.kind == "rank1" else []
        self._vectors = _vectors(self.kind, self.bits, self.sizes, self._deep)
        self._flat: Tensor | None = None
        self._scales: dict[int, Tensor] = {}
        self._inputs = Inputs((), ())

    def step(self, inputs: Inputs) -> None:
        """Step the entries."""
        self.begin(inputs)
        if self.reads_states:
            self.reduce()
            self.finalize_scales()
        self.update()
        if self.reads_states:
            self.end()

    def begin(self, inputs: Inputs) -> None:
        """Allocate the row and column buffers; write gradients and scalars to the table."""
        if not self.reads_states:
            return
        self._inputs = inputs
        if self._vectors:
            total = sum(map(sum, self._vectors.values()))
            self._flat = torch.empty(total, device=self.device, dtype=torch.float32)
        if self.kind == "rank1":
            self._part("row_new", "col_new").zero_()
        for k in self._deep:
            scale = inputs.states[k][1]["scale"]
            self._of("col_old")[k].copy_(rank1.columns(scale, self.shapes[k]))

    def reduce(self) -> None:
        """Run pass 1: rank-1's maxima, or factored's partial sums of squares."""

    def sums(self) -> list[Sums]:
        """Return the maxima or sums of pass 1, by entry."""
        if self.kind == "rank1":
            return [{"scale": self._new_scale(k)} for k in range(len(self.shapes))]
        each = zip(self._of("row_new"), self._of("col_new"), self.sizes, strict=True)
        return [
            {"row": row.view(-1, rows).sum(0), "col": col.view(-1, cols).sum(0)}
            for row, col, (rows, cols) in each
        ]

    def finalize_scales(self, whole: Sequence[Sums] | None = None) -> None:
        """Compute scales and their reciprocals, or new factors and ratios of rows.

        For tensors split over processes, `whole` has the `scale` of the whole, or the `mean` of the
        new factors, which are in the states already.
        """
        states = self._inputs.states
        if self.kind == "rank1":
            self._invert_scales(whole)
        elif whole is not None:
            for state, row, found in zip(states, self._of("row_inv"), whole, strict=True):
                row.copy_(ratio(**state[1], mean=found["mean"]))
        elif self.kind == "factored":
            self._average()
        if self.bits == lloyd_max.BITS:  # roots, and their reciprocals
            rows, cols = self._part("row_inv"), self._part("col_old")
            rows.copy_(lloyd_max.root(rows))
            cols.copy_(lloyd_max.root(torch.cat([state[1]["col"] for state in states])))
            self._part("row_old").copy_(inverse(rows))
            self._part("col_inv").copy_(inverse(cols))

    def _invert_scales(self, whole: Sequence[Sums] | None) -> None:
        """Compute the reciprocals of the new maxima."""
        if whole is None:
            self._scales = {k: self._new_scale(k) for k in self._deep}
        else:
            self._scales = {k: sums["scale"] for k, sums in enumerate(whole)}
        for k, scale in self._scales.items():
            self._of("row_new")[k].copy_(scale[: self.shapes[k][0]])
            self._of("col_new")[k].copy_(rank1.columns(scale, self.shapes[k]))
        new = self._part("row_new", "col_new")
        self._part("row_inv", "col_inv").copy_(inverse(new))

    def _new_scale(self, k: int) -> Tensor:
        """Return the maxima of every dimension from those of rows and flattened columns."""
        cols = self._of("col_new")[k]
        if k in self._deep:
            cols = rank1.maxima(cols.view(self.shapes[k][1:]))
        return torch.cat([self._of("row_new")[k], cols])

    def update(self) -> None:
        """Run pass 2: decode, update, encode."""

    def end(self) -> None:
        """Copy the new scales and roots into the states."""
        states, guards = self._inputs.states, self._inputs.guards
        old, new = [], []
        if self.kind == "rank1":
            each = zip(self._of("row_new"), self._of("col_new"), strict=True)
            for k, parts in enumerate(each):
                scale, found = states[k][1]["scale"], self._scales.get(k)
                pairs = (
                    [*zip(scale.split(self.sizes[k]), parts, strict=True)]
                    if found is None
                    else [(scale, found)]
                )
                guard = guards[k] if guards else None
                old += [one for one, _ in pairs]
                new += [
                    x if guard is None else torch.where(guard < math.inf, x, one)
                    for one, x in pairs
                ]
        if self.bits == lloyd_max.BITS:
            old = [state[0][name] for name in ("row", "col") for state in states]
            new = [*self._of("row_inv"), *self._of("col_old")]
        if old:
            torch._foreach_copy_(old, new)
        self._inputs, self._scales, self._flat = Inputs((), ()), {}, None

    def offsets(self) -> dict[str, np.ndarray]:
        """Return name of a vector -> the first element of each entry's; -1 without."""
        found, begin = {}, 0
        for name, sizes in self._vectors.items():
            ends = begin + np.cumsum(sizes)
            found[name] = np.where(np.array(sizes) > 0, ends - sizes, -1)
            begin = int(ends[-1])
        return found

    def _part(self, first: str, last: str | None = None) -> Tensor:
        """Return one vector of all entries; or several, up to `last`."""
        names, sums = [*self._vectors], [*map(sum, self._vectors.values())]
        begin, end = names.index(first), names.index(last or first) + 1
        if self._flat is None:
            raise RuntimeError("a pass outside of a step")
        return self._flat.narrow(0, sum(sums[:begin]), sum(sums[begin:end]))

    def _of(self, name: str) -> Sequence[Tensor]:
        """Return a vector of each entry."""
        return self._part(name).split(self._vectors[name])

    def _average(self) -> None:
        """Compute new factors and ratios of rows."""


def _vectors(
    kind: str, bits: int, sizes: Sequence[tuple[int, int]], deep: Sequence[int]
) -> dict[str, list[int]]:
    """Return name of a float32 vector of the passes -> the elements of each entry's."""
    rows, cols = [one for one, _ in sizes], [one for _, one in sizes]
    if kind == "rank1":
        found = {"row_new": rows, "col_new": cols, "row_inv": rows, "col_inv": cols}
        return found | {"col_old": [n if k in deep else 0 for k, n in enumerate(cols)]}
    if kind != "factored":
        return {}
    found = {
        "row_new": [-(-n // COLS) * m for m, n in sizes],
        "col_new": [-(-m // ROWS) * n for m, n in sizes],
        "row_inv": rows,
    }
    more = {"col_old": cols, "row_old": rows, "col_inv": cols}
    return found | more if bits == lloyd_max.BITS else found
