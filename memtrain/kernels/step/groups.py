"""Entries that one set of kernels steps together: their vectors, and what torch makes of them."""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from memtrain.kernels import cpu
from memtrain.kernels.codebook import lloyd_max, rank1
from memtrain.kernels.codebook.quantize import inverse
from memtrain.kernels.step.codecs import ROWS_AND_COLUMNS, Payload, ratio
from memtrain.kernels.step.program_sizes import factored_vectors, is_whole
from memtrain.kernels.step.step import (
    GRADIENT_FIELD,
    SCALARS,
    SCALARS_FIELD,
    SEED_FIELD,
    Entry,
    Sums,
    cpu_table,
)
from memtrain.kernels.step.update_rules import Scalars, stacked_rows


class Inputs(NamedTuple):
    """What changes from step to step, one value per entry."""

    grads: Sequence[Tensor]
    scalars: Sequence[Scalars | Tensor]
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
    """Equal for entries that one `Group` steps."""
    p, on_device = entry.param, isinstance(entry.scalars, Tensor)
    kind = entry.rule, entry.bits, entry.form, entry.master.form
    return p.device, p.dtype, entry.grad.dtype, kind, on_device, is_whole(entry)


class CpuGroup:
    """Entries that one C++ call steps.

    Args:
        entries: With contiguous parameters and gradients, on the CPU, without guards.

    Memory:
        256 bytes per entry; no tensor is kept alive.
    """

    reads_states = False

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._table = cpu_table(entries)
        masters = [entry.master for entry in entries]
        drawn = [master.stochastic and master.tick is None for master in masters]
        self._drawn = np.array(drawn) if any(drawn) else None

    def step(self, inputs: Inputs) -> None:
        """Step the entries."""
        self._table[:, GRADIENT_FIELD] = [*map(Tensor.data_ptr, inputs.grads)]
        if self._drawn is not None:
            self._table[self._drawn, SEED_FIELD] = np.array(inputs.seeds)[self._drawn]
        scalars = stacked_rows(inputs.scalars)
        at = scalars.ctypes.data + SCALARS * np.arange(len(scalars))
        self._table[:, SCALARS_FIELD] = at
        cpu.call("mt_step", self._table.ctypes.data, len(self._table))


class Group:
    """The passes over contiguous parameters of one kind and dtype, without kernels.

    Args:
        entries: For which `same_kernels` are equal; no tensor of them is kept alive.

    Memory:
        For the time of a step, with rank-1 and factored states, vectors of rows and columns: 3/64
        byte per element, factored. Where scalars are on the device, a CUDA graph may have captured
        the step, and the vectors stay.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        first = entries[0]
        self.form, self.bits, self.device = first.form, first.bits, first.param.device
        self.captured = isinstance(first.scalars, Tensor)
        """Whether a CUDA graph may replay the step, so that nothing that it reads may move."""
        self.shapes = [entry.param.shape for entry in entries]
        self._deep = [k for k, shape in enumerate(self.shapes) if len(shape) != 2]
        self._deep = self._deep if self.form == "rank1" else []
        self._buffers = _buffers(entries)
        self._flat: dict[str, Tensor] = {}
        self._scales: dict[int, Tensor] = {}
        self._inputs = Inputs((), ())

    @property
    def reads_states(self) -> bool:
        """Whether `Inputs.states` are read."""
        return self.form in ROWS_AND_COLUMNS

    def step(self, inputs: Inputs) -> None:
        """Step the entries."""
        self.begin(inputs)
        self.reduce()
        self.finalize_scales()
        self.update()
        self.end()

    def begin(self, inputs: Inputs) -> None:
        """Make the vectors, and let kernels find what is new in this step."""
        self._inputs = inputs
        if self._flat and self.captured:
            if "new" in self._flat:
                self._flat["new"].zero_()
        else:
            make = {True: torch.zeros, False: torch.empty}
            self._flat = {
                name: make[buffer.zeros](buffer.total, device=self.device)
                for name, buffer in self._buffers.items()
            }
        for k in self._deep:
            scale = inputs.states[k][1]["scale"]
            self._vector("col_old", k).copy_(rank1.columns(scale, self.shapes[k]))

    def reduce(self, some: Tensor | None = None) -> None:
        """Pass 1: rank-1's maxima, or factored's partial sums of squares; nothing for others.

        Args:
            some: Programs of `TritonGroup.rows`; all by default.
        """
        if self.form in ROWS_AND_COLUMNS:
            self._reduce(some)

    def sums(self) -> list[Sums]:
        """Maxima or sums of pass 1, by entry."""
        if self.form == "rank1":
            return [{"scale": self._new_scale(k)} for k in range(len(self.shapes))]
        matrices = [(shape[0], shape[1:].numel()) for shape in self.shapes]
        return [
            {
                "row": self._vector("row_new", k).view(-1, rows).sum(0),
                "col": self._vector("col_new", k).view(-1, cols).sum(0),
            }
            for k, (rows, cols) in enumerate(matrices)
        ]

    def finalize_scales(self, whole: Sequence[Sums] | None = None) -> None:
        """Between the passes: scales and their reciprocals, or new factors and ratios of rows.

        Args:
            whole: Of tensors split over processes: `scale` of the whole, or the new factors'
                `mean`, which the states hold already.
        """
        if self.form == "rank1":
            self._invert_scales(whole)
        elif whole is not None:
            for k, found in enumerate(whole):
                row = self._inputs.states[k][1]["row"]
                self._vector("row_inv", k).copy_(ratio(row, found["mean"]))
        elif self.form == "factored":
            self._average()
        if self.bits == lloyd_max.BITS:
            self._take_roots()

    def _invert_scales(self, whole: Sequence[Sums] | None) -> None:
        """Reciprocals of the new maxima, which lie where the first pass has left them."""
        new = self._flat["new"]
        if whole is None:
            self._scales = {k: self._new_scale(k) for k in self._deep}
        else:
            self._scales = {k: sums["scale"] for k, sums in enumerate(whole)}
        for k, scale in self._scales.items():
            rows = self.shapes[k][0]
            self._vector("row_new", k).copy_(scale[:rows])
            self._vector("col_new", k).copy_(rank1.columns(scale, self.shapes[k]))
        self._flat["inv"].copy_(rank1.inverse(new))

    def _new_scale(self, k: int) -> Tensor:
        """The maxima of every dimension from those of rows and flattened columns."""
        if k not in self._deep:  # which lie beside each other
            return self._buffers["new"].both(self._flat["new"], k)
        cols = rank1.maxima(self._vector("col_new", k).view(self.shapes[k][1:]))
        return torch.cat([self._vector("row_new", k), cols])

    def _take_roots(self) -> None:
        """Roots of the new factors in place of ratios and beside columns, and reciprocals."""
        states = self._inputs.states
        parts = self._buffers["roots"].split(self._flat["roots"])
        given = [(parts[2 * k], states[k][1]["col"]) for k in range(len(states))]
        flat = lloyd_max.root(torch.cat([x for pair in given for x in pair]))
        self._flat["roots"].copy_(flat)
        self._flat["inverses"].copy_(inverse(flat))

    def update(self, some: Tensor | None = None) -> None:
        """Pass 2: decode, update, encode.

        Args:
            some: Programs of `TritonGroup.rows`; all by default.
        """
        self._update(some)

    def end(self) -> None:
        """After the passes: new scales, and roots, into the states."""
        states, guards = self._inputs.states, self._inputs.guards
        if self.form == "rank1":
            kept = [both[:n] for both, n in zip(self._split_scales(), self._lengths(), strict=True)]
            for k, scale in self._scales.items():
                kept[k] = scale
            scales = [state[1]["scale"] for state in states]
            for k, guard in enumerate(guards):
                if guard is not None:
                    kept[k] = torch.where(guard < math.inf, kept[k], scales[k])
            torch._foreach_copy_(scales, kept)
        if self.bits == lloyd_max.BITS:
            rows_and_columns = [state[0][name] for state in states for name in ("row", "col")]
            roots = self._buffers["roots"].split(self._flat["roots"])
            torch._foreach_copy_(rows_and_columns, roots)
        self._inputs, self._scales = Inputs((), ()), {}
        if not self.captured:
            self._flat = {}

    def _split_scales(self) -> list[Tensor]:
        buffer = self._buffers["new"]
        parts = buffer.sizes.sum(1).tolist()
        return list(self._flat["new"].split(parts))

    def _lengths(self) -> list[int]:
        """Elements of each entry's scale, where it has two dimensions."""
        return [sum(shape) if len(shape) == 2 else 0 for shape in self.shapes]

    def _vector(self, name: str, k: int) -> Tensor:
        """A vector of one entry."""
        for key, buffer in self._buffers.items():
            if name in buffer.names:
                return buffer.one(self._flat[key], name, k)
        raise KeyError(name)

    def _reduce(self, some: Tensor | None) -> None:
        """The kernel of pass 1."""

    def _average(self) -> None:
        """The kernels between the passes: new factors, and ratios of rows."""

    def _update(self, some: Tensor | None) -> None:
        """The kernel of pass 2."""


