"""`memtrain-report --json`: the report as JSON (schema: docs/guides/report.md)."""

import csv
import dataclasses
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memtrain.audit.peak import Timeline
from memtrain.audit.report import Report
from memtrain.cli.render.outcome import SIDES, Outcome, module_of, thinned, timelines
from memtrain.planner import Fit

COLUMNS = ("kind", "module", "name", "plain", "planned", "ratio", "compressor", "reason", "sites")
SCHEMA = "memtrain-report"
VERSION = 1
_KEYS = {"settings": dict, "categories": dict, "rows": list, "kept": list}
_SIDES = {"plain": int, "planned": int}
_ROW = {**_SIDES, "name": str, "kind": str, "sites": list}


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the report as JSON values, version 1 of the schema in docs/guides/report.md.

    Args:
        outcome: The findings.

    Returns:
        The content of `--json`.

    Example:
        >>> from memtrain.audit.report import Report
        >>> as_json(Outcome(Report(rows=(), kept=(), unmatched=(), loss=True), {}))["version"]
        1
    """
    report, sizes = outcome.report, outcome.sizes
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "settings": dict(outcome.settings),
        "loss_counted": report.loss,
        "categories": {
            name: {**dataclasses.asdict(total), "ratio": total.ratio}
            for name, total in report.totals().items()
        },
        **({"host": dict(report.host)} if report.host else {}),
        "peak": _peak(timelines(report)),
        "measured_peak": _peak(timelines(report, measured=True)),
        "fits": {
            "memory": outcome.memory,
            **{what: {side: found[side] for side in SIDES} for what, found in sizes.items()},
        }
        if sizes
        else None,
        "planner": None if outcome.fit is None else _planner(outcome.fit),
        "timeline": {
            side: [dataclasses.asdict(moment) for moment in thinned(line.moments)]
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
    names = (
        "budget", "seconds", "plain_seconds", "error", "states", "chosen", "rates", "sensitivity",
    )  # fmt: skip
    return {
        "promised_peak": fit.peak.nbytes,
        "moment": dataclasses.asdict(fit.peak),
        **{name: getattr(fit, name) for name in names},
        "weights": fit.plan.config.weights,
        "gradients": fit.plan.config.gradients,
    }


def as_text(outcome: Outcome) -> str:
    """Return the report as JSON text."""
    return json.dumps(as_json(outcome), indent=1) + "\n"


def as_csv(report: Report) -> str:
    """Return the rows of a report as CSV with a header; sites are joined by semicolons.

    Args:
        report: The audit.

    Returns:
        Text as the `csv` module writes it, lines ended by a newline. A ratio is empty where
        the baseline has no bytes.

    Example:
        >>> from memtrain.audit.report import Row
        >>> row = Row(name="fc.weight", kind="weight", plain=64, planned=32, sites=("fc.weight",))
        >>> as_csv(Report(rows=(row,), kept=(), unmatched=(), loss=True)).splitlines()[1]
        'weight,fc,fc.weight,64,32,0.5,,,fc.weight'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in report.rows:
        ratio = "" if row.ratio is None else row.ratio
        sites = ";".join(row.sites)
        start = (row.kind, module_of(row), row.name, row.plain, row.planned, ratio)
        writer.writerow((*start, row.compressor, row.reason, sites))
    return text.getvalue()


def read(path: Path) -> dict[str, Any]:
    """Read a file of `--json`, and check the keys that a comparison needs.

    Args:
        path: The file.

    Returns:
        Its content.

    Raises:
        ValueError: If it is not JSON, not a report, of a newer version, or incomplete.
        OSError: If it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is one too
        raise ValueError(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"{str(path)!r} is not a report: it was not written by {SCHEMA} --json")
    version = content.get("version")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise ValueError(
            f"{str(path)!r} is of version {version!r}; this memtrain reads up to {VERSION}: "
            "compare with the memtrain that wrote it, or write it anew"
        )
    _check(path, content, _KEYS, "")
    for name, total in content["categories"].items():
        _check(path, total, _SIDES, f"categories.{name}.")
    for index, row in enumerate(content["rows"]):
        _check(path, row, _ROW, f"rows[{index}].")
    if content.get("peak") is not None:
        _check(path, content["peak"], _SIDES, "peak.")
    return content


def _check(path: Path, value: Any, keys: Mapping[str, type], where: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{str(path)!r} is damaged: {where.rstrip('.')} is not an object")
    for key, kind in keys.items():
        if type(value.get(key)) is not kind:
            raise ValueError(
                f"{str(path)!r} is damaged: {where}{key} is not of type {kind.__name__}"
            )
