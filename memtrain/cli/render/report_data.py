"""Data that `memtrain-report` prints: sums, peaks, advice, limits."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from memtrain.audit.peak import PARTS, Moment, Timeline
from memtrain.audit.peak.timeline import RECOMPUTED, SAVED
from memtrain.audit.report import CATEGORIES, Report, Row, Total
from memtrain.config.sizes import format_size
from memtrain.planner import Fit

GROUPINGS = ("pattern", "site", "module", "op")
"""Values of `--by`."""
SIDES = ("plain", "planned")
LABELS = {"plain": "baseline", "planned": "planned"}
"""Side -> its name in printed text."""
MAX_MOMENTS = 400
"""Most moments of a step that are drawn or written."""
MIN_SHARE = 0.1
"""Share of the planned bytes below which no advice is given."""
_MORE = re.compile(r" \(\+\d+\)$")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_REMEDIES = {
    "weights": "weights=bf16+8 keeps float32 weights in 3 bytes",
    "gradients": "gradients=release lets each go as soon as it is used",
    "optimizer states": "preset=balanced keeps them in 4 bits",
    "saved activations": "preset=smallest or checkpointed, or a smaller batch",
    "temporaries": "a smaller batch, shorter sequences or smaller images",
}
_ONCE = ("weights", "gradients", "optimizer states")
"""Categories without advice if the plan compresses them already."""


@dataclass(frozen=True)
class ReportData:
    """A report, its settings, and the results of `memory=` and `budget=`."""

    report: Report
    settings: Mapping[str, Any]
    """Key -> value, from `arguments.settings`."""
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """`batch`, and for text `seq` -> the largest that fits `memory=`: `plain`, `planned`, and the
    `limit` beyond which nothing was tried; 0 where not even 1 fits. Empty: none was searched."""
    memory: int = 0
    """Bytes of `memory=`."""
    fit: Fit | None = None
    """The planner's result, if there was a budget."""


def sum_rows(report: Report, by: str) -> list[tuple[str, Total, int]]:
    """Sum a report's rows by one of `GROUPINGS`: name, bytes and number of rows, largest first.

    A pattern joins rows whose names differ only in layer numbers (`h.*.mlp`). An op joins its saved
    activations; each other category is one sum.
    """
    groups: dict[str, list[Row]] = {}
    for index, row in enumerate(report.rows):
        groups.setdefault(str(index) if by == "site" else _name(row, by), []).append(row)
    sums = [(_name(rows[0], by), total_of(rows), len(rows)) for rows in groups.values()]
    return sorted(sums, key=lambda group: -max(group[1].plain, group[1].planned))


def total_of(rows: Sequence[Row | Total]) -> Total:
    """Return the sum of several totals."""
    return Total(plain=sum(r.plain for r in rows), planned=sum(r.planned for r in rows))


