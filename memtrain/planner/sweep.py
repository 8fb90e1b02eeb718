"""Good plans where there are too many to list: the hull of bytes and cost, walked in steps."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from memtrain.planner.solve import Part, Solution

PRICES = 96
"""So many prices of error are tried."""
BINS = 2048
"""In each of so many ranges of bytes one plan stays."""


class _Path(NamedTuple):
    """Choices of a part, each smaller and dearer than the one before."""

    nbytes: np.ndarray
    cost: np.ndarray
    choices: list[tuple[int, ...] | None]
    inner: list[tuple[int, ...]]  # all steps of its items, also those that running again overtakes


class _Walk(NamedTuple):
    """From the cheapest plan to the smallest."""

    paths: list[_Path]
    steps: list[tuple[int, int]]  # a part, and the place on its path that it goes to
    asides: list[tuple[int, int, tuple[int, ...]]]  # after a step, a part otherwise: no further
    totals: np.ndarray  # [steps + 1 + asides, 3]: seconds, bytes saved, error

    def choices(self, index: int) -> list[tuple[int, ...] | None]:
        """Of each part, in a row of `totals`."""
        aside = index - len(self.steps) - 1
        step, part, own = self.asides[aside] if aside >= 0 else (index, -1, ())
        places = dict(self.steps[:step])
        found = [path.choices[places.get(number, 0)] for number, path in enumerate(self.paths)]
        if part >= 0:
            found[part] = own
        return found


def sweep(
    parts: Sequence[Part], max_error: float, objective: Literal["time", "error"] = "time"
) -> list[Solution]:
    """Plans from the relaxation of the problem, for every price of a byte and many of an error.

    At each price of error, items start at their cheapest choice, and the change that costs least
    per byte it saves comes next, one at a time (the greedy of the multiple-choice knapsack, whose
    every step solves the linear relaxation for its own bytes). A block that runs again is one more
    choice of the block. No budget of bytes enters: the best plan in each of `BINS` equal
    ranges of bytes stays.

    Args:
        parts: In the order of the forward.
        max_error: The most that errors may sum to.
        objective: What is best: `time` or `error`.

    Returns:
        Solutions, largest first.

    Example:
        >>> from memtrain.planner.solve import Choice
        >>> keep, half = Choice(0.0, 8.0, 0.0), Choice(1.0, 4.0, 0.5)
        >>> found = sweep([Part([[keep, half]]), Part([[keep, half]])], max_error=0.5)
        >>> [(plan.seconds, plan.saved) for plan in found]
        [(0.0, 16.0), (1.0, 12.0)]
    """
    walks = [_walk(parts, price) for price in _prices(parts)]
    totals = np.concatenate([walk.totals for walk in walks])  # seconds, saved, error
    owners = np.concatenate([np.full(len(walk.totals), k) for k, walk in enumerate(walks)])
    steps = np.concatenate([np.arange(len(walk.totals)) for walk in walks])
    low, high = totals[:, 1].min(), totals[:, 1].max()
    bins = ((totals[:, 1] - low) / max(high - low, 1e-30) * BINS).astype(np.int64)
    seconds, saved, error = totals.T
    first, second = (seconds, error) if objective == "time" else (error, seconds)
    order = np.lexsort((saved, second, first, -bins))
    order = order[error[order] <= max_error * (1 + 1e-9)]
    fresh = np.concatenate([[True], np.diff(bins[order]) != 0]) if len(order) else []
    return [evaluate(parts, walks[owners[row]].choices(int(steps[row]))) for row in order[fresh]]


def evaluate(parts: Sequence[Part], choices: Sequence[tuple[int, ...] | None]) -> Solution:
    """What a plan comes to.

    Args:
        parts: In the order of the forward.
        choices: For each part the choice of each item; None: it runs again.

    Returns:
        The solution with its values.
    """
    seconds = saved = highest = error = 0.0
    for part, own in zip(parts, choices, strict=True):
        if own is None and part.again is not None:
            picked = [part.again]
        else:
            picked = [item[k] for item, k in zip(part.items, own or (), strict=True)]
        seconds += sum(choice.seconds for choice in picked)
        saved += sum(choice.nbytes for choice in picked)
        error += sum(choice.error for choice in picked)
        besides = part.later + (part.transient if own is None else 0.0)
        highest = max(highest, saved + besides)
    return Solution(seconds, saved, highest, error, tuple(choices))


def _prices(parts: Sequence[Part]) -> np.ndarray:
    """Seconds per unit of error: from where error does not matter to where only it does."""
    choices = [choice for part in parts for item in part.items for choice in item]
    seconds = [choice.seconds for choice in choices if choice.seconds > 0]
    errors = [choice.error for choice in choices if choice.error > 0]
    if not errors:
        return np.zeros(1)
    if not seconds:
        return np.ones(1)
    low, high = min(seconds) / max(errors) * 1e-2, max(seconds) / min(errors) * 1e2
    return np.concatenate([[0.0], np.geomspace(low, high, PRICES - 1)])


def _walk(parts: Sequence[Part], price: float) -> _Walk:
    """From the cheapest plan to the smallest, a step at a time, the most bytes per cost first."""
    paths = [_path(part, price) for part in parts]
    # Sorted by rate, a part's own steps stay in order: its path is convex.
    steps = sorted(
        (rate, number, place + 1)
        for number, path in enumerate(paths)
        for place, rate in enumerate(_rates(path.nbytes, path.cost))
    )
    values = [
        np.array([_total(part, own) for own in path.choices])
        for part, path in zip(parts, paths, strict=True)
    ]
    totals = [sum((own[0] for own in values), np.zeros(3))]
    asides, others = [], []
    places = [0] * len(parts)
    for step, (_, number, place) in enumerate(steps):
        now, then = values[number][places[number]], values[number][place]
        if paths[number].choices[place] is None:  # less than the whole block may do
            for own in paths[number].inner:
                asides.append((step, number, own))
                others.append(totals[-1] - now + _total(parts[number], own))
        totals.append(totals[-1] - now + then)
        places[number] = place
    moves = [(number, place) for _, number, place in steps]
    return _Walk(paths, moves, asides, np.array([*totals, *others]))


def _total(part: Part, own: tuple[int, ...] | None) -> np.ndarray:
    """Seconds, bytes saved and error of a part."""
    return np.array(evaluate([part], [own])[:4])[[0, 1, 3]]


def _path(part: Part, price: float) -> _Path:
    """The convex path of a part: that of its items, walked together, and running again."""
    hulls = []
    for item in part.items:
        nbytes = np.array([choice.nbytes for choice in item])
        cost = np.array([choice.seconds + price * choice.error for choice in item])
        rows = _hull(nbytes, cost)
        hulls.append((rows, nbytes[rows], cost[rows]))
    steps = []
    for index, (_, nbytes, cost) in enumerate(hulls):
        steps += [(rate, index, place + 1) for place, rate in enumerate(_rates(nbytes, cost))]
    now = [0] * len(hulls)
    total = [sum(float(hull[k][0]) for hull in hulls) for k in (1, 2)]
    points: list[tuple[float, float, tuple[int, ...] | None]] = [
        (total[0], total[1], tuple(int(rows[0]) for rows, _, _ in hulls))
    ]
    for _, index, place in sorted(steps):
        rows, nbytes, cost = hulls[index]
        total[0] += nbytes[place] - nbytes[place - 1]
        total[1] += cost[place] - cost[place - 1]
        now[index] = place
        picked = tuple(int(h[0][k]) for h, k in zip(hulls, now, strict=True))
        points.append((total[0], total[1], picked))
    inner = [own for _, _, own in points if own is not None]
    if part.again is not None:
        again = part.again
        points.append((again.nbytes, again.seconds + price * again.error, None))
    nbytes, cost = (np.array([point[k] for point in points], dtype=float) for k in (0, 1))
    rows = _hull(nbytes, cost)
    return _Path(nbytes[rows], cost[rows], [points[row][2] for row in rows], inner)


def _rates(nbytes: np.ndarray, cost: np.ndarray) -> list[float]:
    """Cost per byte that each step on a path saves; rounding must not change their order."""
    rates = np.diff(cost) / np.maximum(-np.diff(nbytes), 1e-30)
    return np.maximum.accumulate(rates).tolist() if len(rates) else []


def _hull(nbytes: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Rows on the lower convex hull, from the cheapest to the smallest."""
    order = np.lexsort((nbytes, cost))
    hull: list[int] = []
    for row in order.tolist():
        if hull and nbytes[row] >= nbytes[hull[-1]]:
            continue  # no smaller than one that costs no more
        while len(hull) > 1 and _above(nbytes, cost, hull[-2], hull[-1], row):
            hull.pop()
        hull.append(row)
    return np.array(hull, dtype=np.int64)


def _above(nbytes: np.ndarray, cost: np.ndarray, a: int, b: int, c: int) -> bool:
    """Whether b lies on or above the line from a to c."""
    left = (cost[b] - cost[a]) * (nbytes[a] - nbytes[c])
    return left >= (cost[c] - cost[a]) * (nbytes[a] - nbytes[b])
