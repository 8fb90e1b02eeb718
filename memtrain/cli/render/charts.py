"""Figures of a report by matplotlib: stacked bars and the timeline of a step."""

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from memtrain.audit.peak import PARTS
from memtrain.audit.report import Report
from memtrain.cli.render.outcome import MOST, SIDES, thinned, timelines
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
"""Part -> its colour (Paul Tol's bright scheme, which colour-blind readers can distinguish)."""
_CHART = 720  # width in points
_GIB = 2**30
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
_HINT = "hint:"  # prefix of an artist's id whose rest becomes its tooltip


def check_installed(option: str) -> None:
    """Refuse an option that draws before any work is done.

    Args:
        option: The option, for the message.

    Raises:
        ImportError: Without matplotlib; names the extra.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        message = f"{option} needs matplotlib: pip install 'memtrain[plot]'"
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
    """Return stacked bars of the baseline and the plan, at one scale, as an SVG element."""
    figure = _figure(_CHART, 110)
    _bars(figure.subplots(), report)
    return _svg(figure, "bytes by category")


def timeline_svg(report: Report, side: str) -> str:
    """Return the live bytes over a step as an SVG element; each column has a tooltip.

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


def drawn_parts(report: Report) -> list[str]:
    """Return the parts in the bars or timelines of a report, in the order of `COLOURS`."""
    moments = [moment for line in timelines(report).values() for moment in line.moments]
    parts = {*report.totals(), *(part for moment in moments for part in moment.parts)}
    return [part for part in COLOURS if part in parts]


def _figure(width: float, height: float, layout: Any = "constrained") -> Any:
    """Return a figure of a size in points, without pyplot: no display, no state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width / 72, height / 72), layout=layout)


def _svg(figure: Any, label: str) -> str:
    """Return a figure as an HTML element: text stays text, artists with a hint get a tooltip."""
    import matplotlib as mpl

    text = io.StringIO()
    # Equal figures give equal text: no date, and reproducible ids.
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
    # the last step is as wide as the others
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
