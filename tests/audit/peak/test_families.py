"""Twelve model families: the predicted peak within 3% of the measured one."""

import resource
import subprocess
import sys

import pytest


def test_a_family_in_every_run():
    peaks = pytest.importorskip("benchmarks.peaks")
    row = peaks.compare("vit", "balanced", "float32")
    assert row["predicted_over_measured"] == pytest.approx(1, abs=0.03)
    assert row["predicted_at"].startswith(row["measured_in"])


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:the plan compresses saved activations, but:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # Swin's
@pytest.mark.parametrize("step", ["float32", "bfloat16", "checkpoint", "reentrant", "release"])
def test_every_family_under_every_preset(step):
    peaks = pytest.importorskip("benchmarks.peaks")
    wrong = {}
    for family in peaks.TWELVE:
        for preset in peaks.PRESETS:
            if peaks.applies(family, preset, step):
                ratio = peaks.compare(family, preset, step)["predicted_over_measured"]
                if abs(ratio - 1) > 0.03:
                    wrong[family, preset] = ratio
    assert wrong == {}


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
