"""`memtrain-report --diff`: what changed between two reports, by category and by site."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from memtrain.audit.report import Total
from memtrain.cli.render.outcome import pattern, summed
from memtrain.config.sizes import format_size


class Change(NamedTuple):
    """Bytes of a category, or of sites that stand for the same memory in one of the reports."""

    name: str
    before: Total
    after: Total

    @property
    def growth(self) -> int:
        """Planned bytes that came to it; below 0, that left it."""
        return self.after.planned - self.before.planned


Changes = tuple[list[str], list[Change], list[Change]]
"""Lines of settings `key: before -> after`; all categories, then `total`, and last the `peak` if
both reports have one; the sites that changed, the largest growth or saving first."""


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Changes:
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
        >>> compare(one, other)[0]
        ['batch: 1 -> 2']
    """
    keys = dict.fromkeys([*before["settings"], *after["settings"]])
    pairs = [(key, before["settings"].get(key), after["settings"].get(key)) for key in keys]
    names = dict.fromkeys([*before["categories"], *after["categories"]])
    ordered = [*(name for name in names if name != "total"), "total"]
    none = {"plain": 0, "planned": 0}
    both = [(name, *(side["categories"].get(name, none) for side in (before, after)))
            for name in ordered]  # fmt: skip
    if before.get("peak") and after.get("peak"):
        both.append(("peak", before["peak"], after["peak"]))
    sites = [change for change in _sites(before["rows"], after["rows"])
             if change.before != change.after]  # fmt: skip
    return (
        [f"{key}: {_word(a)} -> {_word(b)}" for key, a, b in pairs if a != b],
        [Change(name, _total([old]), _total([new])) for name, old, new in both],
        sorted(sites, key=lambda change: -abs(change.growth)),
    )


def _word(value: Any) -> str:
    if value is None or value == []:
        return "(none)"
    return " ".join(value) if isinstance(value, list) else str(value)


def _total(rows: Sequence[Mapping[str, Any]]) -> Total:
    plain, planned = (sum(row[side] for row in rows) for side in ("plain", "planned"))
    return Total(plain=plain, planned=planned)


def _sites(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[Change]:
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
    return [Change(_name([*old, *new]), _total(old), _total(new)) for old, new in groups.values()]


def _name(rows: Sequence[Mapping[str, Any]]) -> str:
    largest = max(rows, key=lambda row: max(row["plain"], row["planned"]))
    kind = largest["kind"]
    return largest["name"] + (f" ({kind})" if kind in ("weight", "gradient") else "")


def by_pattern(changes: Iterable[Change]) -> list[Change]:
    """Changes whose names differ in layer numbers only, as one; the largest change first.

    Example:
        >>> before, after = Total(plain=8, planned=4), Total(plain=8, planned=1)
        >>> changes = [Change(f"h.{i}.act / gelu / input", before, after) for i in range(3)]
        >>> [(change.name, change.growth) for change in by_pattern(changes)]
        [('h.*.act / gelu / input', -9)]
    """
    groups: dict[str, list[Change]] = {}
    for change in changes:
        groups.setdefault(pattern(change.name), []).append(change)
    sums = [
        Change(name, summed([one.before for one in group]), summed([one.after for one in group]))
        for name, group in groups.items()
    ]
    return sorted(sums, key=lambda change: -abs(change.growth))


def show_changes(console: Console, changes: Changes, *, top: int = 10, by: str = "pattern") -> None:
    """Print the tables; they fit 80 columns.

    Args:
        console: Where to.
        changes: As `compare` gives them.
        top: How many of the sites.
        by: `pattern`: layers summed; `site`: each by itself.

    Raises:
        ValueError: For another `by`.
    """
    if by not in ("pattern", "site"):
        raise ValueError(f"--by {by} is not for --diff; allowed: pattern, site")
    settings, categories, changed = changes
    sites = by_pattern(changed) if by == "pattern" else changed
    for line in settings:
        console.print(line, markup=False, highlight=False)
    console.print(_table("planned bytes by category", categories, "planned"))
    if any(change.before.plain != change.after.plain for change in categories):
        console.print(_table("\nplain bytes by category", categories, "plain"))
    if not sites:
        console.print("no site changed")
        return
    shown = sites[:top]
    title = f"\nplanned bytes of the {len(shown)} largest of {len(sites)} changes by {by}"
    console.print(_table(title, shown, "planned"))


def _table(title: str, changes: Sequence[Change], side: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("", overflow="fold")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in changes:
        before, after = getattr(one.before, side), getattr(one.after, side)
        sign = "+" if after > before else ""
        change = sign + format_size(after - before) if after != before else "-"
        style = "bold" if one.name in ("total", "peak") else ""
        row = (escape(one.name), format_size(before), format_size(after), change)
        table.add_row(*row, style=style)
    return table
