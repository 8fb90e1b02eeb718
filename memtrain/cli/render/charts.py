"""The timeline of a step as a figure, by matplotlib."""

import io
import re
from collections.abc import Mapping
from typing import Any

from memtrain.audit.peak import PARTS, Timeline
from memtrain.audit.report import Report
from memtrain.cli.render.report_data import downsample, timelines
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
_COARSE = 100  # moments of a timeline
_LABEL = "live bytes over a training step: baseline and wrapped"
_STYLE = """
<style>
text { fill: #1f2328; font-family: system-ui, sans-serif !important; }
[style*="stroke: #000000"] { stroke: #59636e !important; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; }
  [style*="stroke: #000000"] { stroke: #9198a1 !important; }
}
</style>"""


def require_matplotlib(option: str) -> None:
    """Raise ImportError without matplotlib, before any work is done."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        message = f"{option} needs matplotlib: pip install 'memtrain[plot]'"
        raise ImportError(message) from error


def step_svg(report: Report, settings: Mapping[str, Any]) -> str:
    """Draw live bytes over a step, baseline and wrapped, as SVG for light and dark pages."""
    import matplotlib as mpl
    from matplotlib.figure import Figure  # without pyplot: no display, no state

    lines = timelines(report)
    figure = Figure(figsize=(_CHART / 72, 270 / 72), layout="constrained")
    figure.suptitle(heading(settings)[0], fontsize=9)
    names = {"plain": "PyTorch", "planned": f"memtrain, {settings.get('preset', 'planned')}"}
    axes = figure.subplots(1, len(lines) or 1, squeeze=False)[0]
    for axis, side in zip(axes, lines, strict=False):
        _timeline(axis, lines, side)
        axis.set_title(
            f"{names[side]}: {format_size(lines[side].peak.nbytes)} at the peak", fontsize=11
        )
    parts = _drawn_parts(report)
    handles: Any = [figure.axes[0].barh([0], [0], color=COLOURS[name]) for name in parts]
    figure.legend(handles, parts, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    text = io.StringIO()
    # Equal figures give equal text: no date, and reproducible ids.
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "memtrain"}):
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = re.sub(r' d="([^"]*)"', _short_path, text.getvalue())
    svg = svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{_LABEL}"', 1)
    start = svg.index(">") + 1
    return f"{svg[:start]}{_STYLE}{svg[start:]}"


def _drawn_parts(report: Report) -> list[str]:
    """Return the parts in the timelines of a report, in the order of `COLOURS`."""
    moments = [moment for line in timelines(report).values() for moment in line.moments]
    parts = {*report.totals(), *(part for moment in moments for part in moment.parts)}
    return [part for part in COLOURS if part in parts]


def _short_path(match: re.Match[str]) -> str:
    """A path with tenths of a point: a third of the bytes."""
    path = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.1f}", match[1])
    return f' d="{" ".join(path.split())}"'


def _timeline(axis: Any, lines: Mapping[str, Timeline], side: str) -> None:
    peak, moments = lines[side].peak, downsample(lines[side].moments, _COARSE)
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
