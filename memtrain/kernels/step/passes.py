"""The passes of the Triton step but for its kernels: vectors, and what torch makes of them."""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import partial

import torch
from torch import Tensor

from memtrain.kernels.codebook import lloyd_max, rank1
from memtrain.kernels.codebook.quantize import inverse
from memtrain.kernels.dispatch import backend_of
from memtrain.kernels.step.codecs import ROWS_AND_COLUMNS, ratio
from memtrain.kernels.step.cuda_graph import GraphTables
from memtrain.kernels.step.program_sizes import factored_vectors, is_whole
from memtrain.kernels.step.step import (
    Entry,
    Sums,
    fits,
    fits_copied,
    step_copied,
    step_reference,
)


def simulate(given: Sequence[Entry], tables: GraphTables | None = None) -> None:
    """Allocate what a step of fake tensors holds on a device while it runs; nothing is updated.

    Args:
        given: As of `step.fused_step`; parts of tensors that are split over processes are left out.
        tables: Keep the vectors of steps that a CUDA graph may capture.

    Memory:
        Of a step that is simulated for CUDA the vectors of the passes; copies of what is not
        contiguous; the reference's temporaries where it serves.
    """
    served: list[Entry] = []
    for entry in given:
        if entry.shard is not None or not entry.param.numel():
            continue
        if backend_of(entry.param) == "reference" or not (fits(entry) or fits_copied(entry)):
            step_reference(entry)
        elif fits(entry):
            served.append(entry._replace(grad=entry.grad.contiguous()))
        else:
            step_copied(entry, _simulate)
    _simulate(served, tables)


def _simulate(entries: Sequence[Entry], tables: GraphTables | None = None) -> None:
    """Allocate what the kernels' wrappers do for contiguous entries."""
    for group in groups_of([e for e in entries if backend_of(e.param) == "triton"]):
        if tables is None or not isinstance(group[0].scalars, Tensor):
            Passes(group).run()
            continue
        storages = [entry.param.untyped_storage()._cdata for entry in group]
        passes = tables.get((alike(group[0]), *storages), partial(Passes, group), storages)
        passes.renew(group)
        passes.run()


