import csv
import io
import json

import pytest
from rich.console import Console

from memtrain.training import results
from memtrain.training.run import Metrics

BYTES = {"weights": 4 * 10**9, "gradients": 4 * 10**9, "states": 8 * 10**9, "saved": 10**11}
PLAIN = {
    "bytes": {**BYTES, "peak": 2 * 10**11, "total": sum(BYTES.values())},
    "step_seconds": 123.456,
    "train_loss": 1.5,
    "validation_loss": 2.0,
}
WRAPPED = {
    "bytes": {**PLAIN["bytes"], "states": 10**9, "saved": 10**10, "total": 19 * 10**9},
    "step_seconds": 246.912,
    "train_loss": 1.5,
    "validation_loss": 2.5,
}
ROWS = [
    Metrics(run, step, split, 5.0 / step, 0.1, 0.5, 64)
    for run in ("plain", "wrapped")
    for step in (1, 2, 3)
    for split in ("train", "validation")
]


def _shown(summaries):
    screen = io.StringIO()
    Console(file=screen, width=80).print(results.table("gpt_stdlib", summaries))
    return screen.getvalue()


def test_table_fits_80_columns_with_large_numbers():
    shown = _shown({"plain": PLAIN, "wrapped": WRAPPED})
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    line = {text[:20].strip(): text.split() for text in shown.splitlines()}
    assert line["optimizer states"][2:] == ["7.45", "GiB", "953.67", "MiB", "0.125"]
    assert line["saved activations"][-1] == "0.100"
    assert line["step time (median)"][-1] == "2.000"
    assert line["validation loss"][-3:] == ["2.0000", "2.5000", "1.250"]


def test_what_was_not_measured_is_a_dash():
    shown = _shown({"plain": {"bytes": dict.fromkeys(PLAIN["bytes"], 0), "step_seconds": None}})
    line = {text[:20].strip(): text.split() for text in shown.splitlines()}
    assert line["weights"] == ["weights", "-", "-"]
    assert line["step time (median)"][-2:] == ["-", "-"]


def test_metrics_are_on_disk_at_once_and_never_overwritten(tmp_path):
    path = tmp_path / "metrics.csv"
    write = results.metrics_file(path, ROWS[:1])
    write(Metrics("plain", 1, "validation", 2.5, None, None, 10))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["run", "step", "split", "loss", "lr", "seconds", "tokens"]
    assert list(rows[1].values()) == ["plain", "1", "validation", "2.5", "", "", "10"]
    with pytest.raises(FileExistsError):
        results.metrics_file(path)


def test_summary_is_json(tmp_path):
    path = tmp_path / "summary.json"
    results.write_summary(path, {"plain": PLAIN, "wrapped": WRAPPED}, experiment="x")
    content = json.loads(path.read_text())
    assert content["experiment"] == "x"
    assert content["runs"]["plain"]["bytes"]["states"] == 8 * 10**9
    assert content["ratio"]["saved"] == 0.1
