"""The timeline of a training step as SVG: what is alive, stacked, and where the peak is."""

from collections.abc import Sequence

from memtrain.audit.peak import PARTS, Moment, Timeline
from memtrain.cli.render.svg import COLOURS, picture, rectangle, tag, text
from memtrain.cli.report.peak import thinned
from memtrain.config.sizes import format_size

WIDTH, HEIGHT = 960, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 16, 22, 30


def timeline(line: Timeline, name: str, ceiling: int) -> str:
    """Draw a step from left to right.

    Args:
        line: Its moments; at least one.
        name: Of the side, for the label.
        ceiling: Bytes at the top of the picture, so that two of them compare.

    Returns:
        An SVG element.

    Example:
        >>> moment = Moment("forward of fc", "forward", 8, {"weights": 8})
        >>> timeline(Timeline((moment,)), "plain", 8).startswith("<svg")
        True
    """
    moments = thinned(line.moments)
    step = (WIDTH - _LEFT - _RIGHT) / len(moments)
    scale = (HEIGHT - _TOP - _BOTTOM) / (ceiling or 1)
    floor = HEIGHT - _BOTTOM
    drawn = [*_axis(ceiling), *_areas(moments, step, scale)]
    for index, moment in enumerate(moments):  # what a column says when it is pointed at
        box = (_LEFT + index * step, _TOP, step, floor - _TOP)
        drawn.append(rectangle(box, "transparent", _hint(moment), class_="column"))
    drawn += _phases(moments, step)
    peak = line.peak
    at = next(i for i, moment in enumerate(moments) if moment.nbytes == peak.nbytes)
    x, y = _LEFT + (at + 0.5) * step, floor - peak.nbytes * scale
    left = x < WIDTH / 2
    words = f"{format_size(peak.nbytes)}, {peak.label}"
    anchor = {"text_anchor": "start" if left else "end", "class_": "peak"}
    drawn.append(tag("circle", cx=x, cy=y, r=3.5, class_="dot"))
    drawn.append(text(x + (8 if left else -8), max(y - 6, 12), words, **anchor))
    return picture(WIDTH, HEIGHT, drawn, f"what is alive over the step, {name}")


def _hint(moment: Moment) -> str:
    parts = [f"{part} {format_size(moment.parts[part])}" for part in PARTS if part in moment.parts]
    return "\n".join([f"{moment.label}: {format_size(moment.nbytes)}", *parts])


def _axis(ceiling: int) -> list[str]:
    lines = []
    for quarter in range(5):
        y = HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * quarter / 4
        ends = {"x1": _LEFT, "x2": WIDTH - _RIGHT, "y1": y, "y2": y}
        lines.append(tag("line", **ends, class_="grid"))
        words = format_size(ceiling * quarter // 4)
        lines.append(text(_LEFT - 8, y + 4, words, text_anchor="end", class_="small"))
    return lines


def _areas(moments: Sequence[Moment], step: float, scale: float) -> list[str]:
    """One path a part, each upon the one before it."""
    floor = float(HEIGHT - _BOTTOM)
    below = [0] * len(moments)
    paths = []
    for part in PARTS:
        above = [
            low + moment.parts.get(part, 0) for low, moment in zip(below, moments, strict=True)
        ]
        if above != below:
            points = [*_stairs(above, step), *reversed(_stairs(below, step))]
            path = " ".join(f"{_LEFT + x:.1f},{floor - y * scale:.1f}" for x, y in points)
            paths.append(tag("polygon", points=path, fill=COLOURS[part]))
        below = above
    return paths


def _stairs(values: Sequence[int], step: float) -> list[tuple[float, int]]:
    return [point for i, y in enumerate(values) for point in ((i * step, y), ((i + 1) * step, y))]


def _phases(moments: Sequence[Moment], step: float) -> list[str]:
    drawn = []
    starts = [i for i, m in enumerate(moments) if i == 0 or m.phase != moments[i - 1].phase]
    for start, stop in zip(starts, [*starts[1:], len(moments)], strict=True):
        x, end = _LEFT + start * step, _LEFT + stop * step
        drawn.append(tag("line", x1=x, x2=x, y1=_TOP, y2=HEIGHT - _BOTTOM + 6, class_="grid"))
        if end - x > 50:  # room for the word
            middle = {"text_anchor": "middle", "class_": "small"}
            drawn.append(text((x + end) / 2, HEIGHT - 10, moments[start].phase, **middle))
    return drawn
