"""Tables and launches of the Triton step (kernels: `reduce_triton`, `step_triton`)."""

from array import array
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from memtrain.kernels.codebook import lloyd_max
from memtrain.kernels.device_guard import launch
from memtrain.kernels.step import lloyd_max_triton, reduce_triton, step_triton, table_triton
from memtrain.kernels.step.codecs import ROWS_AND_COLUMNS, upper_buckets
from memtrain.kernels.step.cuda_graph import GraphTables
from memtrain.kernels.step.passes import Passes, alike, groups_of
from memtrain.kernels.step.program_sizes import COLS, ROWS, elements, is_whole
from memtrain.kernels.step.step import FIELDS, SCALARS, SECOND, Entry, table_row
from memtrain.kernels.step.update_rules import COUNT, RULES, stacked
from memtrain.kernels.step.update_rules_triton import EXACT
from memtrain.kernels.step.uploads import DeviceTable

kernels: Any = step_triton  # launches take options that no signature shows
first_pass: Any = reduce_triton
two_bits: Any = lloyd_max_triton
_HOST = torch.device("cpu")


def step(entries: Sequence[Entry], tables: GraphTables | None = None) -> None:
    """`step.fused_step` for contiguous parameters: a few launches for each kind and dtype."""
    for group in groups_of(entries):
        launch_of(group, tables).run()


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
        params = [entry.param.data_ptr() for entry in entries]
        passes = tables.get((kind, *map(_held, entries)), lambda: Launch(entries), params)
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


class Launch(Passes):
    """The passes over contiguous parameters of one kind and dtype, with their kernels.

    Args:
        entries: As `step.fused_step` takes them; their gradients are contiguous.
        table: Of the same parameters' last step.
    """

    def __init__(self, entries: list[Entry], table: DeviceTable | None = None) -> None:
        super().__init__(entries)
        first = entries[0]
        self.device = first.param.device
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
        """As `Passes.renew`."""
        super().renew(entries)
        self._scalars.copy_(stacked([entry.scalars for entry in entries], self.device))
        table_triton.point(self._table, table_triton.G.value, [entry.grad for entry in entries])

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

    def _reduce(self, some: Tensor | None) -> None:
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

    def _average(self) -> None:
        mean = self._programs["mean"]
        launch(first_pass._mean_kernel, (len(mean),), mean, self._table, **EXACT)
        launch(first_pass._ratio_kernel, (len(self.entries),), self._table, **EXACT)

    def _update(self, some: Tensor | None) -> None:
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
    found = torch.stack([tensor, chunk], dim=1).int()
    return found.to(device)  # at once: launches of other streams find it too
