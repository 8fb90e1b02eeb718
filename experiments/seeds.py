"""Runs over seeds, told in a table: means, and differences seed by seed with a 95% interval."""

import math
import statistics
from collections.abc import Iterable, Sequence

Row = dict[str, str]
"""A line of a CSV file."""
Seeds = dict[str, Row]
"""Seed -> a line of the file."""

_T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 1.96)
"""Student's t by degrees of freedom; from 10 on the normal distribution's."""


def by_run(
    rows: Iterable[Row], run: Sequence[str], variant: Sequence[str]
) -> dict[tuple[str, ...], dict[tuple[str, ...], Seeds]]:
    """Lines by what two lists of columns hold, and by their seed, in the order in which they came.

    Args:
        rows: Lines, each with a `seed`.
        run: Columns that tell what is compared from what is not.
        variant: Columns that tell apart what is compared.

    Example:
        >>> row = {"task": "digits", "way": "plain", "seed": "0"}
        >>> by_run([row], ["task"], ["way"]) == {("digits",): {("plain",): {"0": row}}}
        True
    """
    found: dict[tuple[str, ...], dict[tuple[str, ...], Seeds]] = {}
    for row in rows:
        variants = found.setdefault(tuple(row[name] for name in run), {})
        variants.setdefault(tuple(row[name] for name in variant), {})[row["seed"]] = row
    return found


def mean(seeds: Seeds, name: str) -> float:
    """The mean of a column over seeds."""
    return statistics.mean(float(row[name]) for row in seeds.values())


def paired(one: Seeds, other: Seeds, name: str) -> list[float]:
    """Differences of a column, seed by seed, of the seeds of both."""
    return [float(row[name]) - float(other[s][name]) for s, row in one.items() if s in other]


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Mean, and half of the 95% interval; none for fewer than two values, NaN where a run left."""
    if len(values) < 2:
        return None
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan
    width = _T95[min(len(values) - 1, 10)] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), width


def difference(one: Seeds, other: Seeds, name: str) -> str:
    """Tell what a column differs by, with its interval; "" where none is known, or all are alike.

    Example:
        >>> first = {str(seed): {"loss": str(2.0 + seed / 10)} for seed in range(3)}
        >>> difference(first, {seed: {"loss": "2.0"} for seed in first}, "loss")
        '+0.1000 +- 0.2484'
    """
    minus = interval(paired(one, other, name))
    return f"{minus[0]:+.4f} +- {minus[1]:.4f}" if minus and minus != (0, 0) else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of Markdown.

    Example:
        >>> table(["a", "b"], [["1", "2"]])
        ['| a | b |', '| --- | --- |', '| 1 | 2 |']
    """
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return [lines[0], f"|{' --- |' * len(heads)}", *lines[1:]]
