"""Gradient release and split weights in two processes: DDP and FSDP2, gloo, on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORLD = 2
SCRIPT = Path(__file__).with_name("distributed.py")

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank's process printed."""
    store = tmp_path_factory.mktemp("distributed") / "store"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(WORLD), str(store)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * WORLD, outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_ddp_updates_follow_the_all_reduce(found):
    for rank in found:
        assert rank["ddp_released"] == {"distance": 0.0, "agree": True, "freed": True}


def test_a_model_that_is_in_ddp_already(found):
    for rank in found:
        result = rank["ddp_around_before_wrap"]
        # Against one process with the whole batch: sums in another order, four Adam steps of 1e-2.
        assert result["distance"] < 1e-6
        assert result["agree"]
        assert "Wrap the model first" in result["refused"]


def test_ddp_accumulates_in_no_sync(found):
    for rank in found:
        assert rank["ddp_accumulates_in_no_sync"] == {"distance": 0.0, "agree": True}


def test_states_weights_and_gradients_together_keep_ranks_equal(found):
    results = [rank["ddp_all_but_activations"] for rank in found]
    assert results[0] == results[1]
    assert results[0]["agree"]
    assert results[0]["norm"] > 0.1  # above the limit: it was clipped by the last step's


def test_inf_on_one_rank_skips_the_update_on_all(found):
    for rank in found:
        assert rank["ddp_skips_inf_on_all_ranks"] == {"skipped": 1, "kept": True}


def test_fsdp_releases_after_the_reduce_scatter(found):
    for rank in found:
        result = rank["fsdp_released"]
        assert result["distance"] == 0.0
        assert result["freed"]
        assert result["sharded"] == "DTensor"
        assert result["norm"] == pytest.approx(result["expected"], rel=1e-5)


def test_fsdp_splits_each_shard(found):
    for rank in found:
        result = rank["fsdp_split"]
        assert result["distance"] == 0.0
        assert result["released"] == 0.0
        assert result["local"] == 32 * 8 // WORLD
        assert "before fully_shard" in result["refused"]
