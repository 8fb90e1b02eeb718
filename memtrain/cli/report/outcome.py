"""What a run of `memtrain-report` finds: what all its outputs are made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memtrain.audit.report import Report
from memtrain.cli.report.fits import Fits
from memtrain.planner import Fit


@dataclass(frozen=True)
class Outcome:
    """A report, what it was made for, and what was searched besides."""

    report: Report
    settings: Mapping[str, Any]
    """Key -> value, as `report_request.settings` says."""
    fits: Fits | None = None
    """The sizes that fit a memory, if one was given."""
    fit: Fit | None = None
    """What the planner found, if there was a budget."""
