"""Pictures of a report by matplotlib: stacked bars, the step's timeline, treemaps of modules."""

import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from memtrain.audit.peak import PARTS
from memtrain.audit.report import CATEGORIES, Report
from memtrain.cli.render.outcome import MOST, SIDES, module_of, thinned, timelines
from memtrain.cli.render.text_tables import heading
from memtrain.config.sizes import format_size

COLOURS = {
    "weights": "#4477aa",
    "gradients": "#ee6677",
    "optimizer states": "#228833",
    "saved activations": "#ccbb44",
    "recomputed activations": "#eeddaa",
    "inputs": "#66ccee",
    "temporaries": "#aa3377",
    "workspaces": "#bbbbbb",
    "allocator rounding": "#888888",
}
"""Part -> its colour (Paul Tol's bright scheme: told apart by the colour-blind too)."""
WIDTH, HEIGHT = 960, 480
"""Points of a treemap of the larger side."""
_CHART = 720  # points of the width of bars and timelines: their words are the larger for it
_GIB = 2**30
_STRIP = 14  # the height of a module's name
_LEAST = 5.0  # a box with a shorter side is not divided further
_AREA = 60.0  # several smaller boxes beside each other are one
_COARSE = 100  # moments of a timeline in a file of its own
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_STYLE = """
<style>
text { fill: #1f2328; font-family: system-ui, sans-serif !important; }
[style*="stroke: #000000"] { stroke: #59636e !important; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; }
  [style*="stroke: #000000"] { stroke: #9198a1 !important; }
}
</style>"""
_HINT = "hint:"  # an artist's id begins with it where the rest is to be its tooltip

Box = tuple[float, float, float, float]
"""Left, top, width and height."""
Bytes = tuple[tuple[str, ...], str, int]
"""A row's module below the one that is drawn, its category, and its bytes."""


def check_installed(option: str) -> None:
    """Refuse an option that draws before the work whose result it shall show.

    Args:
        option: Who asks, for the message.

    Raises:
        ImportError: Without matplotlib or squarify; names the extra.
    """
    try:
        import matplotlib.figure  # noqa: F401
        import squarify  # noqa: F401
    except ImportError as error:
        message = f"{option} needs matplotlib and squarify: pip install 'memtrain[plot]'"
        raise ImportError(message) from error


