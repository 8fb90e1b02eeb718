"""Predicted peaks are those of every block that a real step allocates, for models of all kinds."""

import json
import resource
import subprocess
import sys

import pytest

tracker = pytest.importorskip("benchmarks.tracker")
models = pytest.importorskip("benchmarks.peak_models")
peaks = pytest.importorskip("benchmarks.peaks")

PROGRAM = """
import json, sys
from benchmarks.peaks import compare

print(json.dumps([compare(*key) for key in json.loads(sys.argv[1])]))
"""
SOME = [
    ("vit", "balanced", "bfloat16"),
    ("lstm", "balanced", "float32"),
    ("frozen_backbone", "plain", "float32"),
    ("nn_encoder", "all_four", "float32"),
]


def rows(keys):
    done = tracker.run(["-W", "ignore", "-c", PROGRAM, json.dumps(keys)], capture_output=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_peaks_of_some_models_hold():
    for row in rows(SOME):
        assert row["refused"] == ""
        assert row["predicted_over_measured"] == pytest.approx(1, abs=peaks.CLOSE), row


def test_a_process_without_the_tracker_measures_nothing():
    with pytest.raises(RuntimeError, match="not tracked"):
        peaks.compare("vit", "balanced")


@pytest.mark.nightly
@pytest.mark.parametrize("name", models.MODELS)
def test_peaks_of_every_model_hold_under_every_preset(name):
    found = rows([(name, preset, "float32") for preset in peaks.PRESETS])
    assert [row for row in found if not row["refused"] and not row["holds"]] == []
    # A preset refuses some models; the baseline only those whose shapes depend on data.
    assert found[0]["refused"] == "" or "depends on data" in found[0]["refused"]


@pytest.mark.nightly
@pytest.mark.parametrize("step", peaks.STEPS[1:])
def test_peaks_of_twelve_families_hold_in_every_step(step):
    keys = [
        (name, preset, step)
        for name in models.TWELVE
        for preset in peaks.PRESETS
        if peaks.applies(name, preset, step)
    ]
    assert [row for row in rows(keys) if not row["holds"]] == []


SEVEN_BILLION = """
from memtrain.cli.models.build_model import build
from memtrain.cli.models.request import Request
from memtrain.audit.peak.predict import predict
built = build(Request(model="llama-7b", batch=1, seq=2048))
for cfg in (None, "balanced"):
    print(predict(*built, cfg).peak.nbytes)
"""


@pytest.mark.nightly
def test_seven_billion_parameters_take_a_minute_and_two_gibibytes():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", SEVEN_BILLION], check=True, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    plain, planned = map(int, done.stdout.split())
    weights = 4 * 6_738_415_616
    assert plain > 4 * weights > 2 * weights < planned < plain
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
    assert after.ru_maxrss < 2 * 2**20  # KiB


COUNTED = """
import torch
from benchmarks import tracker

mib = 2**20
held = []
tracker.peak_of(lambda: torch.empty(1))  # what is made once, at first
noise = 4096  # Python's own objects
assert 0 <= tracker.peak_of(lambda: torch.empty(mib, dtype=torch.uint8)) - mib < noise
held.append(torch.empty(3 * mib, dtype=torch.uint8))
before = tracker.live()
held.clear()
assert 0 <= before - tracker.live() - 3 * mib < noise
grown = bytearray(mib)
assert mib <= tracker.peak_of(lambda: grown.extend(bytes(2 * mib))) < 8 * mib
"""


def test_the_tracker_counts_what_is_allocated_and_freed():
    done = tracker.run(["-c", COUNTED], capture_output=True)
    assert done.returncode == 0, done.stderr
