"""Unfold a recorded step of few blocks: the events of those left out are a neighbour's, shifted."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from memtrain.activations.trace.repeats import Irregular, RepeatedBlocks, inside, renamed
from memtrain.audit.live_storages import storages
from memtrain.audit.peak.recorder import INSIDE, StorageRecorder
from memtrain.audit.peak.timeline import GRADIENTS, NO_STORAGE, Event, Phase

_START = "start"
_VERBS = ("forward of ", "backward of ", "recomputing ")
Owned = Callable[[nn.Module], list[Tensor]]
"""Block -> what it has before the step: weights, optimizer states."""


class FoldedRecorder(StorageRecorder):
    """Records a step whose forward passes through the kept blocks of runs only.

    Where the optimizer's step begins, the parameters of the blocks left out get gradients like
    those of the second block, so that it steps them all.
    """

    runs: Sequence[RepeatedBlocks] = ()
    owned: Owned
    model: nn.Module

    def fold(self, model: nn.Module, runs: Sequence[RepeatedBlocks], owned: Owned) -> None:
        """Tell what is left out.

        Args:
            model: Whose forward runs.
            runs: Of its blocks.
            owned: Block -> its tensors at the beginning of the step, in the same order for each.
        """
        self.model, self.runs, self.owned = model, runs, owned
        self.starting: dict[str, list[int]] = {}  # path of any block -> numbers of its storages
        self.links: dict[tuple[str, int], int] = {}  # path, number in the second block -> number
        self.left_out: tuple[int, int] = (0, 0)  # events of the gradients that are filled in

    def begin(self, phase: Phase) -> None:
        """Begin a phase of the step."""
        first = self.phase != phase or not self.starting
        super().begin(phase)
        if self.runs and phase == "forward" and not self.starting:
            for run in self.runs:
                for path in run.paths:
                    tensors = self.owned(self.model.get_submodule(path))
                    self.starting[path] = [self._numbers[s._cdata] for s in storages(tensors)]
        if self.runs and phase == "step" and first:
            begin = len(self.events)
            for run in self.runs:
                for path in run.dropped:
                    self._fill(run.kept[1], path)
            self.left_out = begin, len(self.events)

    def like(self, trained: Container[Tensor]) -> set[Tensor]:
        """The parameters of the blocks left out whose counterpart in the second is trained."""
        paths = [(run.kept[1], path) for run in self.runs for path in run.dropped]
        pairs = [pair for one, other in paths for pair in self._pairs(one, other)]
        return {other for one, other in pairs if one in trained}

    def _pairs(self, path: str, other: str) -> Iterator[tuple[Tensor, Tensor]]:
        blocks = (self.model.get_submodule(name) for name in (path, other))
        return zip(*(block.parameters() for block in blocks), strict=True)

    def _fill(self, second: str, path: str) -> None:
        for one, other in self._pairs(second, path):
            if one.grad is None:
                continue
            like = one.grad
            other.grad = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
            self.adopt([other.grad], GRADIENTS)
            numbers = [self._numbers[x.untyped_storage()._cdata] for x in (like, other.grad)]
            if self._sizes[numbers[0]] != self._sizes[numbers[1]]:
                raise Irregular(f"a gradient in {second} is part of another tensor")
            self.links[path, numbers[0]] = numbers[1]

    def unfolded(self) -> tuple[list[Event], list[str]]:
        """The events of the whole step, and the categories of its storages.

        Raises:
            Irregular: If a block's events are not its neighbour's, shifted.
        """
        if not self.runs:
            return self.events, self.categories
        return _Unfolding(self).result()


class _Birth(NamedTuple):
    """Where a storage comes from, in words that identical blocks share."""

    run: int
    kept: int
    """One of the run's kept blocks."""
    phase: str
    op: str
    """The label, without the block's path."""
    nbytes: int
    place: int
    """Among storages of which all this is the same."""


class _Window(NamedTuple):
    """Events that are one kept block's: `events[begin:end]`."""

    begin: int
    end: int
    run: int
    kept: int


