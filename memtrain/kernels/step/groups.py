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
    check_library,
    table,
)
from memtrain.kernels.step.update_rules import COUNT, Scalars, stacked_rows

ROWS, COLS = 256, 128
"""Rows and columns of a program of the Triton step's first pass."""


class Inputs(NamedTuple):
    """What changes from step to step, one value per entry."""

    grads: Sequence[Tensor]
    scalars: Sequence[Scalars]
    states: Sequence[tuple[Payload, ...]] = ()
    """Read where torch works on them: for rank-1, factored and Lloyd-Max states."""
    seeds: Sequence[int] = ()
    """Of stochastic rounding; empty without."""
    guards: Sequence[Tensor | None] = ()
    """Empty without."""

    def at(self, positions: Sequence[int]) -> "Inputs":
        """The inputs of some entries."""
        each: Any = ([values[k] for k in positions] if values else () for values in self)
        return Inputs(*each)


def inputs_of(entries: Sequence[Entry]) -> Inputs:
    """The inputs that entries hold."""
    guards = [entry.guard for entry in entries]
    return Inputs(
        [entry.grad for entry in entries],
        [entry.scalars for entry in entries],
        [entry.states for entry in entries],
        [entry.master.seed for entry in entries],
        guards if any(guard is not None for guard in guards) else (),
    )


def same_kernels(entry: Entry) -> Hashable:
    """Equal for entries that one `EntryGroup` steps."""
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
    """Blocks of 128 of a program of the update: what all its elements share is found once.

    Twice as many where the registers are there for 32 elements a thread.

    Args:
        bits: Of the codes; 32 where states are numbers, 0 without any.
        whole: Whether all is aligned.

    Example:
        >>> blocks(4, True), blocks(4, False), blocks(0, True)
        (32, 16, 16)
    """
    return 32 if whole and bits else 16


def elements(entry: Entry) -> int:
    """Elements of a program of the update."""
    return blocks(entry.bits, is_whole(entry)) * 128


class CpuEntryGroup:
    """Entries that one C++ call steps.

    Args:
        entries: With contiguous parameters and gradients, on the CPU, without guards.

    Memory:
        320 bytes per entry; no tensor is kept alive.
    """

    reads_states = False

    def __init__(self, entries: Sequence[Entry]) -> None:
        check_library()
        count = len(entries)
        self._table, self._scalars = table(entries), np.empty((count, COUNT), np.float32)
        at = self._scalars.ctypes.data + SCALARS * np.arange(count)
        self._table[:, SCALARS_FIELD] = at
        for row, entry in zip(self._table, entries, strict=True):
            if entry.kind == "rank1":
                shape = entry.param.shape
                row[SHAPE_FIELD : SHAPE_FIELD + 1 + len(shape)] = len(shape), *shape
        self._given = self._table.ctypes.data, count
        masters = [entry.master for entry in entries]
        drawn = [master.stochastic for master in masters]
        self._drawn = np.array(drawn) if any(drawn) else None

    def step(self, inputs: Inputs) -> None:
        """Step the entries."""
        self._table[:, GRADIENT_FIELD] = [*map(Tensor.data_ptr, inputs.grads)]
        if self._drawn is not None:
            self._table[self._drawn, SEED_FIELD] = np.array(inputs.seeds)[self._drawn]
        self._scalars[:] = stacked_rows(inputs.scalars)
        cpu.call("mt_step", *self._given)


