"""tradeoff.png: accuracy against the low-precision ratio, with the spread over seeds."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.panels import grid

Rows = Sequence[Mapping[str, str]]

_COLOURS = {
    "size_ordered": "C0", "increasing": "C1", "random": "C2",
    "uniform": "C3", "operator": "C4", "operator_out": "C5",
}  # fmt: skip
_BASELINES = ("uniform", "operator", "operator_out")


class Point(NamedTuple):
    """The seeds of one assignment: means, and the lowest and highest accuracy."""

    low_ratio: float
    accuracy: float
    least: float
    most: float
    seeds: int


def points(rows: Rows, assignment: str, promotion: bool) -> list[Point]:
    """A line of the plot.

    Args:
        rows: Lines of results.csv, of one family and width.
        assignment: Which.
        promotion: With it or without.

    Returns:
        A point for each ratio that was asked for, ascending.

    Example:
        >>> row = {"assignment": "random", "promotion": "True", "ratio": "1.0", "low_ratio": "0.9"}
        >>> points([{**row, "accuracy": a} for a in ("0.5", "0.7")], "random", True)
        [Point(low_ratio=0.9, accuracy=0.6, least=0.5, most=0.7, seeds=2)]
    """
    found: dict[float, list[tuple[float, float]]] = {}
    for row in rows:
        if (row["assignment"], row["promotion"]) == (assignment, str(promotion)):
            result = float(row["low_ratio"]), float(row["accuracy"])
            found.setdefault(float(row["ratio"]), []).append(result)
    line = []
    for _, results in sorted(found.items()):
        ratios, accuracies = zip(*results, strict=True)
        mean = statistics.fmean(accuracies)
        spread = min(accuracies), max(accuracies)
        line.append(Point(statistics.fmean(ratios), mean, *spread, len(results)))
    return line


def draw(path: Path, rows: Rows) -> None:
    """Draw one panel for each family and width.

    Args:
        path: The PNG file.
        rows: Lines of results.csv.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the message names the extra.
    """
    panels: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for row in rows:
        panels.setdefault((row["family"], row["width"]), []).append(row)
    figure, every = grid(len(panels), columns=2, size=(6, 4))
    for axes, ((family, width), own) in zip(every, panels.items(), strict=True):
        _panel(axes, own)
        axes.set(title=f"{family}, width {float(width):g}", ylabel="accuracy")
        axes.set(xlabel="low-precision ratio, mean over the steps", xlim=(-0.03, 1.03))
        axes.grid(alpha=0.3)
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        handles |= {
            label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
    if handles:
        figure.legend(
            handles.values(),
            handles,
            loc="outside lower center",
            ncols=2 * min(2, len(panels)),
            fontsize=8,
        )
    figure.savefig(path, dpi=120)


def _panel(axes: Any, rows: Rows) -> None:
    for point in points(rows, "fp32", True) or points(rows, "fp32", False):
        axes.axhline(point.accuracy, color="black", linestyle=":", label="fp32")
        axes.axhspan(point.least, point.most, color="black", alpha=0.08, linewidth=0)
    for assignment, colour in _COLOURS.items():
        for promotion in (True, False):
            if line := points(rows, assignment, promotion):
                _line(axes, line, assignment, colour, promotion)


def _line(axes: Any, line: list[Point], assignment: str, colour: str, promotion: bool) -> None:
    x, y = [point.low_ratio for point in line], [point.accuracy for point in line]
    name = assignment.replace("_", " ") + ("" if promotion else ", no promotion")
    spread = [[p.accuracy - p.least for p in line], [p.most - p.accuracy for p in line]]
    marker = ("s" if assignment in _BASELINES else "o") if promotion else "x"
    style = "none" if assignment in _BASELINES else ("-" if promotion else "--")
    axes.errorbar(
        x, y, yerr=spread, color=colour, marker=marker, linestyle=style, label=name,
        markersize=5, capsize=2, linewidth=1.2, elinewidth=0.6,
    )  # fmt: skip
