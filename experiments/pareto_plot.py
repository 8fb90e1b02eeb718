"""Held-out loss over a cost, a panel a task, with the line of what nothing beats in both."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.panels import grid


class Point(NamedTuple):
    """A variant of a task: means over seeds."""

    name: str
    cost: float
    loss: float
    width: float
    """Half of the 95% interval of the loss's difference from the baseline's."""


def front(points: Sequence[Point]) -> list[Point]:
    """The points below which none costs as little or less, by rising cost.

    Example:
        >>> points = [Point("a", 1, 3, 0), Point("b", 2, 1, 0), Point("c", 3, 2, 0)]
        >>> [point.name for point in front(points)]
        ['a', 'b']
    """
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.cost, point.loss)):
        if not kept or point.loss < kept[-1].loss:
            kept.append(point)
    return kept


def draw(path: Path, panels: Mapping[str, Sequence[Point]], cost: str) -> None:
    """Draw one panel for each task with more than one point; a name looks alike in all.

    Args:
        path: The PNG.
        panels: Title -> points.
        cost: What the horizontal axis says.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the message names the extra.
    """
    panels = {title: points for title, points in panels.items() if len(points) > 1}
    names = list(dict.fromkeys(point.name for points in panels.values() for point in points))
    looks = {name: (f"C{k % 10}", "os^D"[k // 10 % 4]) for k, name in enumerate(names)}
    shown: dict[str, object] = {}
    figure, axes = grid(len(panels))
    for axis, (title, points) in zip(axes, panels.items(), strict=True):
        line = front(points)
        axis.plot([p.cost for p in line], [p.loss for p in line], color="0.8", zorder=0)
        for point in points:
            colour, marker = looks[point.name]
            look = {"fmt": marker, "color": colour, "capsize": 3, "alpha": 0.8}
            shown[point.name] = axis.errorbar(point.cost, point.loss, point.width, **look)
        axis.margins(x=0.1)
        axis.set(title=title, xlabel=cost.replace("_", " "), ylabel="held-out loss")
    figure.legend(shown.values(), shown.keys(), loc="outside right upper")
    figure.savefig(path, dpi=110)
