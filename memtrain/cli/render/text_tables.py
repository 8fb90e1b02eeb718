"""Tables that `memtrain-report` prints, within 80 columns."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from memtrain.audit.report import KeptTensors, Report, Total
from memtrain.cli.render.report_data import (
    ReportData,
    advice,
    answer_lines,
    live_at_peak,
    peak_lines,
    sum_rows,
    timelines,
)
from memtrain.config.sizes import format_size

HIDDEN = ("labels", "overrides")
"""Settings that the first line does not show."""


def show(console: Console, data: ReportData, *, top: int = 10, by: str = "pattern") -> None:
    """Print a plan for a budget, the answer, and the tables of a report.

    The tables: categories, the peak, the largest sums, kept tensors with their reasons.
    """
    report = data.report
    if data.fit:
        console.print(str(data.fit), markup=False, highlight=False)
        console.print()
    for line in (*heading(data.settings), *answer_lines(data)):
        console.print(line, markup=False)
    console.print(_categories(report))
    for line in notes(report):
        console.print(line, markup=False)
    console.print()
    if timelines(report):
        console.print(_peak(data))
    lines = peak_lines(report)
    for line in lines:
        console.print(line, markup=False)
    if hints := [] if data.fit else list(advice(report)):  # the planner has chosen
        console.print("largest parts with the plan, and how to reduce them")
        for line in hints:
            console.print(f"  {line}", markup=False)
    if lines or hints:
        console.print()
    console.print(_largest(report, top, by))
    console.print(_kept(report.kept))
    for rule in report.unmatched:
        console.print(f"matched nothing: {rule}", markup=False)


def heading(settings: Mapping[str, Any]) -> list[str]:
    """Return lines on the model, the batch and the optimizer of the report."""
    shown = [f"{name}={value}" for name, value in settings.items() if name not in HIDDEN]
    return [" ".join(shown), *settings.get("overrides", ())]


def _categories(report: Report) -> Table:
    """Return the table of bytes by category, and in total."""
    table = _table("bytes by category")
    for name, total in report.totals().items():
        unknown = "+ ?" if total.unknown else ""
        plain, planned, ratio = format_total(total)
        style = "bold" if name == "total" else ""
        table.add_row(name, plain + unknown, planned + unknown, ratio, style=style)
    return table


def _peak(data: ReportData) -> Table:
    """Return the table of live bytes at the peak, of the baseline and the plan."""
    device = data.settings.get("device")
    table = _table("live at the peak" + (f" of a step on {device}" if device else ""))
    for name, pair in live_at_peak(data.report).items():
        table.add_row(name, *format_total(pair), style="bold" if name == "total" else "")
    return table


def notes(report: Report) -> list[str]:
    """Return notes on bytes that the sums do not include."""
    lines = [
        f"{name}: unknown, left out: {total.unknown}"
        for name, total in report.totals().items()
        if total.unknown and name != "total"
    ]
    if report.host:
        parts = ", ".join(f"{name} {format_size(n)}" for name, n in report.host.items())
        lines.append(
            f"In host memory with the plan: {format_size(sum(report.host.values()))} ({parts})."
        )
    counted = "counted (the batch has labels)" if report.loss else "not counted (no labels given)"
    return [*lines, f"The loss's saved tensors are {counted}."]


def _largest(report: Report, top: int, by: str) -> Table:
    """Return the table of the largest sums of the report's rows."""
    sums = sum_rows(report, by)
    shown = sums[:top]
    table = _table(f"the {len(shown)} largest of {len(sums)} {by}s")
    table.add_column("rows", justify="right", no_wrap=True)
    for name, total, count in shown:
        table.add_row(escape(name), *format_total(total), f"{count:,}")
    return table


def _kept(groups: Iterable[KeptTensors]) -> RenderableType:
    """Return the table of kept sites by reason."""
    table = Table(title="\nnot compressed, and why", title_justify="left", box=None, pad_edge=False)
    table.add_column("why", overflow="fold")
    table.add_column("kind")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("tensors", justify="right", no_wrap=True)
    for group in groups:
        why = escape(f"{group.reason}\n  e.g. {group.example}")
        table.add_row(why, group.kind, format_size(group.nbytes), f"{group.count:,}")
    return table


def format_total(total: Total) -> tuple[str, str, str]:
    """Format the baseline's bytes, the planned bytes and their ratio."""
    ratio = "-" if total.ratio is None else f"{total.ratio:.3f}"
    return format_size(total.plain), format_size(total.planned), ratio


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, expand=False)
    table.add_column("", overflow="fold", ratio=None)
    for name in ("baseline", "planned", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    return table
