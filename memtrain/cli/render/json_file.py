"""`memtrain-report --json`: the report as JSON (schema: docs/guides/report.md)."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from memtrain.audit.peak import Timeline
from memtrain.cli.render.report_data import SIDES, ReportData, downsample, timelines
from memtrain.planner import Fit

SCHEMA = "memtrain-report"
VERSION = 1


def as_json(data: ReportData) -> dict[str, Any]:
    """Return the report as JSON values, version 1 of the schema in docs/guides/report.md."""
    report, sizes = data.report, data.sizes
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "settings": dict(data.settings),
        "loss_counted": report.loss,
        "categories": {
            name: {**dataclasses.asdict(total), "ratio": total.ratio}
            for name, total in report.totals().items()
        },
        **({"host": dict(report.host)} if report.host else {}),
        "peak": _peak(timelines(report)),
        "measured_peak": _peak(timelines(report, measured=True)),
        "fits": {
            "memory": data.memory,
            **{what: {side: found[side] for side in SIDES} for what, found in sizes.items()},
        }
        if sizes
        else None,
        "planner": None if data.fit is None else _planner(data.fit),
        "timeline": {
            side: [dataclasses.asdict(moment) for moment in downsample(line.moments)]
            for side, line in timelines(report).items()
        },
        "rows": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in report.rows],
        "kept": [dataclasses.asdict(kept) for kept in report.kept],
        "unmatched_rules": list(report.unmatched),
    }


def _peak(lines: Mapping[str, Timeline]) -> dict[str, Any] | None:
    """Return the two peaks and their ratio; None without timelines."""
    if len(lines) < 2:
        return None
    peaks = {side: line.peak for side, line in lines.items()}
    return {
        **{side: peak.nbytes for side, peak in peaks.items()},
        "ratio": peaks["planned"].nbytes / peaks["plain"].nbytes,
        "requested": {side: line.requested for side, line in lines.items()},
        "moment": {side: dataclasses.asdict(peak) for side, peak in peaks.items()},
        "reserved": {side: line.reserved for side, line in lines.items()},
    }


def _planner(fit: Fit) -> dict[str, Any]:
    """Return the predictions for a plan with a budget, and its choices."""
    names = ("budget", "seconds", "plain_seconds", "error", "states", "chosen")
    return {
        "promised_peak": fit.peak.nbytes,
        "moment": dataclasses.asdict(fit.peak),
        **{name: getattr(fit, name) for name in names},
        "weights": fit.plan.config.weights,
        "gradients": fit.plan.config.gradients,
    }


def as_text(data: ReportData) -> str:
    """Return the report as JSON text."""
    return json.dumps(as_json(data), indent=1) + "\n"
