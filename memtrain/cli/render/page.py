"""`memtrain-report --html`: one self-contained page with figures and tables."""

from importlib.resources import files
from typing import Any

from memtrain.cli.render import charts
from memtrain.cli.render.outcome import (
    Outcome,
    answer,
    at_peak,
    described,
    grouped,
    timelines,
)
from memtrain.cli.render.text_tables import heading, remarks, sides
from memtrain.config.sizes import format_size

_ROWS = 40


def as_html(outcome: Outcome) -> str:
    """Return the page: no script, no network, names escaped, light and dark.

    Args:
        outcome: The findings.

    Returns:
        The text of an HTML file.

    Raises:
        ImportError: Without matplotlib; names the extra.

    Example:
        >>> from memtrain.audit.report import Report
        >>> as_html(Outcome(Report(rows=(), kept=(), unmatched=(), loss=True), {}))[:15]
        '<!doctype html>'
    """
    from jinja2 import Environment

    charts.check_installed("--html")
    template = (files("memtrain.cli.render") / "page.html").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return page.from_string(template).render(**_content(outcome), **_pictures(outcome))


def _content(outcome: Outcome) -> dict[str, Any]:
    report = outcome.report
    totals, alive = report.totals(), at_peak(report)
    plain, planned, ratio = sides(totals["total"])
    summary = f"{plain} in plain PyTorch, {planned} with the plan (ratio {ratio})"
    if alive:
        plain, planned, ratio = sides(alive["total"])
        summary += f"; {plain} and {planned} at the peak (ratio {ratio})"
    return {
        "model": outcome.settings.get("model", ""),
        "heading": heading(outcome.settings),
        "summary": summary,
        "planner": outcome.fit.rows() if outcome.fit else (),
        "verdict": answer(outcome),
        "categories": [name for name in totals if name != "total"],
        "totals": [(name, *sides(total)) for name, total in totals.items()],
        "remarks": remarks(report),
        "described": described(report),
        "at_peak": [(name, *sides(pair)) for name, pair in alive.items()],
        "largest": [
            (name, *sides(total), f"{count:,}")
            for name, total, count in grouped(report, "pattern")[:_ROWS]
        ],
        "kept": [
            (f"{one.reason} (e.g. {one.example})", one.kind, format_size(one.nbytes),
             f"{one.count:,}")
            for one in report.kept
        ],
        "unmatched": report.unmatched,
    }  # fmt: skip


def _pictures(outcome: Outcome) -> dict[str, Any]:
    from markupsafe import Markup  # from jinja2: the figures are elements, not text to escape

    report = outcome.report
    return {
        "colours": charts.COLOURS,
        "parts": charts.drawn_parts(report),
        "bars": Markup(charts.bars_svg(report)),
        "timelines": {
            side: {
                "peak": f"{format_size(line.peak.nbytes)}, {line.peak.label}",
                "svg": Markup(charts.timeline_svg(report, side)),
            }
            for side, line in timelines(report).items()
        },
    }
