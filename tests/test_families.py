"""Unmodified models of twelve families: bytes as planned, gradients as the quantiser says."""

import pytest

from memtrain.config.sources import options

pytest.importorskip("transformers")
families = pytest.importorskip("benchmarks.families")

ADAPTIVE = ("actnn_l3", "actnn_l4")  # statistics are alive, too
PRESETS = [name for name in options("preset") if name not in ADAPTIVE]


def groups(bits):
    return {
        "preset": "exact",
        "optim": {"rules": []},
        "activations": {"rules": [{"compressor": {"name": "group", "bits": bits}}]},
    }


@pytest.mark.nightly
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_live_bytes_are_those_planned(family, preset):
    row = families.measure(family, preset)
    assert 0.98 <= row["predicted_over_live"] <= 1.02


@pytest.mark.nightly
@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_gradients_error_follows_the_quantisers_step(family):
    """The step of 4 bits is 255 / 15 that of 8: so is the error, as far as it is linear in it."""
    fine = families.measure(family, "8 bits", groups(8))
    coarse = families.measure(family, "4 bits", groups(4))
    assert fine["gradient_error"] < coarse["gradient_error"]
    assert coarse["gradient_error"] <= 2 * (255 / 15) * fine["gradient_error"]


def test_one_family_in_every_run():
    row = families.measure("cifar_shufflenet_v2", "balanced")
    assert row["predicted_over_live"] == 1.0
    assert row["ratio"] < 0.15
