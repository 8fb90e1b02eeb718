"""Tables of runs over seeds: means, and paired differences with a 95% interval."""

import math
import statistics
from collections.abc import Iterable, Sequence

Row = dict[str, str]
"""A row of a CSV file."""
Seeds = dict[str, Row]
"""Seed -> a row of the file."""

_T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 1.96)
"""Student's t by degrees of freedom; from 10 on the normal distribution's."""


def by_run(rows: Iterable[Row], run: Sequence[str]) -> dict[tuple[str, ...], dict[str, Seeds]]:
    """Group rows by a list of columns, then by variant and by seed, in file order.

    Example:
        >>> row = {"task": "digits", "variant": "plain", "seed": "0"}
        >>> by_run([row], ["task"]) == {("digits",): {"plain": {"0": row}}}
        True
    """
    found: dict[tuple[str, ...], dict[str, Seeds]] = {}
    for row in rows:
        variants = found.setdefault(tuple(row[name] for name in run), {})
        variants.setdefault(row["variant"], {})[row["seed"]] = row
    return found


def mean(seeds: Seeds, name: str) -> float:
    """The mean of a column over seeds."""
    return statistics.mean(float(row[name]) for row in seeds.values())


def paired(one: Seeds, other: Seeds, name: str) -> list[float]:
    """Differences of a column, seed by seed, of the seeds of both."""
    return [float(row[name]) - float(other[s][name]) for s, row in one.items() if s in other]


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Mean and half of the 95% interval; None below two values, NaN where a run diverged."""
    if len(values) < 2:
        return None
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan
    width = _T95[min(len(values) - 1, 10)] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), width


def difference(one: Seeds, other: Seeds, name: str) -> str:
    """Format the mean difference of a column with its interval; "" where there is none, or it is 0.

    Example:
        >>> first = {str(seed): {"loss": str(2.0 + seed / 10)} for seed in range(3)}
        >>> difference(first, {seed: {"loss": "2.0"} for seed in first}, "loss")
        '+0.1000 +- 0.2484'
    """
    minus = interval(paired(one, other, name))
    return f"{minus[0]:+.4f} +- {minus[1]:.4f}" if minus and minus != (0, 0) else ""


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of Markdown.

    Example:
        >>> markdown(["a", "b"], [["1", "2"]])
        ['| a | b |', '| --- | --- |', '| 1 | 2 |']
    """
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return [lines[0], f"|{' --- |' * len(heads)}", *lines[1:]]
