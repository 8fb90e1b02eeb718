"""Tables and launches of the Triton step (kernels: `reduce_triton`, `step_triton`)."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memtrain.kernels.codebook import lloyd_max
from memtrain.kernels.device_guard import launch
from memtrain.kernels.step import lloyd_max_triton, reduce_triton, step_triton, table_triton
from memtrain.kernels.step.codecs import ROWS_AND_COLUMNS
from memtrain.kernels.step.groups import COLS, ROWS, EntryGroup, Inputs, elements, is_whole
from memtrain.kernels.step.step import (
    FIELDS,
    GRADIENT_FIELD,
    SCALARS,
    SCALARS_FIELD,
    SECOND,
    SEED_FIELD,
    Entry,
    table,
)
from memtrain.kernels.step.update_rules import COUNT, RULES, stacked_rows
from memtrain.kernels.step.update_rules_triton import EXACT

kernels: Any = step_triton  # launches take options that no signature shows
first_pass: Any = reduce_triton
two_bits: Any = lloyd_max_triton
GUARD_FIELD = table_triton.GUARD.value
VECTOR_FIELDS = {
    name: table_triton.ROW_OLD.value + k for k, name in enumerate(table_triton.VECTORS)
}
"""Vector of the passes -> its field in a row of the table."""


class TritonEntryGroup(EntryGroup):
    """The passes over contiguous parameters and gradients of one kind, with their kernels.

    The tables take 320 bytes per entry, on the device and on the host.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        super().__init__(entries)
        first, count = entries[0], len(entries)
        self._like = [
            torch.empty(0, dtype=x.dtype, device=self.device) for x in (first.param, first.grad)
        ]
        second, whole = SECOND.get(self.kind, 0), is_whole(first)
        constants = {"SECOND": second, "MASTER": first.master.mode, "WHOLE": whole}
        self._reduce_options = constants | first_pass.reduce_options(second, whole)
        self._update_options = _update_options(first, constants)
        self._each = elements(first)
        self._programs = self._count_programs()
        size = count * SCALARS // 8
        self._here, self._there = new_table(size + count * FIELDS, self.device)
        numbers = self._here.numpy()
        self._host_scalars = numbers[:size].view(np.float32).reshape(count, COUNT)
        self._rows = numbers[size:].reshape(count, FIELDS)
        self._table = self._there[size:].view(count, FIELDS)
        self._scalars = self._there[:size].view(torch.float32).view(count, COUNT)
        self._rows[:] = table(entries)
        self._rows[:, SCALARS_FIELD] = self._scalars.data_ptr() + SCALARS * np.arange(count)
        if self.kind == "rank1":
            scales = self._rows[:, table_triton.SECOND_STATE.value + 1]
            self._rows[:, VECTOR_FIELDS["row_old"]] = scales
            # in two dimensions
            self._rows[:, VECTOR_FIELDS["col_old"]] = (
                scales + 4 * self._rows[:, table_triton.N_ROWS.value]
            )
        self._offsets = self.offsets()

    def begin(self, inputs: Inputs) -> None:
        """As `EntryGroup.begin`; write this step's addresses, scalars and seeds to the table."""
        super().begin(inputs)
        first = 0 if self._flat is None else self._flat.data_ptr()
        for name, offsets in self._offsets.items():
            is_set = offsets >= 0
            self._rows[is_set, VECTOR_FIELDS[name]] = first + 4 * offsets[is_set]
        if inputs.seeds:
            self._rows[:, SEED_FIELD] = inputs.seeds
        if inputs.guards:
            self._rows[:, GUARD_FIELD] = [0 if g is None else g.data_ptr() for g in inputs.guards]
        self._host_scalars[:] = stacked_rows(inputs.scalars)
        self._rows[:, GRADIENT_FIELD] = [*map(Tensor.data_ptr, inputs.grads)]
        send(self._here, self._there)

    def reduce(self) -> None:
        """As `EntryGroup.reduce`."""
        programs = self._programs["reduce"]
        launch(
            first_pass._reduce_kernel,
            (len(programs),),
            programs,
            self._table,
            self._scalars,
            *self._like,
            **self._reduce_options,
        )

    def _average(self) -> None:
        mean, ratio = self._programs["mean"], self._programs["ratio"]
        launch(first_pass._mean_kernel, (len(mean),), mean, self._table, **EXACT)
        launch(first_pass._ratio_kernel, (len(ratio),), ratio, self._table, **EXACT)

    def update(self) -> None:
        """As `EntryGroup.update`."""
        programs = self._programs["update"]
        of_two_bits = self.bits == lloyd_max.BITS
        launch(
            two_bits._update_kernel if of_two_bits else kernels._update_kernel,
            (len(programs),),
            programs,
            self._table,
            *self._like,
            **self._update_options,
        )

    def _count_programs(self) -> dict[str, Tensor]:
        counts = {"update": [-(-rows * cols // self._each) for rows, cols in self.sizes]}
        if self.kind in ROWS_AND_COLUMNS:
            counts["reduce"] = [-(-rows // ROWS) * -(-cols // COLS) for rows, cols in self.sizes]
        if self.kind == "factored":
            counts["mean"] = [-(-rows // 128) - (-cols // 128) for rows, cols in self.sizes]
            counts["ratio"] = [-(-rows // first_pass.PIECE.value) for rows, _ in self.sizes]
        return {name: programs(tuple(each), self.device) for name, each in counts.items()}


def new_table(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate int64 numbers for kernels, on the host and on the device."""
    numbers = torch.zeros(size, dtype=torch.int64, device="cpu")
    return numbers, torch.empty_like(numbers, device=device)


def send(numbers: Tensor, to: Tensor) -> None:
    """Copy from the host to a device without a wait; the host may rewrite `numbers` at once."""
    to.copy_(sendable(numbers, to.device), non_blocking=True)


def sendable(numbers: Tensor, device: torch.device) -> Tensor:
    """Return numbers for `send`: for a GPU in pinned memory, reused only after the copy."""
    pinned = device.type == "cuda" and not isinstance(numbers, FakeTensor)
    return numbers.pin_memory() if pinned else numbers


def _update_options(first: Entry, constants: dict[str, Any]) -> dict[str, Any]:
    """Return constants and options of the update's launch."""
    size, whole = first.codecs[0].block if first.codecs else 128, constants["WHOLE"]
    options = {"COUNT": elements(first) // size, "HALF": size // 2}
    if first.bits == lloyd_max.BITS:
        options |= {name: constants[name] for name in ("MASTER", "WHOLE")}
        float16 = first.param.dtype == torch.float16
        return options | two_bits.options(whole, first.master.mode, float16)
    options |= constants | {"RULE": list(RULES).index(first.rule)}
    options |= {"STATES": len(first.codecs), "BITS": first.bits, "DRAWS": first.draws}
    narrow = first.param.itemsize < 4
    second = constants["SECOND"]
    return options | kernels.update_options(first.bits, second, whole, narrow, first.draws)


@lru_cache(maxsize=256)
def programs(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the tensor and its chunk for each program: int32, [sum(counts), 2].

    `counts` are the chunks of each tensor.

    Example:
        >>> programs((1, 2), torch.device("cpu")).tolist()
        [[0, 0], [1, 0], [1, 1]]
    """
    each = torch.tensor(counts, device="cpu")
    tensor = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), each)
    chunk = torch.arange(len(tensor), device="cpu") - (each.cumsum(0) - each)[tensor]
    found = torch.stack([tensor, chunk], dim=1).int()
    return found.to(device)  # at once: launches of other streams find it too
