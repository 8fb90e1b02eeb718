"""`memtrain-report --csv`: one line a row of the report."""

import csv
import io

from memtrain.audit.report import Report
from memtrain.cli.report.group_by import module_of

COLUMNS = ("kind", "module", "name", "plain", "planned", "ratio", "compressor", "reason", "sites")


def as_csv(report: Report) -> str:
    """The rows of a report, with a header; sites are joined by semicolons.

    Args:
        report: The audit.

    Returns:
        Text as the `csv` module writes it, lines ended by a newline. A ratio is empty where there
        is nothing in plain PyTorch.

    Example:
        >>> from memtrain.audit.report import Row
        >>> row = Row(name="fc.weight", kind="weight", plain=64, planned=32, sites=("fc.weight",))
        >>> as_csv(Report(rows=(row,), kept=(), unmatched=(), loss=True)).splitlines()[1]
        'weight,fc,fc.weight,64,32,0.5,,,fc.weight'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in report.rows:
        ratio = "" if row.ratio is None else row.ratio
        sites = ";".join(row.sites)
        start = (row.kind, module_of(row), row.name, row.plain, row.planned, ratio)
        writer.writerow((*start, row.compressor, row.reason, sites))
    return text.getvalue()
