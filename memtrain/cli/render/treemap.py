"""Squarified treemaps: areas in proportion, rectangles near squares."""

from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float

    def inner(self, margin: float, top: float = 0.0) -> "Box":
        """What is left within a margin, and a strip at the top."""
        width = max(0.0, self.width - 2 * margin)
        height = max(0.0, self.height - 2 * margin - top)
        return Box(self.x + margin, self.y + margin + top, width, height)


def squarify(values: Sequence[float], box: Box) -> list[Box]:
    """Divide a box among values.

    Args:
        values: Positive, largest first.
        box: Where to.

    Returns:
        One box each, in order; their areas are in the proportion of the values, and fill `box`.

    Example:
        >>> squarify([2.0, 1.0, 1.0], Box(0, 0, 4, 2))
        [Box(x=0, y=0.0, width=2.0, height=2.0),
         Box(x=2.0, y=0.0, width=2.0, height=1.0), Box(x=2.0, y=1.0, width=2.0, height=1.0)]

    Reference:
        Bruls, Huizing and van Wijk, Squarified Treemaps, 2000.
    """
    boxes: list[Box] = []
    total, start = sum(values), 0
    while start < len(values):
        stop = _row(values, start, box, total)
        row = values[start:stop]
        boxes += _laid(row, box, sum(row) / total)
        box = _rest(box, sum(row) / total)
        total -= sum(row)
        start = stop
    return boxes


def _row(values: Sequence[float], start: int, box: Box, total: float) -> int:
    """Where the row ends that starts here: while its worst rectangle gets no longer."""
    side = min(box.width, box.height)
    scale = box.width * box.height / total if total else 0.0
    best, stop, area = float("inf"), start, 0.0
    while stop < len(values):
        area += values[stop] * scale
        worst = max(_aspect(value * scale, area, side) for value in (values[start], values[stop]))
        if worst > best:
            break
        best, stop = worst, stop + 1
    return max(stop, start + 1)


def _aspect(area: float, row: float, side: float) -> float:
    """How long a rectangle of `area` is in a row of area `row` along `side`."""
    if not area or not side:
        return float("inf")
    return max(side * side * area / (row * row), row * row / (side * side * area))


def _laid(row: Sequence[float], box: Box, share: float) -> list[Box]:
    boxes, sofar, total = [], 0.0, sum(row)
    for value in row:
        start, part = sofar / total, value / total
        if box.width >= box.height:
            y = box.y + start * box.height
            boxes.append(Box(box.x, y, box.width * share, box.height * part))
        else:
            x = box.x + start * box.width
            boxes.append(Box(x, box.y, box.width * part, box.height * share))
        sofar += value
    return boxes


def _rest(box: Box, share: float) -> Box:
    if box.width >= box.height:
        taken = box.width * share
        return Box(box.x + taken, box.y, box.width - taken, box.height)
    taken = box.height * share
    return Box(box.x, box.y + taken, box.width, box.height - taken)
