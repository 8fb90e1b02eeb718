"""Results of runs: metrics as CSV, a summary as JSON, one table and one picture."""

import csv
import errno
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from memtrain.config.sizes import format_size
from memtrain.planner import Fit
from memtrain.training.run import Metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    """Open metrics.csv, a line a step, on disk as soon as it is known.

    Args:
        path: A file that does not exist yet.
        rows: Lines to begin with (of the run that is continued).

    Yields:
        A function that appends a row; None is left empty. It raises OSError if the disk is full.

    Raises:
        FileExistsError: If the file exists.
    """
    # Without a buffer: what cannot be written must not be tried again when the file is closed.
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


def result(name: str, summary: Mapping[str, Any]) -> str:
    """One line: what a run came to.

    Args:
        name: Of the run.
        summary: `Run.summary()`.

    Example:
        >>> result("plain", {"steps": 8, "train_loss": 2.0, "validation_loss": None})
        'plain: 8 steps, train loss 2.0000'
    """
    losses = (("train loss", "train_loss"), ("validation loss", "validation_loss"))
    told = [f"{label} {summary[key]:.4f}" for label, key in losses if summary[key] is not None]
    return f"{name}: " + ", ".join([f"{summary['steps']} steps", *told])


def promise(found: Fit, peak: int, nbytes: int | None = None) -> str:
    """One line: the promised peak beside the measured one.

    Args:
        found: What the planner found.
        peak: Bytes, the highest of the metered steps; 0 if none was.
        nbytes: Promised, where that is more than the plan's own peak.
    """
    return f"budget {format_size(found.budget)}: {promised(nbytes or found.peak.nbytes, peak)}"


def promised(nbytes: int, peak: int) -> str:
    """The promise beside what came.

    Args:
        nbytes: Promised.
        peak: As in `promise`.

    Example:
        >>> promised(2**21, 2**20)
        'promised peak 2.00 MiB, measured 1.00 MiB (0.500 of it)'
    """
    told = f"promised peak {format_size(nbytes)}"
    if not peak:
        return f"{told}, measured: no step was metered"
    return f"{told}, measured {format_size(peak)} ({peak / nbytes:.3f} of it)"


def resident(nbytes: int | None) -> str:
    """Tell what the process held besides, where the system says it.

    Args:
        nbytes: Of the process in memory, at its peak.

    Example:
        >>> resident(2**30), resident(None)
        ('; the process held 1.00 GiB in memory', '')
    """
    return "" if nbytes is None else f"; the process held {format_size(nbytes)} in memory"


def import_tensorboard() -> Any:
    """The class that writes TensorBoard's files.

    Raises:
        ModuleNotFoundError: If TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ModuleNotFoundError(
            "output.tensorboard=true needs TensorBoard: pip install tensorboard"
        ) from error
    return SummaryWriter


def board(folder: Path) -> Any:
    """A writer of TensorBoard's files into a folder; a context manager."""
    return import_tensorboard()(str(folder))


def show_on(writer: Any, row: Metrics) -> None:
    """Add a row to TensorBoard's curves: losses, the learning rate and the speed.

    Args:
        writer: Of `board`.
        row: The row.
    """
    writer.add_scalar(f"{row.run}/{row.split} loss", row.loss, row.step)
    if row.lr is not None:
        writer.add_scalar(f"{row.run}/learning rate", row.lr, row.step)
    if row.seconds:
        writer.add_scalar(f"{row.run}/per second", row.tokens / row.seconds, row.step)


def _flat(summary: Mapping[str, Any]) -> dict[str, Any]:
    numbers = ("step_seconds", "train_loss", "validation_loss")
    # nothing was counted where the meter never ran: 0 bytes of weights is no measurement
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
    figure = new_figure(10, 4.2)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    _losses(left, rows, list(summaries))
    _bars(right, summaries)
    figure.savefig(path, dpi=120)


def new_figure(width: float, height: float) -> "Figure":
    """Make an empty figure; no window is opened.

    Args:
        width: In inches.
        height: In inches.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the message names the extra.

    Example:
        >>> new_figure(4, 3).get_size_inches().tolist()
        [4.0, 3.0]
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModuleNotFoundError(
            "the plot needs matplotlib: pip install 'memtrain[plot]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")  # no pyplot: no window, no state


def smooth(values: Sequence[float], keep: float = 0.95) -> list[float]:
    """An exponential mean without the pull to zero at the start.

    Args:
        values: In order.
        keep: Weight of the past.

    Returns:
        As many values.

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


def _losses(axes: Any, rows: Sequence[Metrics], names: list[str]) -> None:
    for name in names:
        colour = _COLOURS[name]
        train = [row for row in rows if row.run == name and row.split == "train"]
        axes.plot(
            [row.step for row in train],
            smooth([row.loss for row in train]),
            color=colour,
            label=f"{name}: train, smoothed",
        )
        held_out = [row for row in rows if row.run == name and row.split == "validation"]
        axes.plot(
            [row.step for row in held_out],
            [row.loss for row in held_out],
            "o" if name == "plain" else "x",
            color=colour,
            label=f"{name}: validation",
        )
    axes.set(xlabel="step", ylabel="cross-entropy (nats)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _bars(axes: Any, summaries: Mapping[str, Mapping[str, Any]]) -> None:
    names = list(summaries)
    bottom = [0.0] * len(names)
    for key, label, colour in _PARTS:
        heights = [summaries[name]["bytes"][key] / 2**20 for name in names]
        axes.bar(names, heights, bottom=bottom, color=colour, label=label, width=0.6)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.set(ylabel="MiB alive")
    axes.set_ylim(0, 1.35 * max(*bottom, 1e-6))  # room for the legend
    axes.legend(fontsize=8, loc="upper right")