def module_of(row: Row) -> str:
    """Return the module of a row; empty at the root.

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


def _name(row: Row, by: str) -> str:
    if by == "module":
        return module_of(row) or "(root)"
    if by == "op":
        return row.name.split(" / ")[1] if row.kind == "activation" else f"({CATEGORIES[row.kind]})"
    kind = f" ({row.kind})" if row.kind in ("weight", "gradient") else ""
    return (row.name if by == "site" else pattern(row.name)) + kind


def pattern(name: str) -> str:
    """Return a row's name with `*` for the numbers in its module's path.

    Example:
        >>> pattern("h.0.fc1 / linear / input (+1)")
        'h.*.fc1 / linear / input'
    """
    site, *rest = _MORE.sub("", name).split(" / ")
    return " / ".join([_NUMBER.sub("*", site), *rest])


def timelines(report: Report, *, measured: bool = False) -> dict[str, Timeline]:
    """Return the timelines of a report by side, predicted or measured; empty if it has none."""
    both = (report.timeline, report.planned_timeline)
    if measured:
        both = (report.measured, report.planned_measured)
    pairs = zip(SIDES, both, strict=True)
    return {side: line for side, line in pairs if line is not None and line.moments}


def live_at_peak(report: Report) -> dict[str, Total]:
    """Return live bytes at the peaks of both sides, and `total`; empty without timelines.

    Each side has its own peak, which may be at different moments of the step.
    """
    lines = timelines(report)
    if len(lines) < 2:
        return {}
    plain, planned = lines["plain"].peak, lines["planned"].peak
    alive = {
        part: Total(plain=plain.parts.get(part, 0), planned=planned.parts.get(part, 0))
        for part in PARTS
        if plain.parts.get(part) or planned.parts.get(part)
    }
    return {**alive, "total": Total(plain=plain.nbytes, planned=planned.nbytes)}


def peak_lines(report: Report) -> list[str]:
    """Return lines on the moments of the peaks, the requested and the measured bytes."""
    predicted = timelines(report)
    lines = [_peak_line(LABELS[side], line) for side, line in predicted.items()]
    lines += _saved_activation_lines(report)
    for side, line in timelines(report, measured=True).items():
        words = _peak_line(f"{LABELS[side]}, measured", line)
        if side in predicted:
            words += f"; predicted {predicted[side].peak.nbytes / line.peak.nbytes - 1:+.1%}"
        lines.append(words)
    return lines


def _peak_line(side: str, line: Timeline) -> str:
    shown, requested = format_size(line.peak.nbytes), format_size(line.requested)
    words = f"{side}: {shown} at the peak, in the {line.peak.label}"
    words += f"; tensors ask for {requested}" if requested != shown else ""
    if line.reserved is not None:
        words += f"; reserved {format_size(line.reserved)}"
        words += f", CUDA context {format_size(line.context)}" if line.context else ""
    return words


def _saved_activation_lines(report: Report) -> Iterator[str]:
    """Yield a line per side: saved activations, and the other bytes that are live at the peak."""
    totals = report.totals()[SAVED]
    for side, line in timelines(report).items():
        saved, parts = getattr(totals, side), Counter(line.peak.parts)
        alive = parts.pop(SAVED, 0) + parts.pop(RECOMPUTED, 0)
        rest = ", ".join(f"{name} {format_size(n)}" for name, n in parts.most_common(3))
        yield (
            f"{LABELS[side]}: the forward saves {format_size(saved)} of activations; at the peak "
            f"{format_size(alive)} of them are live, besides {rest}"
        )


def downsample(moments: Sequence[Moment], most: int = MAX_MOMENTS) -> list[Moment]:
    """Reduce moments to at most `most`: the highest moment of each interval."""
    count = min(most, len(moments))
    edges = [index * len(moments) // count for index in range(count + 1)] if count else []
    return [
        max(moments[low:high], key=lambda moment: moment.nbytes) for low, high in pairwise(edges)
    ]


def answer_lines(data: ReportData) -> list[str]:
    """Return the answer to `budget=` or `memory=`, or the bytes of a step, in a line or two.

    Example:
        >>> report = Report(rows=(), kept=(), unmatched=(), loss=True)
        >>> sizes = {"batch": {"plain": 4, "planned": 14, "limit": 2**20}}
        >>> answer_lines(ReportData(report, {}, sizes, 8 * 2**30))
        ['largest batch in 8.00 GiB: 4 (baseline), 14 (planned)']
    """
    return [*budget_lines(data), *size_lines(data)] or [*_need_lines(data.report)]


def _need_lines(report: Report) -> Iterator[str]:
    """Yield the bytes of a step, of the baseline and planned."""
    lines = timelines(report)
    if len(lines) < 2:
        return
    plain, planned = (line.needed.nbytes for line in lines.values())
    where = "of the device" if lines["plain"].reserved is not None else "at its peak"
    yield (
        f"a step needs {format_size(plain)} {where} without memtrain, "
        f"{format_size(planned)} with it ({planned / plain:.2f})"
    )


def size_lines(data: ReportData) -> Iterator[str]:
    """Return lines on the sizes found for `memory=`."""
    words = {"batch": "largest batch", "seq": "longest sequence"}
    for what, found in data.sizes.items():
        limit = {found["limit"]: f"{found['limit']:,}, the model's limit", 0: "none"}
        sizes = (f"{limit.get(found[side], f'{found[side]:,}')} ({LABELS[side]})" for side in SIDES)
        yield f"{words[what]} in {format_size(data.memory)}: {', '.join(sizes)}"


def budget_lines(data: ReportData) -> Iterator[str]:
    """Yield whether the baseline (else its largest parts) and the plan fit the budget.

    Without a budget or a peak, nothing is yielded.
    """
    lines, fit = timelines(data.report), data.fit
    if fit is None or len(lines) < 2:
        return
    plain, planned = (line.needed for line in lines.values())
    size = format_size(fit.budget)
    if plain.nbytes <= fit.budget:
        yield f"the baseline fits {size}: it needs {format_size(plain.nbytes)}"
    else:
        largest = Counter(plain.parts).most_common(2)
        most = " and ".join(f"{name} ({format_size(nbytes)})" for name, nbytes in largest)
        needs = format_size(plain.nbytes)
        yield f"the baseline does not fit {size}: it needs {needs}, most of it {most}"
    needs, free = format_size(planned.nbytes), fit.budget - planned.nbytes
    if free < 0:
        yield f"the plan does not fit: {needs}"
    else:
        yield f"the plan fits: {needs}, and {format_size(free)} stay free"


def advice(report: Report) -> Iterator[str]:
    """Yield the largest parts of the planned peak (or total), with remedies not in the plan."""
    parts = live_at_peak(report) or report.totals()
    whole = parts["total"].planned
    known = {name: parts[name] for name in _REMEDIES if name in parts}
    for name, part in sorted(known.items(), key=lambda item: -item[1].planned):
        compressed = name in _ONCE and (part.ratio or 1.0) < 1
        if whole and part.planned / whole >= MIN_SHARE and not compressed:
            yield f"{name}, {part.planned / whole:.0%}: {_REMEDIES[name]}"


def limit_error(report: Report, over: int | None) -> str:
    """Describe how a report breaks the limit of `--fail-over`; empty if the limit holds.

    The limit is for the planned peak, without timelines for the planned total. Unknown bytes break
    every limit.
    """
    unknown, peak = report.totals()["total"].unknown, live_at_peak(report).get("total")
    planned, name = (peak or report.totals()["total"]).planned, "peak" if peak else "total"
    if over is None:
        return ""
    if unknown and not peak:
        return f"the limit cannot be checked: {unknown}"
    shown = f"the planned {name}, {format_size(planned)}, is over --fail-over {format_size(over)}"
    return shown if planned > over else ""
