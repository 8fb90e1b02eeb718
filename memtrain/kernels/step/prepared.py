"""Kernel tables of an optimizer step, prepared once: later steps update gradients and scalars."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor

from memtrain.kernels.dispatch import backend_of, choose, is_simulated
from memtrain.kernels.step.codecs import ROWS_AND_COLUMNS
from memtrain.kernels.step.groups import CpuEntryGroup, EntryGroup, Inputs, inputs_of, same_kernels
from memtrain.kernels.step.step import (
    Entry,
    check_entry,
    is_contiguous,
    is_supported,
    step_reference,
)

LIMIT = 8
"""Prepared steps per first parameter."""
MOST = 2**14
"""First parameters of prepared steps: with released gradients each parameter is one."""


class PreparedStep:
    """Kernel tables of an optimizer step: decompress the states, update, compress them again.

    The update uses the new states before they are quantized (factored: the new second moment as its
    factors give it), in float32, and rounds the parameter once, to the nearest value of its dtype.
    One C++ call (CPU), or a few launches per kind of entry (CUDA), update all contiguous parameters
    in float32, bfloat16 and float16. For other layouts (channels-last weights) the kernels update a
    contiguous copy. The reference updates float64 parameters.

    NaN and Inf in a gradient affect the parameter as in torch, and in the states the element's
    block (block), the element (rank-1) or the whole tensor (factored).

    The entries may be on any devices; those without elements are skipped. They are kept until the
    first `run` ends. Temporaries are vectors for rows and columns, and copies as large as those of
    the largest parameter that is not contiguous.

    Reference:
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507, algorithm 1;
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            check_entry(entry)
        self._entries = [*entries]
        self._by_reference: list[Entry] = []
        self._copied: list[Entry] = []
        self._sharded: list[Entry] = []
        self._count = len(entries)
        self.lasting = True
        """Whether later steps can reuse the tables."""
        kinds: dict[Any, list[int]] = defaultdict(list)
        for k, chosen in enumerate(_backends(entries)):
            self._place(k, chosen, kinds)
        others = self._by_reference or self._copied or self._sharded
        self.lasting = self.lasting and not others
        self._groups = [
            (positions, _group([self._entries[k] for k in positions], chosen))
            for (chosen, *_), positions in kinds.items()
        ]

    def _place(self, k: int, chosen: str, kinds: dict[Any, list[int]]) -> None:
        """Assign an entry to a kernel group, the reference or the sharded step."""
        entry, simulated = self._entries[k], is_simulated()
        if entry.shard is not None and (simulated or entry.kind in ROWS_AND_COLUMNS):
            self._sharded.append(entry)
            return
        served = chosen != "reference" and is_supported(entry)
        if entry.guard is not None and not (served and chosen == "triton"):
            self.lasting = False
            if not entry.guard.isfinite():
                return
            entry = self._entries[k] = entry._replace(guard=None)
        if not entry.param.numel():
            return
        if not served:
            self._by_reference.append(entry)
            return
        if not is_contiguous(entry):
            self._copied.append(entry)
            return
        if not entry.grad.is_contiguous():
            self.lasting = False
            entry = self._entries[k] = entry._replace(grad=entry.grad.contiguous())
        if chosen == "triton":
            kinds[chosen, same_kernels(entry)].append(k)
        elif not simulated:
            kinds[(chosen,)].append(k)

    def run(self, inputs: Inputs | None = None) -> None:
        """Make the step of the entries, or of other inputs if the step is `lasting`."""
        entries, self._entries = self._entries, []
        if inputs is None:
            self._run_others()
            inputs = inputs_of(entries)
        for positions, group in self._groups:
            group.step(inputs if len(positions) == self._count else inputs.at(positions))

    def _run_others(self) -> None:
        for entry in self._by_reference:
            step_reference(entry)
        for some in _batches(self._copied):
            _step_copied(some)
        if self._sharded and not is_simulated():
            from memtrain.kernels.step import sharded

            sharded.step(self._sharded)


def _batches(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Yield entries whose copies together take at most the bytes of the largest one's."""
    nbytes = [sum(x.nbytes for x in _copies_of(entry)) for entry in entries]
    batch: list[Entry] = []
    room = most = max(nbytes, default=0)
    for entry, size in zip(entries, nbytes, strict=True):
        if size > room:
            yield batch
            batch, room = [], most
        batch.append(entry)
        room -= size
    if batch:
        yield batch


def _copies_of(entry: Entry) -> list[Tensor]:
    correction = entry.master.correction
    tensors = [entry.param, entry.grad, *([] if correction is None else [correction])]
    return [x for x in tensors if not x.is_contiguous()]


def _step_copied(entries: Sequence[Entry]) -> None:
    """Update contiguous copies of the entries' tensors, and copy the results back."""
    copies = [
        entry._replace(
            param=entry.param.detach().contiguous(),
            grad=entry.grad.contiguous(),
            master=entry.master.contiguous(),
        )
        for entry in entries
    ]
    PreparedStep(copies).run()
    for entry, copy in zip(entries, copies, strict=True):
        entry.param.detach().copy_(copy.param)
        if entry.master.correction is not None and copy.master.correction is not None:
            entry.master.correction.copy_(copy.master.correction)


def _backends(entries: Sequence[Entry]) -> list[str]:
    """Return the backend of each entry, chosen once per device."""
    ask = backend_of if is_simulated() else choose
    first = {entry.param.device: entry.param for entry in entries}
    found = {device: ask(param) for device, param in first.items()}
    return [found[entry.param.device] for entry in entries]


def _group(entries: list[Entry], chosen: str) -> CpuEntryGroup | EntryGroup:
    if is_simulated():
        return EntryGroup(entries)
    if chosen == "cpu":
        return CpuEntryGroup(entries)
    from memtrain.kernels.step.launch import TritonEntryGroup  # Triton is optional

    return TritonEntryGroup(entries)


class PreparedSteps:
    """Cache of prepared steps, keyed by the signature of their tables.

    The cache keeps the last `LIMIT` steps per first parameter.
    """

    def __init__(self) -> None:
        self._steps: dict[Hashable, list[tuple[Any, PreparedStep]]] = {}

    def find(self, signature: list[Any]) -> PreparedStep | None:
        """Return the step with a signature, or None."""
        for known, step in self._steps.get(signature[0], ()):
            if known == signature:
                return step
        return None

    def keep(self, signature: list[Any], step: PreparedStep) -> None:
        """Keep a step for `find`."""
        first = signature[0]
        if first not in self._steps and len(self._steps) >= MOST:
            del self._steps[next(iter(self._steps))]
        kept = self._steps.setdefault(first, [])
        if len(kept) >= LIMIT:
            del kept[0]
        kept.append((signature, step))

    def __len__(self) -> int:
        return sum(map(len, self._steps.values()))
