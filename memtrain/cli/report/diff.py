"""`memtrain-report --diff`: what changed between two reports, by category and by site."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from memtrain.cli.report.group_by import pattern
from memtrain.config.sizes import format_size


class Pair(NamedTuple):
    """Bytes of one side, plain and planned."""

    plain: int
    planned: int


@dataclass(frozen=True, kw_only=True)
class Line:
    """A category, or sites that stand for the same memory in one of the reports."""

    name: str
    before: Pair
    after: Pair

    @property
    def growth(self) -> int:
        """Planned bytes that came to it; below 0, that left it."""
        return self.after.planned - self.before.planned

    @property
    def changed(self) -> bool:
        """Whether either number differs."""
        return self.before != self.after


@dataclass(frozen=True, kw_only=True)
class Change:
    """What `compare` finds."""

    settings: tuple[str, ...]
    """Lines `key: before -> after`."""
    categories: tuple[Line, ...]
    """All of them, the `total`, and the `peak` if both reports have one."""
    sites: tuple[Line, ...]
    """Those that changed, the largest growth or saving first."""

    @property
    def growth(self) -> int:
        """Planned bytes of the peak; of the total where a report has no peak."""
        return self.categories[-1].growth


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Change:
    """Compare two reports as `--json` writes them.

    Rows are matched by their sites; where one report joins sites that the other keeps apart, they
    are one line, so that the lines' growth sums to that of the total.

    Args:
        before: One report.
        after: The other.

    Returns:
        The differences.

    Example:
        >>> row = {"name": "w", "kind": "weight", "plain": 8, "planned": 8, "sites": ["w"]}
        >>> one = {"settings": {"batch": 1}, "categories": {"total": row}, "rows": [row]}
        >>> other = {**one, "settings": {"batch": 2}}
        >>> compare(one, other).settings
        ('batch: 1 -> 2',)
    """
    keys = dict.fromkeys([*before["settings"], *after["settings"]])
    pairs = [(key, before["settings"].get(key), after["settings"].get(key)) for key in keys]
    lines = _lines(before["rows"], after["rows"])
    return Change(
        settings=tuple(f"{key}: {_word(a)} -> {_word(b)}" for key, a, b in pairs if a != b),
        categories=(
            *_categories(before["categories"], after["categories"]),
            *_peak(before, after),
        ),
        sites=tuple(
            sorted((line for line in lines if line.changed), key=lambda line: -abs(line.growth))
        ),
    )


def _word(value: Any) -> str:
    if value is None or value == []:
        return "(none)"
    return " ".join(value) if isinstance(value, list) else str(value)


def _categories(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Line]:
    names = [name for name in dict.fromkeys([*before, *after]) if name != "total"]
    none = {"plain": 0, "planned": 0}
    for name in [*names, "total"]:
        one, other = before.get(name, none), after.get(name, none)
        yield Line(name=name, before=_pair([one]), after=_pair([other]))


def _peak(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Line]:
    if before.get("peak") and after.get("peak"):
        yield Line(name="peak", before=_pair([before["peak"]]), after=_pair([after["peak"]]))


def _pair(rows: Sequence[Mapping[str, Any]]) -> Pair:
    return Pair(sum(row["plain"] for row in rows), sum(row["planned"] for row in rows))


def _lines(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[Line]:
    """One line for each set of sites that rows of either side connect."""
    parents: dict[tuple[str, str], tuple[str, str]] = {}

    def root(site: tuple[str, str]) -> tuple[str, str]:
        while parents.setdefault(site, site) != site:
            parents[site] = parents[parents[site]]
            site = parents[site]
        return site

    groups: dict[tuple[str, str], tuple[list[Any], list[Any]]] = {}
    rows = [(0, row) for row in before] + [(1, row) for row in after]
    keys = [[(row["kind"], site) for site in row["sites"] or [row["name"]]] for _, row in rows]
    for sites in keys:
        for site in sites[1:]:
            parents[root(site)] = root(sites[0])
    for (side, row), sites in zip(rows, keys, strict=True):
        groups.setdefault(root(sites[0]), ([], []))[side].append(row)
    return [
        Line(name=_name([*old, *new]), before=_pair(old), after=_pair(new))
        for old, new in groups.values()
    ]


def _name(rows: Sequence[Mapping[str, Any]]) -> str:
    largest = max(rows, key=lambda row: max(row["plain"], row["planned"]))
    kind = largest["kind"]
    return largest["name"] + (f" ({kind})" if kind in ("weight", "gradient") else "")


def summed(lines: Iterable[Line]) -> list[Line]:
    """Lines whose names differ in layer numbers only, as one; the largest change first.

    Example:
        >>> lines = [Line(name=f"h.{i}.act / gelu / input", before=Pair(8, 4), after=Pair(8, 1))
        ...          for i in range(3)]
        >>> [(line.name, line.growth) for line in summed(lines)]
        [('h.*.act / gelu / input', -9)]
    """
    sums: dict[str, Line] = {}
    for line in lines:
        name = pattern(line.name)
        if (one := sums.get(name)) is not None:
            before, after = _sum(one.before, line.before), _sum(one.after, line.after)
            sums[name] = Line(name=name, before=before, after=after)
        else:
            sums[name] = replace(line, name=name)
    return sorted(sums.values(), key=lambda line: -abs(line.growth))


def _sum(one: Pair, other: Pair) -> Pair:
    return Pair(one.plain + other.plain, one.planned + other.planned)


def show_change(console: Console, change: Change, *, top: int = 10, by: str = "pattern") -> None:
    """Print the tables; they fit 80 columns.

    Args:
        console: Where to.
        change: What to.
        top: How many of the changes.
        by: `pattern`: layers summed; `site`: each by itself.

    Raises:
        ValueError: For another `by`.
    """
    if by not in ("pattern", "site"):
        raise ValueError(f"--by {by} is not for --diff; allowed: pattern, site")
    sites = summed(change.sites) if by == "pattern" else change.sites
    for line in change.settings:
        console.print(line, markup=False, highlight=False)
    console.print(_table("planned bytes by category", change.categories, planned=True))
    if any(line.before.plain != line.after.plain for line in change.categories):
        console.print(_table("\nplain bytes by category", change.categories, planned=False))
    if not change.sites:
        console.print("no site changed")
        return
    shown = sites[:top]
    title = f"\nplanned bytes of the {len(shown)} largest of {len(sites)} changes by {by}"
    console.print(_table(title, shown, planned=True))


def _table(title: str, lines: Sequence[Line], *, planned: bool) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("", overflow="fold")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        before, after = line.before[planned], line.after[planned]
        sign = "+" if after > before else ""
        change = sign + format_size(after - before) if after != before else "-"
        style = "bold" if line.name in ("total", "peak") else ""
        row = (escape(line.name), format_size(before), format_size(after), change)
        table.add_row(*row, style=style)
    return table
