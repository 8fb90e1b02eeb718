"""Results of runs: metrics as CSV, a summary as JSON, a table and a plot."""

import csv
import errno
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
_COLOURS = {"plain": "#4c72b0", "wrapped": "#dd8452"}
_PARTS = (
    ("weights", "weights", "#55606e"),
    ("gradients", "gradients", "#8c9bab"),
    ("states", "optimizer states", "#6aa56a"),
    ("saved", "saved activations", "#d9a441"),
)


@contextmanager
def metrics_file(path: Path, rows: Iterable[Metrics] = ()) -> Iterator[Callable[[Metrics], None]]:
    """Open metrics.csv; each row is on disk at once.

    Args:
        path: A file that does not exist yet.
        rows: Rows to begin with (of a resumed run).

    Yields:
        A function that appends a row; None is left empty. It raises OSError if the disk is full.

    Raises:
        FileExistsError: If the file exists.
    """
    # Without a buffer: a failed write must not be repeated when the file is closed.
    with path.open("xb", buffering=0) as file:

        def write(row: Iterable[Any]) -> None:
            line = io.StringIO(newline="")
            csv.writer(line).writerow(row)
            content = line.getvalue().encode()
            if file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        write(Metrics._fields)
        for row in rows:
            write(row)
        yield write


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
    """Return ratios of the wrapped run to the baseline, for everything that both have.

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
    """Return the table at the end: bytes, speed and losses of each run.

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
    """Format bytes in KiB or MiB.

    Example:
        >>> mib(3 * 2**20), mib(2**12)
        ('3.00 MiB', '4.0 KiB')
    """
    if nbytes < 2**19:
        return f"{nbytes / 2**10:.1f} KiB"
    return f"{nbytes / 2**20:,.2f} MiB"


def losses_line(name: str, summary: Mapping[str, Any]) -> str:
    """Return a line with the steps and last losses of a run.

    Args:
        name: The run's name.
        summary: `Run.summary()`.

    Example:
        >>> losses_line("plain", {"steps": 8, "train_loss": 2.0, "validation_loss": None})
        'plain: 8 steps, train loss 2.0000'
    """
    losses = (("train loss", "train_loss"), ("validation loss", "validation_loss"))
    found = [f"{label} {summary[key]:.4f}" for label, key in losses if summary[key] is not None]
    return f"{name}: " + ", ".join([f"{summary['steps']} steps", *found])


def promise_line(nbytes: int, peak: int, resident: int | None = None) -> str:
    """Return the predicted peak beside the measured one.

    Args:
        nbytes: Bytes, predicted.
        peak: Bytes, the highest of the metered steps; 0 if there was none.
        resident: Bytes of the process in memory at its peak, if the system reports them.

    Example:
        >>> promise_line(2**21, 2**20)
        'promised peak 2.00 MiB, measured 1.00 MiB (0.500 of it)'
    """
    measured = f"{format_size(peak)} ({peak / nbytes:.3f} of it)" if peak else "no step was metered"
    process = f"; the process held {format_size(resident)} in memory" if resident else ""
    separator = " " if peak else ": "
    return f"promised peak {format_size(nbytes)}, measured{separator}{measured}{process}"


def _flat(summary: Mapping[str, Any]) -> dict[str, Any]:
    numbers = ("step_seconds", "train_loss", "validation_loss")
    # 0 bytes of weights: no step was metered
    counted = {key: value or None for key, value in summary.get("bytes", {}).items()}
    return {**counted, **{key: summary[key] for key in numbers if key in summary}}


def draw(path: Path, rows: Sequence[Metrics], summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw plot.png: the loss curves of the runs, and a bar of bytes for each.

    Args:
        path: The PNG file.
        rows: Metrics of all runs.
        summaries: Run name -> `Run.summary()`.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the message names the extra.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModuleNotFoundError(
            "the plot needs matplotlib: pip install 'memtrain[plot]'"
        ) from error
    figure = Figure(figsize=(10, 4.2), layout="constrained")  # no pyplot: no window, no state
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    for name in summaries:
        for split, style in (("train", "-"), ("validation", "o" if name == "plain" else "x")):
            found = [row for row in rows if row.run == name and row.split == split]
            losses = [row.loss for row in found]
            losses = smooth(losses) if split == "train" else losses
            label = f"{name}: {split}{', smoothed' * (split == 'train')}"
            left.plot([row.step for row in found], losses, style, color=_COLOURS[name], label=label)
    left.set(xlabel="step", ylabel="cross-entropy (nats)")
    left.grid(alpha=0.3)
    left.legend(fontsize=8)
    bottom = [0.0] * len(summaries)
    for key, label, colour in _PARTS:
        heights = [summary["bytes"][key] / 2**20 for summary in summaries.values()]
        right.bar(list(summaries), heights, bottom=bottom, color=colour, label=label, width=0.6)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    right.set(ylabel="MiB alive")
    right.set_ylim(0, 1.35 * max(*bottom, 1e-6))  # room for the legend
    right.legend(fontsize=8, loc="upper right")
    figure.savefig(path, dpi=120)


def smooth(values: Sequence[float], keep: float = 0.95) -> list[float]:
    """Return the exponential mean of values in order, without the bias to zero at the start.

    Example:
        >>> smooth([2.0, 2.0], keep=0.5)
        [2.0, 2.0]
    """
    mean, weight, result = 0.0, 0.0, []
    for value in values:
        mean = keep * mean + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        result.append(mean / weight)
    return result