class _Unfolding:
    """One pass over the events of a folded recorder."""

    def __init__(self, recorder: FoldedRecorder) -> None:
        self.recorder, self.runs = recorder, recorder.runs
        self.categories = list(recorder.categories)
        begin, end = recorder.left_out
        self.events = recorder.events[:begin] + recorder.events[end:]
        self.windows = self._windows()
        self.births = self._births()
        self.made = {birth: storage for storage, birth in self.births.items()}
        self.fresh: dict[tuple[int, int, int], int] = {}  # run, place, the second's number -> new
        self.labels: dict[tuple[str, int, int, int], str] = {}

    def result(self) -> tuple[list[Event], list[str]]:
        """The events of all blocks, and the categories."""
        found: list[Event] = []
        position = 0
        for begin, end, number, kept in self.windows:
            found += map(self._between, range(position, begin))
            places = [self._places(number)[kept]]
            if kept == 1:
                forward = self.events[begin][2] == "forward" if begin < end else True
                between = range(1, len(self.runs[number].paths) - 1)
                places = [*between] if forward else [*reversed(between)]
            for place in places:
                found += [self._moved(index, number, kept, place) for index in range(begin, end)]
            position = end
        found += map(self._between, range(position, len(self.events)))
        self._check(found)
        return found, self.categories

    def _places(self, number: int) -> tuple[int, int, int]:
        """Of the kept blocks among all of a run."""
        return 0, 1, len(self.runs[number].paths) - 1

    def _windows(self) -> list[_Window]:
        found: list[_Window] = []
        for number, run in enumerate(self.runs):
            for phase in ("forward", "backward"):
                first: dict[int, int] = {}
                end = 0
                for index, (_, _, own, label) in enumerate(self.events):
                    kept = self._named(label, number) if own == phase else None
                    if kept is not None:
                        first.setdefault(kept, index)
                        end = index + 1
                if len(first) < len(run.kept):
                    raise Irregular(f"the {phase} of {run.paths[0]} allocates nothing")
                order = (0, 1, 2) if phase == "forward" else (2, 1, 0)
                bounds = [*(first[k] for k in order), end]
                pairs = zip(pairwise(bounds), order, strict=True)
                found += [_Window(*pair, number, k) for pair, k in pairs]
        found.sort()
        ends = [bound for window in found for bound in window[:2]]
        if ends != sorted(ends):
            raise Irregular("blocks do not run one after another")
        return found

    def _named(self, label: str, number: int) -> int | None:
        """The kept block that a label names."""
        verb = next((verb for verb in _VERBS if label.startswith(verb)), None)
        if verb is None:
            return None
        module = label.removeprefix(verb).partition(" / ")[0]
        return next((k for k, p in enumerate(self.runs[number].kept) if inside(module, p)), None)

    def _births(self) -> dict[int, _Birth]:
        found: dict[int, _Birth] = {}
        for number, run in enumerate(self.runs):
            for k, path in enumerate(run.kept):
                for place, storage in enumerate(self.recorder.starting[path]):
                    found[storage] = _Birth(number, k, _START, "", 0, place)
        seen = {storage for storage, *_ in self.events[: self.windows[0].begin]}
        seen.add(INSIDE)  # of no block
        position = 0
        for begin, end, number, kept in self.windows:
            seen.update(storage for storage, *_ in self.events[position:begin])
            counts = Counter[_Birth]()
            for storage, delta, phase, label in self.events[begin:end]:
                if storage in seen or storage == NO_STORAGE:
                    continue
                seen.add(storage)
                op = label.replace(self.runs[number].kept[kept], "", 1)
                alike = _Birth(number, kept, phase, op, delta, 0)
                found[storage] = alike._replace(place=counts[alike])
                counts[alike] += 1
            position = end
        return found

    def _between(self, index: int) -> Event:
        """An event that is no block's; it may end what a block has begun."""
        storage, delta, phase, label = self.events[index]
        return self._as_neighbour(storage, index), delta, phase, label

    def _as_neighbour(self, storage: int, index: int) -> int:
        """A second block's storage, as the block sees it that ran last before this event."""
        birth = self.births.get(storage)
        if birth is None or birth.kept != 1:
            return storage
        own = [window for window in self.windows if window.run == birth.run]
        kept = 2 if own[1].end <= index < own[4].begin else 0  # the last one, or the first
        return self._storage(storage, birth.run, kept, self._places(birth.run)[kept])

    def _moved(self, index: int, number: int, kept: int, place: int) -> Event:
        storage, delta, phase, label = self.events[index]
        key = (label, number, kept, place)
        if key not in self.labels:
            self.labels[key] = self._label(*key)
        birth = self.births.get(storage)
        if birth is None or birth.run != number:
            storage = self._as_neighbour(storage, index)
        else:
            storage = self._storage(storage, number, kept, place)
        return storage, delta, phase, self.labels[key]

    def _label(self, label: str, number: int, kept: int, place: int) -> str:
        """The label with the path of the block that it names there."""
        run = self.runs[number]
        for verb in _VERBS:
            if not label.startswith(verb):
                continue
            where = label.removeprefix(verb)
            for k, path in enumerate(run.kept):
                if inside(where.partition(" / ")[0], path):
                    there = self._there(number, kept, place, k)
                    return verb + renamed(where, path, run.paths[there])
        return label

    def _there(self, number: int, kept: int, place: int, k: int) -> int:
        """The place of the block that stands to the one at `place` as block `k` to `kept`."""
        if abs(k - kept) > 1:
            run = self.runs[number]
            raise Irregular(f"{run.kept[kept]} and {run.kept[k]} share memory")
        return place + k - kept

    def _storage(self, storage: int, number: int, kept: int, place: int) -> int:
        """The storage that stands to the block at `place` as `storage` to the kept one."""
        birth = self.births[storage]
        there = self._there(number, kept, place, birth.kept)
        places, run = self._places(number), self.runs[number]
        if there == places[birth.kept]:
            return storage
        if birth.phase == _START:
            return self.recorder.starting[run.paths[there]][birth.place]
        alike = birth._replace(kept=places.index(there) if there in places else 1)
        found = self.made.get(alike)
        if found is None:
            raise Irregular(f"{run.kept[alike.kept]} and {run.kept[birth.kept]} differ")
        if there in places:
            return found
        linked = self.recorder.links.get((run.paths[there], found))
        if linked is not None:
            return linked
        key = (number, there, found)
        if key not in self.fresh:
            self.fresh[key] = len(self.categories)
            self.categories.append(self.categories[found])
        return self.fresh[key]

    def _check(self, found: Sequence[Event]) -> None:
        """Raise unless all storages end as those that they stand for."""
        before, after = _final(self.recorder.events), _final(found)
        stands_for = {new: second for (_, _, second), new in self.fresh.items()}
        stands_for |= {new: second for (_, second), new in self.recorder.links.items()}
        for run in self.runs:
            own = self.recorder.starting
            for path in run.dropped:
                stands_for.update(zip(own[path], own[run.kept[1]], strict=True))
        for storage, size in after.items():
            if size != before.get(stands_for.get(storage, storage)):
                raise Irregular("a storage of a block outlives its neighbour's")


def _final(events: Iterable[Event]) -> dict[int, int]:
    """Storage -> its bytes in the end."""
    sizes: dict[int, int] = {}
    for storage, delta, _, _ in events:
        sizes[storage] = sizes.get(storage, 0) + delta
    return sizes
