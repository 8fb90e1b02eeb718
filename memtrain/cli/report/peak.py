"""The peak in a report: when it is, and what is alive then."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from memtrain.audit.peak import PARTS, Moment, Timeline
from memtrain.audit.report import Report
from memtrain.config.sizes import format_size

SIDES = ("plain", "planned")
MOST = 400
"""Moments of a step that are drawn or written, at most."""


@dataclass(frozen=True)
class Alive:
    """Bytes of a part at the plain and at the planned peak."""

    plain: int
    planned: int

    @property
    def ratio(self) -> float | None:
        """Planned through plain; None where there is nothing in plain PyTorch."""
        return self.planned / self.plain if self.plain else None


def timelines(report: Report, *, measured: bool = False) -> dict[str, Timeline]:
    """The timelines of a report by side; nothing if it has none.

    Args:
        report: The audit.
        measured: Those of real steps, instead of the predicted ones.
    """
    both = (report.timeline, report.planned_timeline)
    if measured:
        both = (report.measured, report.planned_measured)
    pairs = zip(SIDES, both, strict=True)
    return {side: line for side, line in pairs if line is not None and line.moments}


def at_peak(report: Report) -> dict[str, Alive]:
    """What is alive at the two peaks, and `total`; nothing if the report has no timelines.

    Each side at its own peak, which may be another moment of the step.

    Returns:
        Part -> its bytes; parts that neither side has are left out.
    """
    lines = timelines(report)
    if len(lines) < 2:
        return {}
    plain, planned = lines["plain"].peak, lines["planned"].peak
    parts = [part for part in PARTS if plain.parts.get(part) or planned.parts.get(part)]
    alive = {part: Alive(plain.parts.get(part, 0), planned.parts.get(part, 0)) for part in parts}
    return {**alive, "total": Alive(plain.nbytes, planned.nbytes)}


def described(report: Report) -> list[str]:
    """When the peaks are, what tensors ask for, and what was measured, in lines."""
    lines = [_line(side, line) for side, line in timelines(report).items()]
    for side, line in timelines(report, measured=True).items():
        words = _line(f"{side}, measured", line)
        if (predicted := timelines(report).get(side)) is not None:
            off = predicted.peak.nbytes / line.peak.nbytes - 1
            words += f"; predicted {off:+.1%}"
        lines.append(words)
    return lines


def _line(side: str, line: Timeline) -> str:
    peak = line.peak
    shown, requested = format_size(peak.nbytes), format_size(line.requested)
    words = f"{side}: {shown} at the peak, in the {peak.label}"
    return words + (f"; tensors ask for {requested}" if requested != shown else "")


def thinned(moments: Sequence[Moment], most: int = MOST) -> list[Moment]:
    """At most so many moments: the highest of each stretch, so that no peak is lost.

    Args:
        moments: In their order.
        most: How many; at least 1.

    Returns:
        Some of them, in their order.

    Example:
        >>> moments = [Moment("", "forward", nbytes, {}) for nbytes in (1, 9, 2, 3)]
        >>> [moment.nbytes for moment in thinned(moments, 2)]
        [9, 3]
    """
    count = min(most, len(moments))
    edges = [index * len(moments) // count for index in range(count + 1)] if count else []
    return [
        max(moments[low:high], key=lambda moment: moment.nbytes) for low, high in pairwise(edges)
    ]
