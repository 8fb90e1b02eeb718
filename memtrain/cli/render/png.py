"""`memtrain-report --png`: stacked bars, and the timeline of the peak."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memtrain.audit.peak import PARTS
from memtrain.audit.report import Report
from memtrain.cli.render.svg import COLOURS
from memtrain.cli.render.tables import heading
from memtrain.cli.report.peak import thinned, timelines
from memtrain.config.sizes import format_size

_GIB = 2**30


def draw(path: Path, report: Report, settings: Mapping[str, Any]) -> None:
    """Draw a report.

    Args:
        path: The PNG file to write.
        report: The audit.
        settings: What it was made for.

    Raises:
        ImportError: Without matplotlib.
        OSError: If the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--png needs matplotlib: pip install 'memtrain[plot]'") from error
    lines = timelines(report)
    height, ratios = 2.0 + 2.4 * len(lines), [1.6, *[2.4] * len(lines)]
    figure = Figure(figsize=(9, height), layout="constrained")  # no pyplot: no display, no state
    axes = figure.subplots(1 + len(lines), 1, height_ratios=ratios, squeeze=False)[:, 0]
    _bars(axes[0], report)
    axes[0].set_title(heading(settings)[0], fontsize=9)
    ceiling = max((line.peak.nbytes for line in lines.values()), default=0)
    for axis, (side, line) in zip(axes[1:], lines.items(), strict=True):
        _timeline(axis, side, line, ceiling / _GIB)
    names = [part for part in COLOURS if part in _parts(report)]
    handles = [axes[0].barh([0], [0], color=COLOURS[name]) for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path, format="png", dpi=120)


def _parts(report: Report) -> set[str]:
    moments = [moment for line in timelines(report).values() for moment in line.moments]
    return {name for name in report.totals() if name != "total"}.union(
        *(moment.parts for moment in moments)
    )


def _bars(axis: Any, report: Report) -> None:
    totals = {name: total for name, total in report.totals().items() if name != "total"}
    for row, side in enumerate(("planned", "plain")):
        left = 0.0
        for name, total in totals.items():
            width = getattr(total, side) / _GIB
            axis.barh(row, width, left=left, color=COLOURS[name])
            left += width
        axis.text(left, row, f" {format_size(round(left * _GIB))}", va="center", fontsize=9)
    axis.set_yticks([0, 1], ["planned", "plain"])
    axis.margins(x=0.15)
    axis.set_xlim(left=0)
    axis.set_xlabel("GiB", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _timeline(axis: Any, side: str, line: Any, ceiling: float) -> None:
    moments = thinned(line.moments)
    heights = [[m.parts.get(part, 0) / _GIB for m in moments] for part in PARTS]
    colours = [COLOURS[part] for part in PARTS]
    axis.stackplot(range(len(moments)), *heights, colors=colours, step="post")
    peak = line.peak
    at = next(i for i, moment in enumerate(moments) if moment.nbytes == peak.nbytes)
    axis.plot(at, peak.nbytes / _GIB, "o", color="black", markersize=3)
    axis.set_title(f"{side}: {format_size(peak.nbytes)}, {peak.label}", fontsize=9, loc="left")
    axis.set(xlim=(0, max(1, len(moments) - 1)), ylim=(0, ceiling * 1.05), ylabel="GiB")
    starts = [i for i, m in enumerate(moments) if i and m.phase != moments[i - 1].phase]
    for start in starts:
        axis.axvline(start, color="0.5", linewidth=0.6)
    axis.set_xticks([0, *starts], [moments[i].phase for i in (0, *starts)], ha="left", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
