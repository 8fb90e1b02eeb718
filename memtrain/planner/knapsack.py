"""The multiple-choice knapsack of a plan: an option per item, or a whole segment recomputed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from memtrain.compressors import Compressor, Keep

MULTIPLIERS = 96
"""Number of Lagrange multipliers of error."""
BINS = 2048
"""Number of ranges of bytes; one solution is kept in each."""
_SLACK = 1e-9  # sums in another order differ by less than this share
_Choices = tuple[int, ...] | None
_Hull = tuple[np.ndarray, np.ndarray, list[_Choices], list[tuple[int, ...]]]
T = TypeVar("T")


@dataclass
class Option:
    """One way to keep the tensors of an item."""

    seconds: float = 0.0
    """Time that the option adds to a step."""
    nbytes: float = 0
    """Bytes that are kept from forward to backward."""
    error: float = 0.0
    """Noise that the option adds."""
    name: str = "keep"
    """`keep`, `lossless`, or its lossy compressors: `derivative 3 + group 4`."""
    moved: int = 0
    """Bytes read and written by compressing and decompressing."""
    choices: Mapping[Any, Compressor | Keep] = field(default_factory=dict)
    """Site -> its choice."""


@dataclass
class Item:
    """Tensors with one joint option: they share memory or are computed from each other.

    `options` is a Pareto front: `keep` first, then by bytes, the most first.
    """

    options: list[Option]
    name: str = ""
    """Name of the first site."""
    sites: frozenset[Any] = frozenset()
    balanced: Option = field(default_factory=Option)
    """The option that the preset `balanced` has."""


@dataclass
class Segment:
    """Consecutive items of the forward: those of a block, or those between two blocks."""

    items: list[Item]
    recompute: Option | None = None
    """The alternative to all items: recompute the block from its inputs."""
    transient: float = 0.0
    """Bytes of recomputed tensors during the segment's backward."""
    later: float = 0.0
    """Bytes of gradients that exist when the segment's backward begins."""
    name: str = ""
    """Path of the block's module."""


class Solution(NamedTuple):
    """A choice for every item."""

    seconds: float
    saved: float
    """Bytes that are kept at the end of the forward."""
    highest: float
    """Most bytes (kept, transient and gradients) at the beginning of any segment's backward."""
    error: float
    choices: tuple[_Choices, ...]
    """For each segment the option's index for each item; None: the segment is recomputed."""


def solve(
    segments: Sequence[Segment], max_error: float, objective: Literal["time", "error"] = "time"
) -> list[Solution]:
    """Solve the linear relaxation greedily, for every size and many Lagrange multipliers of error.

    For each multiplier, items start at their cheapest option. Each step makes the change with the
    lowest cost per saved byte (the greedy algorithm of the multiple-choice knapsack: each step
    solves the linear relaxation for its bytes). Recomputing a segment is one more choice. There is
    no budget: the best solution in each of `BINS` equal ranges of bytes is kept, largest first.

    Reference:
        Sinha and Zoltners, The multiple-choice knapsack problem (Operations Research 27, 1979).

    Example:
        >>> item = Item([Option(0.0, 8.0, 0.0), Option(1.0, 4.0, 0.5)])
        >>> found = solve([Segment([item]), Segment([item])], max_error=0.5)
        >>> [(plan.seconds, plan.saved) for plan in found]
        [(0.0, 16.0), (1.0, 12.0)]
    """
    sums = Sums(segments)
    greedy = [_greedy(sums, multiplier) for multiplier in _multipliers(segments)]
    totals = np.concatenate([rows for rows, _ in greedy])  # seconds, saved, error
    owners = np.concatenate([np.full(len(rows), k) for k, (rows, _) in enumerate(greedy)])
    steps = np.concatenate([np.arange(len(rows)) for rows, _ in greedy])
    low, high = totals[:, 1].min(), totals[:, 1].max()
    bins = ((totals[:, 1] - low) / max(high - low, 1e-30) * BINS).astype(np.int64)
    seconds, saved, error = totals.T
    first, second = (seconds, error) if objective == "time" else (error, seconds)
    order = np.lexsort((saved, second, first, -bins))
    order = order[error[order] <= max_error * (1 + _SLACK)]
    fresh = np.concatenate([[True], np.diff(bins[order]) != 0]) if len(order) else []
    return [sums.evaluate(greedy[owners[row]][1](int(steps[row]))) for row in order[fresh]]


