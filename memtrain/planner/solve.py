"""One choice per item, or one for all items of a part: every trade of time, bytes and error."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

EXACT = 1500
"""So many partial plans are kept side by side; where there are more, `sweep` serves."""
_SLACK = 1e-9  # sums in another order differ by less than this share
_SAVED, _HIGHEST, _ERROR = 1, 2, 3  # columns; the first is seconds
_AGAIN = -1


class Choice(NamedTuple):
    """What can be done to an item."""

    seconds: float
    nbytes: float
    """Kept until the backward."""
    error: float


@dataclass(frozen=True)
class Part:
    """Items of one block, in the order of the forward."""

    items: Sequence[Sequence[Choice]]
    """The choices of each."""
    again: Choice | None = None
    """Instead of all of them: run the block again, and keep its inputs."""
    transient: float = 0.0
    """Bytes that are there while its backward runs, if it runs again."""
    later: float = 0.0
    """Bytes of gradients that are there when its backward begins."""


class Solution(NamedTuple):
    """One of the plans that no other beats in all of its values."""

    seconds: float
    saved: float
    """Bytes kept when the forward has ended."""
    highest: float
    """The most bytes, kept, transient and of gradients, when the backward of any part begins."""
    error: float
    choices: tuple[tuple[int, ...] | None, ...]
    """For each part the choice of each item; None: it runs again."""


def frontier(parts: Sequence[Part], max_error: float) -> list[Solution] | None:
    """Every plan that trades seconds, bytes and error better than any other, where they are few.

    Partial plans grow item by item, and those that another one beats in all four values are
    dropped, which loses nothing (dynamic programming over a Pareto front). No budget of bytes
    enters: what fits a smaller one is among what fits a larger one.

    Args:
        parts: In the order of the forward.
        max_error: The most that errors may sum to.

    Returns:
        Solutions by seconds, fastest first; None where more than `EXACT` partial plans are left.

    Example:
        >>> keep, half = Choice(0.0, 8.0, 0.0), Choice(1.0, 4.0, 0.5)
        >>> found = frontier([Part([[keep, half]]), Part([[keep, half]])], max_error=0.5)
        >>> [(plan.seconds, plan.saved) for plan in found or []]
        [(0.0, 16.0), (1.0, 12.0)]
    """
    book = _Book()
    values, ids = np.zeros((1, 4)), book.add(np.array([-1]), np.array([0]), (-1, 0))
    for number, part in enumerate(parts):
        before, above = values, ids
        for place, choices in enumerate(part.items):
            values, parents, moves = _grow(values, ids, choices, max_error)
            rows = undominated(values)
            if len(rows) > EXACT:
                return None
            values = values[rows]
            ids = book.add(parents[rows], moves[rows], (number, place))
        values = _raise(values, part.later)
        if part.again is not None:
            other, parents, moves = _grow(before, above, [part.again], max_error)
            other = _raise(other, part.later + part.transient)
            ids = np.concatenate([ids, book.add(parents, moves, (number, _AGAIN))])
            values = np.concatenate([values, other])
        rows = undominated(values)
        if len(rows) > EXACT:
            return None
        values, ids = values[rows], ids[rows]
    order = np.lexsort(values.T[::-1])
    return [
        Solution(*map(float, values[row]), choices=book.choices(int(ids[row]), parts))
        for row in order
    ]


def bound(
    parts: Sequence[Part],
    room: float,
    max_error: float,
    known: float,
    states: Sequence[Part] = (),
) -> float:
    """What no plan can be faster than, by Lagrange multipliers for bytes and errors.

    Args:
        parts: As for `frontier`; transients and gradients are left out, which only lowers it.
        room: Bytes for what is kept when the forward has ended, and for states.
        max_error: The most that errors may sum to: those of `parts`, and those of `states`.
        known: Seconds of a plan that fits.
        states: Parts that share the bytes, and whose errors are summed apart.

    Returns:
        Seconds, at most `known`.

    Example:
        >>> keep, half = Choice(0.0, 8.0, 0.0), Choice(1.0, 4.0, 0.0)
        >>> round(bound([Part([[keep, half]])] * 2, room=12.0, max_error=1.0, known=1.0), 6)
        1.0
    """
    tables = _tables([*parts, *states], len(parts))
    limits = np.array([room, max_error, max_error])
    scale = np.maximum(np.abs(limits), 1e-30)
    prices, best = np.zeros(3), -np.inf
    pace = 1.0
    for _ in range(400):
        value, used = _dual(tables, prices / scale)
        value -= float(prices @ (limits / scale))
        if value > best + 1e-12 * abs(known):
            best = value
        else:
            pace *= 0.97
        slope = (used - limits) / scale
        slope[(prices <= 0) & (slope < 0)] = 0.0  # a limit that does not bind stays out
        norm = float(slope @ slope)
        if norm < 1e-24 or known - value <= 1e-12 * abs(known):
            break
        prices = np.maximum(0.0, prices + pace * max(known - value, 0.0) / norm * slope)
    return min(known, best)


class _Book:
    """How each partial plan came about."""

    def __init__(self) -> None:
        self._stages: list[tuple[int, np.ndarray, np.ndarray, tuple[int, int]]] = []
        self._size = 0

    def add(self, parents: np.ndarray, moves: np.ndarray, mark: tuple[int, int]) -> np.ndarray:
        self._stages.append((self._size, parents, moves, mark))
        ids = np.arange(self._size, self._size + len(parents))
        self._size += len(parents)
        return ids

    def choices(self, last: int, parts: Sequence[Part]) -> tuple[tuple[int, ...] | None, ...]:
        found: list[list[int] | None] = [[0] * len(part.items) for part in parts]
        for start, parents, moves, (part, place) in reversed(self._stages):
            if not start <= last < start + len(parents) or part < 0:
                continue
            own = found[part]
            if place == _AGAIN:
                found[part] = None
            elif own is not None:
                own[place] = int(moves[last - start])
            last = int(parents[last - start])
        return tuple(None if own is None else tuple(own) for own in found)


def _grow(
    values: np.ndarray, ids: np.ndarray, choices: Sequence[Choice], max_error: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    table = np.array([[c.seconds, c.nbytes, 0.0, c.error] for c in choices])
    grown = (values[:, None, :] + table[None]).reshape(-1, 4)
    allowed = grown[:, _ERROR] <= max_error * (1 + _SLACK)
    parents = np.repeat(ids, len(choices))[allowed]
    return grown[allowed], parents, np.tile(np.arange(len(choices)), len(values))[allowed]


def _raise(values: np.ndarray, besides: float) -> np.ndarray:
    """A backward begins: what is kept so far, and `besides`, is there at once."""
    values = values.copy()
    np.maximum(values[:, _HIGHEST], values[:, _SAVED] + besides, out=values[:, _HIGHEST])
    return values


def undominated(values: np.ndarray) -> np.ndarray:
    """Rows that no other row is at most equal to in every column.

    Args:
        values: [n, columns].

    Returns:
        Indices of rows, in the order of the columns.

    Example:
        >>> undominated(np.array([[0.0, 2, 2, 0], [1, 1, 1, 0], [1, 3, 3, 0]]))
        array([0, 1])
    """
    order = np.lexsort(values.T[::-1])
    slack = np.abs(values).max(axis=0, initial=0.0) * _SLACK
    # A few that are good in one way beat most of the rest: a cheap first sieve.
    few = order[:: max(1, len(order) // 256)]
    order = order[~_beaten(values[order], order, values[few], few, slack)]
    own = values[order]
    return order[~_beaten(own, order, own, order, slack)]


def _beaten(
    values: np.ndarray, rows: np.ndarray, others: np.ndarray, ids: np.ndarray, slack: np.ndarray
) -> np.ndarray:
    """For each row whether one of the others, before it in the order, is no worse anywhere."""
    place = {int(row): k for k, row in enumerate(rows)}
    where = np.array([place.get(int(other), -1) for other in ids], dtype=np.int64)
    beaten = np.zeros(len(values), dtype=bool)
    for start in range(0, len(values), 512):
        block = values[start : start + 512]
        worse = np.ones((len(block), len(others)), dtype=bool)
        for column in range(values.shape[1]):
            worse &= others[None, :, column] <= block[:, None, column] + slack[column]
        worse &= where[None] < np.arange(start, start + len(block))[:, None]
        beaten[start : start + 512] = worse.any(axis=1)
    return beaten


class _Tables(NamedTuple):
    """All choices, padded: [items, choices]; and what each part may do instead."""

    choices: np.ndarray  # [items, choices, 4]: seconds, bytes, error, error of a state
    owners: np.ndarray  # [items]: the part
    again: np.ndarray  # [parts, 4]


def _tables(parts: Sequence[Part], first_state: int) -> _Tables:
    items = [(n, item) for n, part in enumerate(parts) for item in part.items]
    width = max((len(item) for _, item in items), default=1)
    choices = np.full((len(items), width, 4), np.inf)
    for row, (n, item) in enumerate(items):
        choices[row, : len(item)] = [_columns(choice, n >= first_state) for choice in item]
    again = np.full((len(parts), 4), np.inf)
    for n, part in enumerate(parts):
        if part.again is not None:
            again[n] = _columns(part.again, n >= first_state)
    return _Tables(choices, np.array([n for n, _ in items], dtype=np.int64), again)


def _columns(choice: Choice, state: bool) -> tuple[float, ...]:
    error = (0.0, choice.error) if state else (choice.error, 0.0)
    return choice.seconds, choice.nbytes, *error


def _dual(tables: _Tables, prices: np.ndarray) -> tuple[float, np.ndarray]:
    """The cheapest choices at these prices of a byte and of error, and what they use."""

    def cost(table: np.ndarray) -> np.ndarray:
        total = table[..., 0].copy()
        for k, price in enumerate(prices):
            total += price * np.where(np.isfinite(table[..., 1 + k]), table[..., 1 + k], 0.0)
        return total

    n_parts = len(tables.again)
    each = cost(tables.choices)
    pick = each.argmin(axis=1)
    rows = np.arange(len(pick))
    own = np.bincount(tables.owners, each[rows, pick], minlength=n_parts)
    instead = cost(tables.again)
    runs = instead < own
    used = tables.choices[rows, pick, 1:][~runs[tables.owners]].sum(axis=0)
    return float(np.minimum(own, instead).sum()), used + tables.again[runs, 1:].sum(axis=0)
