"""plot.png: the loss curves of the runs, and a bar of bytes for each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memtrain.experiments.loop import Row

_COLOURS = {"plain": "#4c72b0", "wrapped": "#dd8452"}
_PARTS = (
    ("weights", "weights", "#55606e"),
    ("gradients", "gradients", "#8c9bab"),
    ("states", "optimizer states", "#6aa56a"),
    ("saved", "saved activations", "#d9a441"),
)


def draw(path: Path, rows: Sequence[Row], summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw the plot with matplotlib's Agg canvas (no window, no global state).

    Args:
        path: The PNG file.
        rows: Metrics of all runs.
        summaries: Run name -> `Run.summary()`.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the message names the extra.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModuleNotFoundError(
            "the plot needs matplotlib: pip install 'memtrain[plot]'"
        ) from error
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    _losses(left, rows, list(summaries))
    _bars(right, summaries)
    figure.savefig(path, dpi=120)


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


def _losses(axes: Any, rows: Sequence[Row], names: list[str]) -> None:
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
