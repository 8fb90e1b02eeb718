"""Tables and launches of the Triton step (kernels: `reduce_triton`, `step_triton`)."""

import math
from array import array
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from memtrain.kernels.codebook import lloyd_max, rank1
from memtrain.kernels.codebook.quantize import inverse
from memtrain.kernels.device_guard import launch
from memtrain.kernels.step import lloyd_max_triton, reduce_triton, step_triton, table_triton
from memtrain.kernels.step.codecs import ROWS_AND_COLUMNS, ratio, upper_buckets
from memtrain.kernels.step.cuda_graph import GraphTables
from memtrain.kernels.step.program_sizes import COLS, ROWS, elements, factored_vectors, is_whole
from memtrain.kernels.step.step import FIELDS, SCALARS, SECOND, Entry, Sums, table_row
from memtrain.kernels.step.update_rules import COUNT, RULES, stacked
from memtrain.kernels.step.update_rules_triton import EXACT
from memtrain.kernels.step.uploads import DeviceTable, send

kernels: Any = step_triton  # launches take options that no signature shows
first_pass: Any = reduce_triton
two_bits: Any = lloyd_max_triton
_HOST = torch.device("cpu")


def step(entries: Sequence[Entry], tables: GraphTables | None = None) -> None:
    """`step.fused_step` for contiguous parameters: a few launches for each kind and dtype."""
    groups: dict[object, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[alike(entry)].append(entry)
    for group in groups.values():
        passes = launch_of(group, tables)
        passes.reduce()
        passes.finalize_scales()
        passes.update()


def alike(entry: Entry) -> Hashable:
    """Equal for entries that one `Launch` serves."""
    p, on_device = entry.param, isinstance(entry.scalars, Tensor)
    kind = entry.rule, entry.bits, entry.form, entry.master.form
    return p.device, p.dtype, entry.grad.dtype, kind, on_device, is_whole(entry)


def launch_of(entries: list[Entry], tables: GraphTables | None) -> "Launch":
    """A launch for entries that are alike; of its tables only what has changed travels.

    Args:
        entries: As `Launch` takes them.
        tables: Keep what was made for the same parameters before, for the launch itself where a
            graph may have captured it. Without: all is new.
    """
    if tables is None:
        return Launch(entries)
    kind = alike(entries[0])
    if isinstance(entries[0].scalars, Tensor):
        passes = tables.get((kind, *map(_held, entries)), lambda: Launch(entries))
        passes.renew(entries)
        return passes
    size = len(entries) * (SCALARS // 8 + FIELDS)
    key = kind, *[entry.param.data_ptr() for entry in entries]
    return Launch(entries, tables.table(key, size, entries[0].param.device))


def _held(entry: Entry) -> Hashable:
    """Key of an entry in a launch's tables: its tensors, besides its gradient."""
    tensors = [entry.param, *(part for state in entry.states for part in state.values())]
    guard = None if entry.guard is None else entry.guard.data_ptr()
    own = (entry.codecs, tuple(entry.param.shape), *entry.master.device_fields(), guard)
    return (*own, *(tensor.data_ptr() for tensor in tensors))


class Launch:
    """The passes over contiguous parameters of one kind and dtype.

    Args:
        entries: As `step.fused_step` takes them; their gradients are contiguous.
        table: Of the same parameters' last step.
    """

    def __init__(self, entries: list[Entry], table: DeviceTable | None = None) -> None:
        self.entries = entries
        first = entries[0]
        self.form, self.device = first.form, first.param.device
        self._vectors = _VECTORS.get(self.form, lambda entries: [{}] * len(entries))(entries)
        self._scalars, self._table = self._send(table)
        self._reduce_form = {"SECOND": SECOND.get(self.form, 0), "MASTER": first.master.form}
        self._reduce_form["WHOLE"] = is_whole(first)
        size = first.codecs[0].block if first.codecs else 128
        self._each = elements(first)
        count = self._each // size
        states, second = len(first.codecs), self._reduce_form["SECOND"]
        self._update_form = {"COUNT": count, "HALF": size // 2}
        if first.bits == lloyd_max.BITS:
            self._update_form |= {name: self._reduce_form[name] for name in ("MASTER", "WHOLE")}
            float16 = first.param.dtype == torch.float16
            self._update_form |= two_bits.options(is_whole(first), first.master.form, float16)
        else:
            self._update_form |= self._reduce_form
            self._update_form["RULE"] = list(RULES).index(first.rule)
            self._update_form |= {"STATES": states, "BITS": first.bits}
            self._update_form |= kernels.update_options(
                first.bits, second, is_whole(first), first.param.itemsize < 4
            )
        self._programs = self._count_programs()

    def rows(self, name: str, begin: int, piece: Tensor) -> Tensor:
        """Programs of a pass, `reduce` or `update`, over some rows of the one entry.

        Args:
            name: The pass.
            begin: The first row, a multiple of `rows_together`.
            piece: The gradient of these rows, contiguous, on 16 bytes; it is not kept alive.
                Kernels are told where the first row of all would be.
        """
        (entry,) = self.entries
        cols = entry.matrix[1]
        end = begin + len(piece)
        place = self._table[0, table_triton.G.value]
        place.fill_(piece.data_ptr() - begin * cols * piece.itemsize)
        if name == "update":
            return self._programs[name][begin * cols // self._each : -(-end * cols // self._each)]
        across, down = -(-cols // COLS), ROWS
        return self._programs[name][begin // down * across : -(-end // down) * across]

    def renew(self, entries: list[Entry]) -> None:
        """For another step of entries that hold the same tensors, but for gradients."""
        self.entries = entries
        self._scalars.copy_(stacked([entry.scalars for entry in entries], self.device))
        table_triton.point(self._table, table_triton.G.value, [entry.grad for entry in entries])
        if self.form != "rank1":
            return
        torch._foreach_zero_([v[name] for v in self._vectors for name in ("row_new", "col_new")])
        for entry, vectors in zip(entries, self._vectors, strict=True):
            shape = entry.param.shape
            if len(shape) != 2:  # else it is a part of the scales themselves
                vectors["col_old"].copy_(rank1.columns(entry.states[1]["scale"], shape))

    def _send(self, table: DeviceTable | None) -> tuple[Tensor, Tensor]:
        """Scalars, float32 [entries, COUNT], and the table, int64 [entries, FIELDS]."""
        count, numbers = len(self.entries), [entry.scalars for entry in self.entries]
        own = 0 if isinstance(numbers[0], Tensor) else count * SCALARS // 8
        if table is None:
            table = DeviceTable(own + count * FIELDS, self.device)
        if own:
            scalars = table.numbers[:own].view(torch.float32).view(count, COUNT)
        else:
            scalars = stacked(numbers, self.device)
        rows = torch.frombuffer(self._rows(scalars.data_ptr()), dtype=torch.int64)
        if own:
            rows = torch.cat([stacked(numbers, _HOST).view(-1).view(torch.int64), rows])
        table.write(rows, own)
        return scalars, table.numbers[own:].view(count, FIELDS)

    def _rows(self, first: int) -> "array[int]":
        """The rows of the table, given the address of the scalars."""
        rows, places = array("q"), (table_triton.FIRST, table_triton.SECOND_STATE)
        for k, (entry, vectors) in enumerate(zip(self.entries, self._vectors, strict=True)):
            row = table_row(entry, first + k * SCALARS, entry.master.device_fields())
            row += [vectors[n].data_ptr() if n in vectors else 0 for n in table_triton.VECTORS]
            row.append(0 if entry.guard is None else entry.guard.data_ptr())
            for codec, state in zip(entry.codecs, places, strict=False):
                if codec.form in ("block", "rank1"):
                    row[state.value + 3] = upper_buckets(codec, self.device).data_ptr()
            rows.extend((*row, *(0,) * (FIELDS - len(row))))
        return rows

    def _count_programs(self) -> dict[str, Tensor]:
        sizes = [entry.matrix for entry in self.entries]
        counts = {"update": [-(-rows * cols // self._each) for rows, cols in sizes]}
        if self.form in ROWS_AND_COLUMNS:
            counts["reduce"] = [-(-rows // ROWS) * -(-cols // COLS) for rows, cols in sizes]
        if self.form == "factored":
            counts["mean"] = [-(-rows // 128) - (-cols // 128) for rows, cols in sizes]
        return {name: programs(tuple(each), self.device) for name, each in counts.items()}

    def _like(self) -> tuple[Tensor, Tensor]:
        return self.entries[0].param, self.entries[0].grad

    def reduce(self, some: Tensor | None = None) -> None:
        """Pass 1: rank-1's maxima, or factored's partial sums of squares; nothing for others.

        Args:
            some: Programs of `rows`; all by default.
        """
        if self.form not in ROWS_AND_COLUMNS:
            return
        reduce = self._programs["reduce"] if some is None else some
        launch(
            first_pass._reduce_kernel,
            (len(reduce),),
            reduce,
            self._table,
            self._scalars,
            *self._like(),
            **self._reduce_form,
            **first_pass.reduce_options(self._reduce_form["SECOND"], self._reduce_form["WHOLE"]),
        )
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
            mean = self._programs["mean"]
            launch(first_pass._mean_kernel, (len(mean),), mean, self._table, **EXACT)
            launch(first_pass._ratio_kernel, (len(self.entries),), self._table, **EXACT)
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
            some: Programs of `rows`, after the last of which `keep` is called; all by default.
        """
        update = self._programs["update"] if some is None else some
        of_two_bits = self.entries[0].bits == lloyd_max.BITS
        launch(
            two_bits._update_kernel if of_two_bits else kernels._update_kernel,
            (len(update),),
            update,
            self._table,
            *self._like(),
            **self._update_form,
        )
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


@lru_cache(maxsize=256)
def programs(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """The block table: which tensor, and which chunk of it, each program works on.

    Args:
        counts: Chunks of each tensor.
        device: Where the kernel runs.

    Returns:
        int32, [sum(counts), 2].

    Example:
        >>> programs((1, 2), torch.device("cpu")).tolist()
        [[0, 0], [1, 0], [1, 1]]
    """
    each = torch.tensor(counts, device="cpu")
    tensor = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), each)
    chunk = torch.arange(len(tensor), device="cpu") - (each.cumsum(0) - each)[tensor]
    found = torch.empty(len(tensor), 2, dtype=torch.int32, device=device)
    send(torch.stack([tensor, chunk], dim=1).int(), found)
    return found


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
