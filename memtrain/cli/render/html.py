"""`memtrain-report --html`: one page that stands alone, with pictures and the tables."""

from collections.abc import Iterable, Sequence
from html import escape

from memtrain.audit.report import Report
from memtrain.cli.render.svg import COLOURS, bars, legend, tag
from memtrain.cli.render.svg_timeline import timeline
from memtrain.cli.render.svg_treemap import treemap
from memtrain.cli.render.tables import heading, remarks, sides
from memtrain.cli.report.advice import verdict
from memtrain.cli.report.group_by import grouped
from memtrain.cli.report.outcome import Outcome
from memtrain.cli.report.peak import at_peak, described, timelines
from memtrain.config.sizes import format_size

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --faint: #6b6b74; --line: #dcdce2; --page: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececf1; --faint: #a0a0aa; --line: #3a3a42; --page: #17171a; }
}
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 960px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
h3 { font-size: .95rem; font-weight: 600; margin: 1rem 0 .3rem; }
p { margin: .4rem 0; } code, td:first-child { overflow-wrap: anywhere; }
.faint { color: var(--faint); } .large { font-size: 1.25rem; }
svg { width: 100%; height: auto; display: block; font: 13px system-ui, sans-serif; }
svg text { fill: var(--ink); } svg .small { font-size: 11px; fill: var(--faint); }
svg .grid { stroke: var(--line); } svg .dot { fill: var(--ink); }
svg .peak { font-weight: 600; paint-order: stroke; stroke: var(--page); stroke-width: 3px; }
svg .module { stroke: var(--faint); stroke-width: .6; pointer-events: all; }
svg .leaf { stroke: var(--page); stroke-width: .6; }
svg .column:hover { fill: var(--ink); fill-opacity: .12; }
.legend { list-style: none; padding: 0; margin: .5rem 0; display: flex; flex-wrap: wrap;
  gap: .2rem 1.2rem; font-size: 13px; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: right; padding: .2rem 0 .2rem 1rem; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; white-space: nowrap; vertical-align: top; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal; }
.words th, .words td { text-align: left; white-space: normal; }
th { font-weight: 600; } tr.total td { font-weight: 600; }
"""
_ROWS = 40


def as_html(outcome: Outcome) -> str:
    """The page: no script, no network, names escaped, light or dark as the reader has it.

    Args:
        outcome: What was found.

    Returns:
        The text of an HTML file.

    Example:
        >>> as_html(Outcome(Report(rows=(), kept=(), unmatched=(), loss=True), {}))[:15]
        '<!doctype html>'
    """
    report, asked = outcome.report, heading(outcome.settings)
    title = f"memtrain-report: {outcome.settings.get('model', '')}"
    head = [
        tag("title", escape(title)),
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        tag("style", _STYLE),
    ]
    body = [
        tag("h1", "Where the bytes of a training step go"),
        *(tag("p", tag("code", escape(line)), class_="faint") for line in asked),
        _summary(report),
        *_planner(outcome),
        *_categories(outcome),
        *_timelines(outcome),
        *_treemaps(report),
        *_tables(report),
    ]
    page = tag("head", "".join(head)) + tag("body", "\n".join(body))
    return f"<!doctype html>\n{tag('html', page, lang='en')}\n"


def _summary(report: Report) -> str:
    total = report.totals()["total"]
    plain, planned, ratio = sides(total)
    words = f"{plain} in plain PyTorch, {planned} with the plan (ratio {ratio})"
    if peak := at_peak(report).get("total"):
        plain, planned, ratio = sides(peak)
        words += f"; {plain} and {planned} at the peak (ratio {ratio})"
    return tag("p", tag("strong", escape(words)), class_="large")


def _planner(outcome: Outcome) -> Iterable[str]:
    if outcome.fit is not None:
        yield tag("h2", "The plan for a budget")
        yield _table(("", "what the planner found"), outcome.fit.rows(), "words")
        yield from (tag("p", escape(line)) for line in verdict(outcome))


def _categories(outcome: Outcome) -> Iterable[str]:
    totals = outcome.report.totals()
    names = [name for name in totals if name != "total"]
    both = {side: {n: getattr(totals[n], side) for n in names} for side in ("plain", "planned")}
    yield tag("h2", "By category")
    yield bars(both)
    yield legend(names)
    rows = [(name, *sides(total)) for name, total in totals.items()]
    yield _table(("", "plain", "planned", "ratio"), rows)
    yield from (tag("p", escape(line), class_="faint") for line in remarks(outcome.report))


def _timelines(outcome: Outcome) -> Iterable[str]:
    report = outcome.report
    words = [*described(report), *(outcome.fits.lines() if outcome.fits else ())]
    lines = timelines(report)
    if not lines:
        yield from (tag("p", escape(line)) for line in words)
        return
    yield tag("h2", "What is alive over the step, and the peak")
    ceiling = max(line.peak.nbytes for line in lines.values())
    seen = {part for line in lines.values() for moment in line.moments for part in moment.parts}
    for name, line in lines.items():
        yield tag("h3", name)
        yield timeline(line, name, ceiling)
    yield legend(part for part in COLOURS if part in seen)
    yield from (tag("p", escape(line)) for line in words)
    rows = [(name, *sides(pair)) for name, pair in at_peak(report).items()]
    yield _table(("alive at the peak", "plain", "planned", "ratio"), rows)


def _treemaps(report: Report) -> Iterable[str]:
    yield tag("h2", "By module")
    note = "Areas are bytes, less what names and frames take. Point at a box to read it."
    yield tag("p", note, class_="faint")
    for side in ("plain", "planned"):
        yield tag("h3", side)
        yield treemap(report, side)
    yield legend(name for name in report.totals() if name != "total")


def _tables(report: Report) -> Iterable[str]:
    yield tag("h2", "The largest")
    sums = grouped(report, "pattern")[:_ROWS]
    rows = [(one.name, *sides(one), f"{one.count:,}") for one in sums]
    yield _table(("module / op / tensor", "plain", "planned", "ratio", "rows"), rows)
    yield tag("h2", "Not compressed, and why")
    kept = [
        (f"{group.reason} (e.g. {group.example})", group.kind, format_size(group.nbytes),
         f"{group.count:,}")
        for group in report.kept
    ]  # fmt: skip
    yield _table(("why", "kind", "bytes", "tensors"), kept)
    for rule in report.unmatched:
        yield tag("p", f"Matched nothing: {tag('code', escape(rule))}", class_="faint")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "numbers") -> str:
    names = tag("tr", "".join(tag("th", escape(name)) for name in head))
    lines = [
        tag("tr", "".join(tag("td", escape(cell)) for cell in row), class_=_class(row[0]))
        for row in rows
    ]
    return tag("table", tag("thead", names) + tag("tbody", "".join(lines)), class_=kind)


def _class(name: str) -> str:
    return "total" if name == "total" else "row"
