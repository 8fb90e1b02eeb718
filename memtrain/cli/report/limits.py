"""`memtrain-report --fail-over` and `--fail-under`: limits that a build can hold."""

from memtrain.audit.report import Report
from memtrain.cli.report.peak import at_peak
from memtrain.config.sizes import format_size


def broken(report: Report, over: int | None, under: float | None) -> list[str]:
    """The limits that a report breaks, each in a line.

    Args:
        report: The audit.
        over: Most bytes of the planned peak, or of the planned total if the report has no
            timelines; None allows any.
        under: How many times as much plain PyTorch must take, at least; None: any.

    Returns:
        Nothing if all hold. Bytes that are unknown break every limit: it cannot be told.

    Example:
        >>> from memtrain.audit.report import Row
        >>> row = Row(name="w", kind="weight", plain=4096, planned=2048)
        >>> broken(Report(rows=(row,), kept=(), unmatched=(), loss=True), 1024, 2.0)
        ['the planned total, 2.00 KiB, is over --fail-over 1.00 KiB']
    """
    unknown = report.totals()["total"].unknown
    peak = at_peak(report).get("total")
    sides, name = peak or report.totals()["total"], "peak" if peak else "total"
    if unknown and not peak and (over is not None or under is not None):
        return [f"the limits cannot be told: {unknown}"]
    lines = []
    if over is not None and sides.planned > over:
        shown = format_size(sides.planned)
        lines.append(f"the planned {name}, {shown}, is over --fail-over {format_size(over)}")
    if under is not None and sides.plain < under * sides.planned:
        times = f"{sides.plain / sides.planned:.3f} times the planned {name}"
        lines.append(f"plain PyTorch takes {times}, under --fail-under {under:g}")
    return lines
