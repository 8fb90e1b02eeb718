"""What a run leaves behind: metrics as CSV, a summary as JSON, and one table for the eyes."""

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from memtrain.experiments.loop import Row

_CATEGORIES = (
    ("weights", "weights"),
    ("gradients", "gradients"),
    ("optimizer states", "states"),
    ("saved activations", "saved"),
    ("total", "total"),
    ("peak of a step", "peak"),
)


class Metrics:
    """metrics.csv, a line a step, on disk as soon as it is known.

    Args:
        path: A file that does not exist yet.
        rows: Lines to begin with (of the run that is continued).

    Raises:
        FileExistsError: If the file exists.
    """

    def __init__(self, path: Path, rows: Iterable[Row] = ()) -> None:
        self._file = path.open("x", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        self._writer.writerow(Row._fields)
        for row in rows:
            self.write(row)

    def write(self, row: Row) -> None:
        """Append a line; None is left empty."""
        self._writer.writerow(row)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write_summary(path: Path, summaries: Mapping[str, Mapping[str, Any]], **facts: Any) -> None:
    """Write summary.json.

    Args:
        path: The file.
        summaries: Run name -> `Run.summary()`.
        facts: Further top-level entries.
    """
    content = {**facts, "runs": summaries, "ratio": ratios(summaries)}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def ratios(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Wrapped over plain, for everything that both have.

    Args:
        summaries: Run name -> `Run.summary()`.

    Returns:
        Bytes by category, `step_seconds`, `train_loss`, `validation_loss`; empty without both runs.

    Example:
        >>> ratios({"plain": {"bytes": {"states": 8}}, "wrapped": {"bytes": {"states": 2}}})
        {'states': 0.25}
    """
    if not {"plain", "wrapped"} <= set(summaries):
        return {}
    plain, wrapped = (_flat(summaries[name]) for name in ("plain", "wrapped"))
    return {key: wrapped[key] / value for key, value in plain.items() if value and wrapped.get(key)}


def table(title: str, summaries: Mapping[str, Mapping[str, Any]]) -> Table:
    """The table at the end: what each run keeps alive, its speed and its losses.

    Args:
        title: Above the table.
        summaries: Run name -> `Run.summary()`.

    Returns:
        A rich table that fits 80 columns.
    """
    result = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    result.add_column("")
    for name in (*summaries, "ratio"):
        result.add_column(name, justify="right")
    flat = {name: _flat(summary) for name, summary in summaries.items()}
    ratio = ratios(summaries)

    def add(label: str, key: str, form: Any, *, last: bool = False) -> None:
        cells = [
            form(values[key]) if values.get(key) is not None else "-" for values in flat.values()
        ]
        share = f"{ratio[key]:.3f}" if key in ratio else "-"
        result.add_row(label, *cells, share, end_section=last)

    for label, key in _CATEGORIES:
        add(label, key, mib, last=key in ("saved", "peak"))
    add("step time (median)", "step_seconds", lambda value: f"{1000 * value:.1f} ms", last=True)
    add("train loss (last tenth)", "train_loss", lambda value: f"{value:.4f}")
    add("validation loss", "validation_loss", lambda value: f"{value:.4f}")
    return result


def mib(nbytes: float) -> str:
    """Bytes for the eye.

    Example:
        >>> mib(3 * 2**20), mib(2**12)
        ('3.00 MiB', '4.0 KiB')
    """
    if nbytes < 2**19:
        return f"{nbytes / 2**10:.1f} KiB"
    return f"{nbytes / 2**20:,.2f} MiB"


def _flat(summary: Mapping[str, Any]) -> dict[str, Any]:
    numbers = ("step_seconds", "train_loss", "validation_loss")
    # nothing was counted where the meter never ran: 0 bytes of weights is no measurement
    counted = {key: value or None for key, value in summary.get("bytes", {}).items()}
    return {**counted, **{key: summary[key] for key in numbers if key in summary}}