class Sums:
    """Sums of choices of segments; equal segments share their sums."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        known: dict[Any, int] = {}
        self.kinds = [known.setdefault(_numbers(segment), len(known)) for segment in segments]
        self._totals: dict[tuple[int, _Choices], tuple[float, float, float]] = {}

    def total(self, index: int, choices: _Choices) -> tuple[float, float, float]:
        """Return seconds, kept bytes and error of a segment."""
        key = (self.kinds[index], choices)
        if key not in self._totals:
            segment = self.segments[index]
            if choices is None and segment.recompute is not None:
                options = [segment.recompute]
            else:
                pairs = zip(segment.items, choices or (), strict=True)
                options = [item.options[k] for item, k in pairs]
            self._totals[key] = (
                sum(option.seconds for option in options),
                sum(option.nbytes for option in options),
                sum(option.error for option in options),
            )
        return self._totals[key]

    def evaluate(self, choices: Sequence[_Choices]) -> Solution:
        """Return the solution with these choices, one per segment."""
        seconds = saved = highest = error = 0.0
        for index, (segment, choice) in enumerate(zip(self.segments, choices, strict=True)):
            more = self.total(index, choice)
            seconds, saved, error = seconds + more[0], saved + more[1], error + more[2]
            others = segment.later + (segment.transient if choice is None else 0.0)
            highest = max(highest, saved + others)
        return Solution(seconds, saved, highest, error, tuple(choices))


def _numbers(segment: Segment) -> Any:
    """Return the numbers that decide the sums of a segment."""
    items = [item.options for item in segment.items]
    if segment.recompute is not None:
        items.append([segment.recompute])
    return (
        segment.recompute is None,
        *(tuple((o.seconds, o.nbytes, o.error) for o in options) for options in items),
    )


def pareto_front(values: np.ndarray) -> np.ndarray:
    """Return the indices of the rows of [n, columns] that no other row dominates, sorted.

    The first of equal rows is kept. Memory: one bool for every pair of rows.

    Example:
        >>> pareto_front(np.array([[0.0, 2, 2, 0], [1, 1, 1, 0], [1, 3, 3, 0]]))
        array([0, 1])
    """
    order = np.lexsort(values.T[::-1])
    rows = values[order]
    slack = np.abs(rows).max(axis=0, initial=0.0) * _SLACK
    dominated = np.tri(len(rows), k=-1, dtype=bool)  # [row, another before it]
    for column, tolerance in zip(rows.T, slack, strict=True):
        dominated &= column[None] <= column[:, None] + tolerance
    return order[~dominated.any(axis=1)]


def shrinking(plans: Iterable[T], size: Callable[[T], float]) -> list[T]:
    """Keep the plans that are smaller than all plans before them."""
    listed: list[T] = []
    for plan in plans:
        if not listed or size(plan) < size(listed[-1]):
            listed.append(plan)
    return listed


def thinned(plans: Sequence[T], size: Callable[[T], float], count: int) -> list[T]:
    """Return at most `count` + 1 of the shrinking plans, evenly by size, with first and last.

    Example:
        >>> thinned([10.0, 9.0, 8.0, 1.0, 0.0], float, 2)
        [10.0, 1.0, 0.0]
    """
    step = (size(plans[0]) - size(plans[-1])) / count
    thin = [*plans[:1]]
    for plan in plans[1:]:
        if size(thin[-1]) - size(plan) >= step or plan is plans[-1]:
            thin.append(plan)
    return thin


def _multipliers(segments: Sequence[Segment]) -> np.ndarray:
    """Return the multipliers, in seconds per unit of error: from only time to only error."""
    options = [o for segment in segments for item in segment.items for o in item.options]
    seconds = [option.seconds for option in options if option.seconds > 0]
    errors = [option.error for option in options if option.error > 0]
    if not errors:
        return np.zeros(1)
    if not seconds:
        return np.ones(1)
    low, high = min(seconds) / max(errors) * 1e-2, max(seconds) / min(errors) * 1e2
    return np.concatenate([[0.0], np.geomspace(low, high, MULTIPLIERS - 1)])


def _greedy(sums: Sums, multiplier: float) -> tuple[np.ndarray, Callable[[int], list[_Choices]]]:
    """Return solutions from the cheapest to the smallest, and a function from a row to its choices.

    The solutions are seconds, kept bytes and error: [solutions, 3].
    """
    segments, kinds = sums.segments, sums.kinds
    first = {kind: index for index, kind in reversed([*enumerate(kinds)])}
    of_kind = {kind: _hull_of(segments[index], multiplier) for kind, index in first.items()}
    rates = {kind: _rates(*hull[:2]) for kind, hull in of_kind.items()}
    hulls = [of_kind[kind] for kind in kinds]
    # Sorted by rate, a segment's own steps stay in order: its hull is convex.
    steps = sorted(
        (rate, number, position + 1)
        for number, kind in enumerate(kinds)
        for position, rate in enumerate(rates[kind])
    )
    summed = {
        kind: np.array([sums.total(position, choice) for choice in of_kind[kind][2]])
        for kind, position in first.items()
    }
    values = [summed[kind] for kind in kinds]
    totals = [sum((rows[0] for rows in values), np.zeros(3))]
    asides: list[tuple[int, int, tuple[int, ...]]] = []  # after a step, a segment otherwise
    others = []
    positions = [0] * len(segments)
    for step, (_, number, position) in enumerate(steps):
        _, _, choices, inner = hulls[number]
        now, then = values[number][positions[number]], values[number][position]
        if choices[position] is None:  # less than the whole segment may do
            for indices in inner:
                asides.append((step, number, indices))
                others.append(totals[-1] - now + np.array(sums.total(number, indices)))
        totals.append(totals[-1] - now + then)
        positions[number] = position

    def choices_at(row: int) -> list[_Choices]:
        aside = row - len(steps) - 1
        step, other, indices = asides[aside] if aside >= 0 else (row, -1, ())
        reached = {number: position for _, number, position in steps[:step]}
        found = [choices[reached.get(k, 0)] for k, (_, _, choices, _) in enumerate(hulls)]
        if other >= 0:
            found[other] = indices
        return found

    return np.array([*totals, *others]), choices_at


def _hull_of(segment: Segment, multiplier: float) -> _Hull:
    """Return the convex hull of a segment's items, combined greedily, and of recomputing it.

    The result is bytes, cost and choices from the cheapest to the smallest, and the choices of all
    steps of the items, also those that recomputing dominates.
    """
    hulls = []
    for item in segment.items:
        nbytes = np.array([option.nbytes for option in item.options])
        cost = np.array([option.seconds + multiplier * option.error for option in item.options])
        rows = _convex_hull(nbytes, cost)
        hulls.append((rows, nbytes[rows], cost[rows]))
    steps = []
    for index, (_, nbytes, cost) in enumerate(hulls):
        steps += [(rate, index, position + 1) for position, rate in enumerate(_rates(nbytes, cost))]
    now = [0] * len(hulls)
    total = [sum(float(hull[k][0]) for hull in hulls) for k in (1, 2)]
    inner = [tuple(int(rows[0]) for rows, _, _ in hulls)]
    points: list[tuple[float, float, _Choices]] = [(total[0], total[1], inner[0])]
    for _, index, position in sorted(steps):
        _, nbytes, cost = hulls[index]
        total[0] += nbytes[position] - nbytes[position - 1]
        total[1] += cost[position] - cost[position - 1]
        now[index] = position
        inner.append(tuple(int(h[0][k]) for h, k in zip(hulls, now, strict=True)))
        points.append((total[0], total[1], inner[-1]))
    if (block := segment.recompute) is not None:
        points.append((block.nbytes, block.seconds + multiplier * block.error, None))
    nbytes, cost = (np.array([point[k] for point in points], dtype=float) for k in (0, 1))
    rows = _convex_hull(nbytes, cost)
    return nbytes[rows], cost[rows], [points[row][2] for row in rows], inner


def _rates(nbytes: np.ndarray, cost: np.ndarray) -> list[float]:
    """Return the cost per saved byte of each step along a hull; rounding keeps their order."""
    rates = np.diff(cost) / np.maximum(-np.diff(nbytes), 1e-30)
    return np.maximum.accumulate(rates).tolist() if len(rates) else []


def _convex_hull(nbytes: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Return the rows on the lower convex hull, from the cheapest to the smallest."""
    order = np.lexsort((nbytes, cost))
    hull: list[int] = []
    for row in order.tolist():
        if hull and nbytes[row] >= nbytes[hull[-1]]:
            continue  # not smaller than a row that costs no more
        while len(hull) > 1 and _above(nbytes, cost, hull[-2], hull[-1], row):
            hull.pop()
        hull.append(row)
    return np.array(hull, dtype=np.int64)


def _above(nbytes: np.ndarray, cost: np.ndarray, a: int, b: int, c: int) -> bool:
    """Return whether b is on or above the line from a to c."""
    left = (cost[b] - cost[a]) * (nbytes[a] - nbytes[c])
    return left >= (cost[c] - cost[a]) * (nbytes[a] - nbytes[b])