class EntryGroup:
    """The passes over contiguous parameters of one kind and dtype, without kernels.

    Args:
        entries: For which `same_kernels` are equal; no tensor of them is kept alive.

    Memory:
        For the time of a step, with rank-1 and factored states, vectors of rows and columns: 3/64
        byte per element, factored.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        first = entries[0]
        self.kind, self.bits, self.device = first.kind, first.bits, first.param.device
        self.shapes = [entry.param.shape for entry in entries]
        self.sizes = [entry.matrix for entry in entries]
        deep = [k for k, shape in enumerate(self.shapes) if len(shape) != 2]
        self._deep = deep if self.kind == "rank1" else []
        self._vectors = _vectors(self.kind, self.bits, self.sizes, self._deep)
        self._flat: Tensor | None = None
        self._scales: dict[int, Tensor] = {}
        self._inputs = Inputs((), ())

    @property
    def reads_states(self) -> bool:
        """Whether `Inputs.states` are read."""
        return self.kind in ROWS_AND_COLUMNS

    def step(self, inputs: Inputs) -> None:
        """Step the entries."""
        self.begin(inputs)
        self.reduce()
        self.finalize_scales()
        self.update()
        self.end()

    def begin(self, inputs: Inputs) -> None:
        """Allocate the row and column buffers; write gradients and scalars to the table."""
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
        """Pass 1: rank-1's maxima, or factored's partial sums of squares; nothing for others."""

    def sums(self) -> list[Sums]:
        """Maxima or sums of pass 1, by entry."""
        if self.kind == "rank1":
            return [{"scale": self._new_scale(k)} for k in range(len(self.shapes))]
        each = zip(self._of("row_new"), self._of("col_new"), self.sizes, strict=True)
        return [
            {"row": row.view(-1, rows).sum(0), "col": col.view(-1, cols).sum(0)}
            for row, col, (rows, cols) in each
        ]

    def finalize_scales(self, whole: Sequence[Sums] | None = None) -> None:
        """Between the passes: scales and their reciprocals, or new factors and ratios of rows.

        Args:
            whole: Of tensors split over processes: `scale` of the whole, or the new factors'
                `mean`, which the states hold already.
        """
        states = self._inputs.states
        if self.kind == "rank1":
            self._invert_scales(whole)
        elif whole is not None:
            for state, row, found in zip(states, self._of("row_inv"), whole, strict=True):
                row.copy_(ratio(state[1]["row"], found["mean"]))
        elif self.kind == "factored":
            self._average()
        if self.bits == lloyd_max.BITS:  # roots, and their reciprocals
            rows, cols = self._part("row_inv"), self._part("col_old")
            rows.copy_(lloyd_max.root(rows))
            cols.copy_(lloyd_max.root(torch.cat([state[1]["col"] for state in states])))
            self._part("row_old").copy_(inverse(rows))
            self._part("col_inv").copy_(inverse(cols))

    def _invert_scales(self, whole: Sequence[Sums] | None) -> None:
        """Reciprocals of the new maxima, which lie where the first pass has left them."""
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
        """The maxima of every dimension from those of rows and flattened columns."""
        cols = self._of("col_new")[k]
        if k in self._deep:
            cols = rank1.maxima(cols.view(self.shapes[k][1:]))
        return torch.cat([self._of("row_new")[k], cols])

    def update(self) -> None:
        """Pass 2: decode, update, encode."""

    def end(self) -> None:
        """After the passes: new scales, and roots, into the states."""
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
        """Name of a vector -> the first element of each entry's, -1 where it has none."""
        found, begin = {}, 0
        for name, sizes in self._vectors.items():
            ends = begin + np.cumsum(sizes)
            found[name] = np.where(np.array(sizes) > 0, ends - sizes, -1)
            begin = int(ends[-1])
        return found

    def _part(self, first: str, last: str | None = None) -> Tensor:
        """One vector of all entries; or several, up to `last`."""
        names, sums = [*self._vectors], [*map(sum, self._vectors.values())]
        begin, end = names.index(first), names.index(last or first) + 1
        if self._flat is None:
            raise RuntimeError("a pass outside of a step")
        return self._flat.narrow(0, sum(sums[:begin]), sum(sums[begin:end]))

    def _of(self, name: str) -> Sequence[Tensor]:
        """A vector of each entry."""
        return self._part(name).split(self._vectors[name])

    def _average(self) -> None:
        """The kernels between the passes: new factors, and ratios of rows."""


def _vectors(
    kind: str, bits: int, sizes: Sequence[tuple[int, int]], deep: Sequence[int]
) -> dict[str, list[int]]:
    """Names of the passes' vectors of float32 -> the elements of each entry's."""
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
