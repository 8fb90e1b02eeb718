"""The rows of a report, summed by site, by pattern, by module or by op."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from memtrain.audit.report import CATEGORIES, Report, Row

BY = ("pattern", "site", "module", "op")
"""What rows can be summed by."""

_MORE = re.compile(r" \(\+\d+\)$")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, kw_only=True)
class Sum:
    """Some rows' bytes."""

    name: str
    plain: int
    """Bytes in plain PyTorch."""
    planned: int
    """Bytes with the plan."""
    count: int
    """Rows."""

    @property
    def ratio(self) -> float | None:
        """Planned through plain; None where there is nothing in plain PyTorch."""
        return self.planned / self.plain if self.plain else None


def grouped(report: Report, by: str, depth: int = 0) -> list[Sum]:
    """Sum a report's rows; the sums are those of the report.

    Args:
        report: The audit.
        by: `site`: every row by itself; `pattern`: rows whose names differ in layer numbers only,
            written `h.*.mlp` as rules write them; `module`: everything of a module; `op`: the
            saved activations of an op, and each other category.
        depth: Of modules' paths: deeper ones count for their parent; 0 cuts nothing.

    Returns:
        Most bytes first, plain or planned; equal ones in the order of the model.

    Example:
        >>> rows = [Row(name=f"h.{i}.mlp / gelu / input", kind="activation", plain=8, planned=1)
        ...         for i in range(3)]
        >>> report = Report(rows=tuple(rows), kept=(), unmatched=(), loss=True)
        >>> [(one.name, one.plain, one.count) for one in grouped(report, "pattern")]
        [('h.*.mlp / gelu / input', 24, 3)]
        >>> [(one.name, one.plain) for one in grouped(report, "module", depth=1)]
        [('h', 24)]
    """
    sums: dict[str, Sum] = {}
    for index, row in enumerate(report.rows):
        name = _name(row, by, depth)
        key = f"{index}" if by == "site" else name
        one = sums.get(key) or Sum(name=name, plain=0, planned=0, count=0)
        sums[key] = replace(
            one,
            plain=one.plain + row.plain,
            planned=one.planned + row.planned,
            count=one.count + 1,
        )
    return largest(sums.values())


def largest(sums: Iterable[Sum]) -> list[Sum]:
    """Most bytes first, plain or planned."""
    return sorted(sums, key=lambda one: -max(one.plain, one.planned))


def module_of(row: Row) -> str:
    """The module that a row belongs to; empty at the root.

    Example:
        >>> module_of(Row(name="h.0.act / gelu / input", kind="activation", plain=1, planned=1))
        'h.0.act'
        >>> module_of(Row(name="h.0.fc.weight / adamw / step", kind="state", plain=1, planned=1))
        'h.0.fc'
    """
    first = row.name.split(" / ")[0]
    if row.kind == "activation":
        return "" if first == "(root)" else first
    return first.rpartition(".")[0]


def _name(row: Row, by: str, depth: int) -> str:
    if by == "module":
        path = module_of(row).split(".")
        return ".".join(path[: depth or None]) or "(root)"
    if by == "op":
        return row.name.split(" / ")[1] if row.kind == "activation" else f"({CATEGORIES[row.kind]})"
    kind = f" ({row.kind})" if row.kind in ("weight", "gradient") else ""
    if by == "site":
        return row.name + kind
    return pattern(row.name) + kind


def pattern(name: str) -> str:
    """A row's name with `*` for the numbers in its module's path.

    Example:
        >>> pattern("h.0.fc1 / linear / input (+1)")
        'h.*.fc1 / linear / input'
    """
    site, *rest = _MORE.sub("", name).split(" / ")
    return " / ".join([_NUMBER.sub("*", site), *rest])
