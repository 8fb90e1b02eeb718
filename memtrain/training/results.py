"""Results of runs: metrics as CSV, a summary as JSON, and a table."""

import csv
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from memtrain.config.sizes import format_size
from memtrain.training.run import Metrics

_CATEGORIES = (
    ("weights", "weights"),
    ("gradients", "gradients"),
    ("optimizer states", "states"),
    ("saved activations", "saved"),
    ("total", "total"),
    ("peak of a step", "peak"),
)


def metrics_file(path: Path, rows: Iterable[Metrics] = ()) -> Callable[[Metrics], None]:
    """Start metrics.csv with rows of a resumed run; return a function that appends one at once."""

    def write(row: Iterable[Any], mode: str = "a") -> None:
        try:
            with path.open(mode, newline="") as file:
                csv.writer(file).writerow(row)
        except OSError as error:
            raise type(error)(f"cannot write {str(path)!r}: {error}") from error

    write(Metrics._fields, "x")
    for row in rows:
        write(row)
    return write


def write_summary(path: Path, summaries: Mapping[str, Mapping[str, Any]], **facts: Any) -> None:
    """Write summary.json: `Run.summary()` by run name, and further facts."""
    content = {**facts, "runs": summaries, "ratio": ratios(summaries)}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def ratios(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return ratios of the wrapped run's summary to the baseline's; empty without both runs.

    Example:
        >>> ratios({"plain": {"bytes": {"states": 8}}, "wrapped": {"bytes": {"states": 2}}})
        {'states': 0.25}
    """
    if not {"plain", "wrapped"} <= set(summaries):
        return {}
    plain, wrapped = (_flat(summaries[name]) for name in ("plain", "wrapped"))
    return {key: wrapped[key] / value for key, value in plain.items() if value and wrapped.get(key)}


def table(title: str, summaries: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table at the end, in 80 columns: bytes, speed and losses of each run."""
    result = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    result.add_column("")
    for name in (*summaries, "ratio"):
        result.add_column(name, justify="right")
    flat = {name: _flat(summary) for name, summary in summaries.items()}
    ratio = ratios(summaries)

    def add(label: str, key: str, show: Any, *, last: bool = False) -> None:
        cells = [
            show(values[key]) if values.get(key) is not None else "-" for values in flat.values()
        ]
        share = f"{ratio[key]:.3f}" if key in ratio else "-"
        result.add_row(label, *cells, share, end_section=last)

    for label, key in _CATEGORIES:
        add(label, key, format_size, last=key in ("saved", "peak"))
    add("step time (median)", "step_seconds", lambda value: f"{1000 * value:.1f} ms", last=True)
    add("train loss (last tenth)", "train_loss", lambda value: f"{value:.4f}")
    add("validation loss", "validation_loss", lambda value: f"{value:.4f}")
    return result


def losses_line(name: str, summary: Mapping[str, Any]) -> str:
    """Return a line with the steps and last losses of a run.

    Example:
        >>> losses_line("plain", {"steps": 8, "train_loss": 2.0, "validation_loss": None})
        'plain: 8 steps, train loss 2.0000'
    """
    losses = (("train loss", "train_loss"), ("validation loss", "validation_loss"))
    found = [f"{label} {summary[key]:.4f}" for label, key in losses if summary[key] is not None]
    return f"{name}: " + ", ".join([f"{summary['steps']} steps", *found])


def promise_line(nbytes: int, peak: int) -> str:
    """Return the predicted peak beside the measured one (0: no step was metered).

    Example:
        >>> promise_line(2**21, 2**20)
        'promised peak 2.00 MiB, measured 1.00 MiB (0.500 of it)'
    """
    measured = f"{format_size(peak)} ({peak / nbytes:.3f} of it)" if peak else "no step was metered"
    separator = " " if peak else ": "
    return f"promised peak {format_size(nbytes)}, measured{separator}{measured}"


def _flat(summary: Mapping[str, Any]) -> dict[str, Any]:
    numbers = ("step_seconds", "train_loss", "validation_loss")
    # 0 bytes of weights: no step was metered
    counted = {key: value or None for key, value in summary.get("bytes", {}).items()}
    return {**counted, **{key: summary[key] for key in numbers if key in summary}}