def groups_of(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries that are alike, together."""
    groups: dict[object, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[alike(entry)].append(entry)
    return [*groups.values()]


def alike(entry: Entry) -> Hashable:
    """Equal for entries that one `Launch` serves."""
    p, on_device = entry.param, isinstance(entry.scalars, Tensor)
    kind = entry.rule, entry.bits, entry.form, entry.master.form
    return p.device, p.dtype, entry.grad.dtype, kind, on_device, is_whole(entry)


class Passes:
    """The passes over contiguous parameters of one kind and dtype, without kernels.

    Args:
        entries: As `step.fused_step` takes them; their gradients are contiguous.

    Memory:
        Of rank-1 and factored states vectors of rows and columns: 3/64 byte an element, factored.
    """

    def __init__(self, entries: list[Entry]) -> None:
        self.entries, self.form = entries, entries[0].form
        self._vectors = _VECTORS.get(self.form, lambda entries: [{}] * len(entries))(entries)

    def renew(self, entries: list[Entry]) -> None:
        """For another step of entries that hold the same tensors, but for gradients."""
        self.entries = entries
        if self.form != "rank1":
            return
        torch._foreach_zero_([v[name] for v in self._vectors for name in ("row_new", "col_new")])
        for entry, vectors in zip(entries, self._vectors, strict=True):
            shape = entry.param.shape
            if len(shape) != 2:  # else it is a part of the scales themselves
                vectors["col_old"].copy_(rank1.columns(entry.states[1]["scale"], shape))

    def run(self) -> None:
        """All of the step."""
        self.reduce()
        self.finalize_scales()
        self.update()

    def reduce(self, some: Tensor | None = None) -> None:
        """Pass 1: rank-1's maxima, or factored's partial sums of squares; nothing for others.

        Args:
            some: Programs of `Launch.rows`; all by default.
        """
        if self.form in ROWS_AND_COLUMNS:
            self._reduce(some)
        if self.form == "rank1":
            _join_maxima(self.entries, self._vectors)

    def sums(self) -> list[Sums]:
        """Maxima or sums of pass 1, by entry."""
        if self.form == "rank1":
            return [{"scale": vectors["scale"]} for vectors in self._vectors]
        return [
            {
                "row": vectors["row_new"].view(-1, entry.matrix[0]).sum(0),
                "col": vectors["col_new"].view(-1, entry.matrix[1]).sum(0),
            }
            for vectors, entry in zip(self._vectors, self.entries, strict=True)
        ]

    def finalize_scales(self, whole: Sequence[Sums] | None = None) -> None:
        """Between the passes: scales and their reciprocals, or new factors and ratios of rows.

        Args:
            whole: Of tensors split over processes: `scale` of the whole, or the new factors'
                `mean`, which the entries hold already.
        """
        if self.form == "rank1":
            self._invert_scales([] if whole is None else whole)
        elif whole is not None:
            for entry, vectors, found in zip(self.entries, self._vectors, whole, strict=True):
                vectors["row_inv"].copy_(ratio(entry.states[1]["row"], found["mean"]))
        elif self.form == "factored":
            self._average()
        if self.entries[0].bits == lloyd_max.BITS:
            self._take_roots()

    def _take_roots(self) -> None:
        """Roots of the new factors in place of ratios and beside columns, and reciprocals."""
        given, roots, inverses = [], [], []
        for entry, vectors in zip(self.entries, self._vectors, strict=True):
            given += (vectors["row_inv"], entry.states[1]["col"])
            roots += (vectors["row_inv"], vectors["col_old"])
            inverses += (vectors["row_old"], vectors["col_inv"])
        flat, sizes = lloyd_max.root(torch.cat(given)), [t.numel() for t in given]
        torch._foreach_copy_(roots, list(flat.split(sizes)))
        torch._foreach_copy_(inverses, list(inverse(flat).split(sizes)))

    def _invert_scales(self, whole: Sequence[Sums]) -> None:
        targets: list[Tensor] = []
        scales: list[Tensor] = []
        for k, (entry, vectors) in enumerate(zip(self.entries, self._vectors, strict=True)):
            if whole:
                vectors["scale"] = whole[k]["scale"]
            shape, scale = entry.param.shape, vectors["scale"]
            targets += (vectors["row_inv"], vectors["col_inv"])
            scales += (scale[: shape[0]], rank1.columns(scale, shape))
        # One vector for all tensors: three launches instead of three for each.
        flat = rank1.inverse(torch.cat(scales))
        torch._foreach_copy_(targets, list(flat.split([t.numel() for t in scales])))

    def update(self, some: Tensor | None = None) -> None:
        """Pass 2: decode, update, encode.

        Args:
            some: Programs of `Launch.rows`, after the last of which `keep` is called; all by
                default.
        """
        self._update(some)
        if some is None:
            self.keep()

    def keep(self) -> None:
        """After the passes: new scales, and roots, into the states."""
        if self.form == "rank1":
            scales = [entry.states[1]["scale"] for entry in self.entries]
            torch._foreach_copy_(scales, [*map(_kept_scale, self.entries, self._vectors)])
        if self.entries[0].bits == lloyd_max.BITS:
            kept = [entry.states[0][name] for entry in self.entries for name in ("row", "col")]
            roots = [vectors[name] for vectors in self._vectors for name in ("row_inv", "col_old")]
            torch._foreach_copy_(kept, roots)
        self.entries = []  # a launch that a graph holds has no gradients

    def _reduce(self, some: Tensor | None) -> None:
        """The kernel of pass 1."""

    def _average(self) -> None:
        """The kernels between the passes: new factors, and ratios of rows."""

    def _update(self, some: Tensor | None) -> None:
        """The kernel of pass 2."""


def _rank1_vectors(entries: list[Entry]) -> list[dict[str, Tensor]]:
    """Vectors of rows and columns for the two passes; the new maxima start at zero."""
    device = entries[0].param.device
    sizes = [n for entry in entries for n in entry.matrix]
    new = torch.zeros(sum(sizes), device=device).split(sizes)
    inv = torch.empty(sum(sizes), device=device).split(sizes)
    found = []
    for k, entry in enumerate(entries):
        shape, scale = entry.param.shape, entry.states[1]["scale"]
        cols = scale[shape[0] :] if len(shape) == 2 else rank1.columns(scale, shape)
        vectors = {"row_old": scale[: shape[0]], "col_old": cols}
        vectors |= {"row_inv": inv[2 * k], "col_inv": inv[2 * k + 1]}
        found.append(vectors | {"row_new": new[2 * k], "col_new": new[2 * k + 1]})
    return found


def _factored_vectors(entries: list[Entry]) -> list[dict[str, Tensor]]:
    """Partial sums, and the ratios of rows."""
    found = []
    for entry in entries:
        like, sizes = entry.states[1]["row"], factored_vectors(entry)
        found.append({name: like.new_empty(size) for name, size in sizes.items()})
    return found


_VECTORS = {"rank1": _rank1_vectors, "factored": _factored_vectors}


def _kept_scale(entry: Entry, vectors: dict[str, Tensor]) -> Tensor:
    """Rank-1's new scale; the old one where a guard is not finite."""
    if entry.guard is None:
        return vectors["scale"]
    return torch.where(entry.guard < math.inf, vectors["scale"], entry.states[1]["scale"])


def _join_maxima(entries: list[Entry], found: list[dict[str, Tensor]]) -> None:
    """The maxima of every dimension from those of rows and flattened columns."""
    for entry, vectors in zip(entries, found, strict=True):
        shape, col_new = entry.param.shape, vectors["col_new"]
        cols = col_new if len(shape) == 2 else rank1.maxima(col_new.view(shape[1:]))
        vectors["scale"] = torch.cat([vectors["row_new"], cols])