class Buffer:
    """One tensor for some vectors of all entries, entry by entry.

    Args:
        names: Of an entry's vectors, in order.
        sizes: int64, [entries, names]: elements of each.
        zeros: Whether they begin at zero.
    """

    def __init__(self, names: tuple[str, ...], sizes: Any, *, zeros: bool = False) -> None:
        self.names, self.sizes, self.zeros = names, np.array(sizes, np.int64), zeros
        ends = self.sizes.reshape(-1).cumsum()
        self.total = int(ends[-1])
        self.offsets = (ends - self.sizes.reshape(-1)).reshape(self.sizes.shape)

    def one(self, flat: Tensor, name: str, k: int) -> Tensor:
        """A vector of an entry."""
        at = self.names.index(name)
        return flat.narrow(0, int(self.offsets[k, at]), int(self.sizes[k, at]))

    def both(self, flat: Tensor, k: int) -> Tensor:
        """All vectors of an entry, one after the other."""
        return flat.narrow(0, int(self.offsets[k, 0]), int(self.sizes[k].sum()))

    def split(self, flat: Tensor) -> list[Tensor]:
        """Every vector, entry by entry."""
        return list(flat.split(self.sizes.reshape(-1).tolist()))


def _buffers(entries: Sequence[Entry]) -> dict[str, Buffer]:
    """The vectors of the passes, of float32."""
    form = entries[0].form
    matrices = [entry.matrix for entry in entries]
    if form == "rank1":
        found = {
            "new": Buffer(("row_new", "col_new"), matrices, zeros=True),
            "inv": Buffer(("row_inv", "col_inv"), matrices),
        }
        deep = [[0 if entry.param.dim() == 2 else entry.matrix[1]] for entry in entries]
        return found | ({"old": Buffer(("col_old",), deep)} if any(map(any, deep)) else {})
    if form != "factored":
        return {}
    vectors = [factored_vectors(entry) for entry in entries]
    names: dict[str, tuple[str, ...]] = {"sums": ("row_new", "col_new"), "roots": ("row_inv",)}
    if entries[0].bits == lloyd_max.BITS:
        names |= {"roots": ("row_inv", "col_old"), "inverses": ("row_old", "col_inv")}
    return {
        key: Buffer(own, [[each[name] for name in own] for each in vectors])
        for key, own in names.items()
    }