def step_svg(report: Report, settings: Mapping[str, Any]) -> str:
    """Draw live bytes over a step, plain beside planned, as an SVG file for light and dark pages.

    Args:
        report: The audit; without timelines only the legend is drawn.
        settings: Key -> value, as `arguments.settings` says: names the preset and the model.

    Returns:
        The text of the file.
    """
    lines = timelines(report)
    figure = _figure(_CHART, 270)
    figure.suptitle(heading(settings)[0], fontsize=9)
    names = {"plain": "PyTorch", "planned": f"memtrain, {settings.get('preset', 'planned')}"}
    for axis, side in zip(
        figure.subplots(1, len(lines) or 1, squeeze=False)[0], lines, strict=False
    ):
        _timeline(axis, report, side, _COARSE)
        axis.set_title(
            f"{names[side]}: {format_size(lines[side].peak.nbytes)} at the peak", fontsize=11
        )
    parts = drawn_parts(report)
    handles = [figure.axes[0].barh([0], [0], color=COLOURS[name]) for name in parts]
    figure.legend(handles, parts, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    svg = _svg(figure, "live bytes over a training step, plain beside planned")
    start = svg.index(">") + 1
    return f'<svg xmlns="{_SVG}" xmlns:xlink="{_XLINK}"{svg[4:start]}{_STYLE}{svg[start:]}'


def bars_svg(report: Report) -> str:
    """Stacked bars, plain and planned, at one scale, as an SVG element."""
    figure = _figure(_CHART, 110)
    _bars(figure.subplots(), report)
    return _svg(figure, "bytes by category")


def timeline_svg(report: Report, side: str) -> str:
    """Live bytes over a step as an SVG element; each column tells its moment.

    Args:
        report: The audit, with timelines.
        side: `plain` or `planned`; both are drawn at one scale.
    """
    figure = _figure(_CHART, 195)
    axis = figure.subplots()
    _timeline(axis, report, side)
    bottom, top = axis.get_ylim()
    for index, moment in enumerate(thinned(timelines(report)[side].moments)):
        words = [f"{part} {format_size(size)}" for part, size in moment.parts.items()]
        column = axis.bar(index + 0.5, top - bottom, 1.0, alpha=0.0)[0]
        column.set_gid(_hint(f"{moment.label}: {format_size(moment.nbytes)}", words))
    return _svg(figure, f"what is alive over the step, {side}")


def treemap_svg(report: Report, side: str) -> str:
    """The bytes of modules as an SVG element: areas are bytes, colours are categories.

    Args:
        report: The audit.
        side: `plain` or `planned`; both are drawn at one scale.

    Reference:
        Bruls, Huizing and van Wijk, Squarified Treemaps, 2000.
    """
    total = report.totals()["total"]
    share = (getattr(total, side) / (max(total.plain, total.planned) or 1)) ** 0.5
    width, height = WIDTH * share, max(1.0, HEIGHT * share)
    figure = _figure(WIDTH, height, layout=None)
    axis = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axis.set(xlim=(0, WIDTH), ylim=(height, 0))
    axis.set_axis_off()
    rows = [(module_of(row), CATEGORIES[row.kind], getattr(row, side)) for row in report.rows]
    _module(
        axis,
        [(tuple(filter(None, path.split("."))), kind, size) for path, kind, size in rows if size],
        (0.0, 0.0, width, height),
    )
    return _svg(figure, f"bytes by module, {side}")


def drawn_parts(report: Report) -> list[str]:
    """The parts that the bars or the timelines of a report show, in the order of `COLOURS`."""
    moments = [moment for line in timelines(report).values() for moment in line.moments]
    parts = {*report.totals(), *(part for moment in moments for part in moment.parts)}
    return [part for part in COLOURS if part in parts]


def _figure(width: float, height: float, layout: Any = "constrained") -> Any:
    """A figure of a size in points, without pyplot: no display, no state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width / 72, height / 72), layout=layout)


def _svg(figure: Any, label: str) -> str:
    """A figure as an element of a page: text stays text, artists with a hint get a tooltip."""
    import matplotlib as mpl

    text = io.StringIO()
    # The same figure gives the same text: no date, and ids that depend on nothing else.
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "memtrain"}):
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = text.getvalue()
    svg = re.sub(r' d="([^"]*)"', _short_path, svg)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg[svg.index("<svg") :])  # HTML knows SVG
    svg = re.sub(rf'<g id="{_HINT}([^"]*)">', r"<g><title>\1</title>", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def _short_path(match: re.Match[str]) -> str:
    """A path with tenths of a point: a third of the bytes."""
    path = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.1f}", match[1])
    return f' d="{" ".join(path.split())}"'


def _hint(first: str, words: Sequence[str]) -> str:
    return _HINT + "\n".join([first, *words])


def _bars(axis: Any, report: Report) -> None:
    totals = {name: total for name, total in report.totals().items() if name != "total"}
    for row, side in enumerate(reversed(SIDES)):
        left = 0.0
        for name, total in totals.items():
            nbytes = getattr(total, side)
            bar = axis.barh(row, nbytes / _GIB, left=left, color=COLOURS[name])[0]
            bar.set_gid(_hint(f"{side}: {name} {format_size(nbytes)}", ()))
            left += nbytes / _GIB
        axis.text(
            left,
            row,
            f"\N{NO-BREAK SPACE}{format_size(round(left * _GIB))}",
            va="center",
            fontsize=9,
        )
    axis.set_yticks([0, 1], reversed(SIDES))
    axis.margins(x=0.15)
    axis.set_xlim(left=0)
    axis.set_xlabel("GiB", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _timeline(axis: Any, report: Report, side: str, most: int = MOST) -> None:
    lines = timelines(report)
    peak, moments = lines[side].peak, thinned(lines[side].moments, most)
    parts = [part for part in PARTS if any(m.parts.get(part) for m in moments)]
    heights = [[m.parts.get(part, 0) / _GIB for m in moments] for part in parts]
    # a step is as wide as the others at the end too
    stairs = [[*values, values[-1]] for values in heights]
    colours = [COLOURS[part] for part in parts]
    axis.stackplot(range(len(moments) + 1), *stairs, colors=colours, step="post")
    at = next(i for i, moment in enumerate(moments) if moment.nbytes == peak.nbytes)
    axis.plot(at + 0.5, peak.nbytes / _GIB, "o", color="black", markersize=3)
    ceiling = max(line.peak.nbytes for line in lines.values()) / _GIB
    axis.set(xlim=(0, len(moments)), ylim=(0, (ceiling or 1) * 1.05), ylabel="GiB")
    starts = [i for i, m in enumerate(moments) if i and m.phase != moments[i - 1].phase]
    for start in starts:
        axis.axvline(start, color="0.5", linewidth=0.6)
    axis.set_xticks([0, *starts], [moments[i].phase for i in (0, *starts)], ha="left", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _module(axis: Any, rows: Sequence[Bytes], box: Box, path: str = "", outer: str = "") -> None:
    """A module's frame, its name where there is room, then its own bytes and its modules."""
    own, children = Counter[str](), dict[str, list[Bytes]]()
    for names, kind, nbytes in rows:
        if names:
            children.setdefault(names[0], []).append((names[1:], kind, nbytes))
        else:
            own[kind] += nbytes
    inner = {f"{path}.{name}".lstrip("."): below for name, below in children.items()}
    if not own and len(inner) == 1:  # of a.b.c with nothing besides, one box
        ((deeper, below),) = inner.items()
        _module(axis, below, box, deeper, outer)
        return
    x, y, width, height = box
    if not rows or min(width, height) < _LEAST:
        _box(axis, box, path, _sum(rows))
        return
    _box(axis, box, path, _sum(rows), frame=True)
    name = path.removeprefix(f"{outer}.")
    strip = 0.0
    if name and width > 7 * len(name) + 6 and height > 2 * _STRIP:
        strip = _STRIP
        axis.text(x + 3, y + _STRIP - 3, name, fontsize=11, parse_math=False)
    room = (x + 1, y + 1 + strip, width - 2, height - 2 - strip)
    _content(axis, own, inner, room, path)


def _content(
    axis: Any, own: Counter[str], inner: Mapping[str, list[Bytes]], box: Box, path: str
) -> None:
    import squarify

    items = [(Counter({kind: nbytes}), "") for kind, nbytes in own.items()]
    items += [(_sum(rows), name) for name, rows in inner.items()]
    items.sort(key=lambda item: -item[0].total())
    total = sum(parts.total() for parts, _ in items)
    least = total * _AREA / (box[2] * box[3])
    small = [parts for parts, _ in items if parts.total() < least]
    if len(small) > 1:
        items = [*items[: -len(small)], (sum(small, Counter()), "")]
        items.sort(key=lambda item: -item[0].total())
    sizes = squarify.normalize_sizes([parts.total() for parts, _ in items], box[2], box[3])
    for (parts, name), place in zip(items, squarify.squarify(sizes, *box), strict=True):
        where = place["x"], place["y"], place["dx"], place["dy"]
        if name:
            _module(axis, inner[name], where, name, path)
        else:
            _box(axis, where, path, parts)


def _box(axis: Any, box: Box, path: str, parts: Counter[str], *, frame: bool = False) -> None:
    """A box of the colour of what is most of it, or a module's frame; both tell what is in them."""
    from matplotlib.patches import Rectangle

    x, y, width, height = box
    colour = "none" if frame or not parts else COLOURS[parts.most_common(1)[0][0]]
    edge = "0.5" if frame else "white"
    made = Rectangle((x, y), width, height, facecolor=colour, edgecolor=edge, linewidth=0.6)
    words = [f"{part} {format_size(nbytes)}" for part, nbytes in parts.items()]
    made.set_gid(_hint(path or "(root)", words))
    axis.add_patch(made)


def _sum(rows: Sequence[Bytes]) -> Counter[str]:
    parts: Counter[str] = Counter()
    for _, kind, nbytes in rows:
        parts[kind] += nbytes
    return parts
