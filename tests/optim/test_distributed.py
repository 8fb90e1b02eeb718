"""Gradient release, split weights and sharded states: DDP and FSDP2, gloo, on the CPU."""

import json
import os
import signal
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


def start(world, store, *arguments):
    """A process for each rank."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(world), str(store), *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(world)
    ]  # fmt: skip


def launch(world, store, *arguments):
    """Lines that each rank's process printed."""
    ranks = start(world, store, *arguments)
    try:
        outputs = [process.communicate(timeout=400) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * world, outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.fixture(scope="module")
def found(once, tmp_path_factory):
    """What the two processes found."""
    return once("distributed", lambda: launch(WORLD, tmp_path_factory.mktemp("found") / "store"))


def test_ddp_refuses_released_gradients_and_converted_weights(found):
    for rank in found:
        result = rank["ddp_refuses"]
        weights, released = result["refused"][:3], result["refused"][3:]
        assert all("Wrap the model first" in why for why in weights)
        assert len(released) == 4
        assert all("allowed: gradients=keep, or FSDP2" in why for why in released)
        assert result["unchanged"]


def test_a_ddp_whose_weights_unwrap_has_converted_refuses_to_train(found):
    for rank in found:
        assert "put a new one around the model" in rank["ddp_after_unwrap"]


def test_states_and_weights_keep_ranks_equal(found):
    for rank in found:
        assert rank["ddp_states_and_weights"]


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


def test_parts_of_a_whole_on_the_host_are_those_of_torch(found):
    for rank in found:
        assert rank["parts_of_a_whole"] == 9 * [True]


# A state in float32 with an error of the quantiser's own is far above these: one rounding of
# float32 in a parameter (the C++ kernels' square root), and the order of a sum of squares.
ROUNDING = 2.0**-23
SUMS = 2e-6


def test_parts_whose_rows_fill_blocks_train_as_the_whole(found):
    for rank in found:
        check_distances(rank["whole_blocks"])


def check_distances(distances):
    for name, distance in distances.items():
        states = name.endswith("states")
        allowed = SUMS if "actor" in name else 0.0 if states else 4 * ROUNDING
        assert distance <= allowed, name


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 3])
def test_every_optimizer_trains_as_the_whole_and_comes_back(world, tmp_path):
    for rank in launch(world, tmp_path / "store", "all_optimizers", tmp_path):
        check_distances(rank["whole_blocks"])
        check_distances(rank["any_split"])
        assert len(rank["checkpoint"]) == 12
        assert all(rank["checkpoint"].values()), rank["checkpoint"]
        assert all(result == [True, True] for result in rank["continued"].values())


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("scenario", ["dies_in_step", "dies_in_save"])
def test_a_lost_process_leaves_the_checkpoint_before_it(scenario, world, tmp_path):
    ranks = start(world, tmp_path / "store", scenario, tmp_path)
    try:
        assert ranks[-1].wait(timeout=400) == -signal.SIGKILL, ranks[-1].communicate()
    finally:
        for process in ranks:  # as torchrun ends those that wait for it
            process.kill()
            process.communicate()
    assert (tmp_path / "later").is_dir() == (scenario == "dies_in_save")
    assert not (tmp_path / "later" / ".metadata").exists()
    for rank in launch(world, tmp_path / "again", "survives", tmp_path):
        assert rank == {"equal": True}


def test_precision_does_not_depend_on_the_mesh(found):
    for rank in found:
        check_distances(rank["any_split"])


def test_scales_and_factors_are_those_of_the_whole_however_it_is_split(found):
    for rank in found:
        for name, distance in rank["sides_of_the_whole"].items():
            assert distance <= (SUMS if "actor" in name else 0.0), name


def test_one_collective_a_step(found):
    for rank in found:
        assert rank["collectives"] == {
            "AdamW4bit": 1, "AdamW4bitFactor": 1, "AdamW8bit": 0, "Lion4bit": 0
        }  # fmt: skip


def test_nan_in_one_part_reaches_the_others_as_in_the_whole(found):
    for rank in found:
        result = rank["bad_numbers"]
        assert result["states"]
        assert result["parameters"]
        assert 1 <= result["spoilt"] < 8 * 256


def test_wrap_takes_a_sharded_model(found):
    for rank in found:
        result = rank["wrapped"]
        assert result["exact"] == 0.0
        assert 0 < result["states"] < 0.05
        assert 0 < result["both"] < 0.05
        assert result["bytes"] < 0.25  # 1.03 of 8, and the vectors of a small model
        assert result["back"] == ["AdamW", "DTensor"]
        assert result["planned"] == [True, True]  # the bytes of this process, before and after


def test_states_weights_and_gradients_of_a_sharded_model_together(found):
    for rank in found:
        result = rank["everything"]
        assert result["last"] < 0.6 * result["first"]
        assert result["kind"] == "DTensor"
        assert result["back"]


def test_runs_go_on_bit_for_bit_through_torchs_own_state_dicts(found):
    for rank in found:
        assert rank["continued"] == {"balanced": [True, True], "all_four": [True, True]}


def test_stochastic_rounding_keeps_replicas_equal_and_parts_different(found):
    for rank in found:
        assert rank["replicas"] == {"replicas": True, "parts": False}


def test_released_gradients_of_parts_add_up(found):
    for rank in found:
        result = rank["accumulated"]
        # One rounding of the first sum: below the widest gap of its map, 1/31 of the largest.
        assert all(0 < moved < 1 / 31 for moved in result["moved"])
        assert result["freed"]


def test_distributed_checkpoints_come_back_bit_for_bit(found):
    for rank in found:
        assert all(rank["checkpoint"].values()), rank["checkpoint"]
        assert rank["checkpoint_by_names"]["equal"]


def test_parts_of_columns_are_saved_in_float32(found):
    for rank in found:
        assert rank["checkpoint_of_columns"]["types"] == ["DTensor", "DTensor"]
        assert max(rank["checkpoint_of_columns"]["moved"]) <= 0.225  # the DE map's widest gap


def test_plain_checkpoints_load_into_parts_and_wrong_ones_change_nothing(found):
    for rank in found:
        assert rank["plain_checkpoints"] == {"equal": True, "refused": [True, True]}


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_processes_loads_the_same_bits(world, tmp_path):
    launch(2, tmp_path / "save", "save", tmp_path)
    for rank in launch(world, tmp_path / "load", "load", tmp_path):
        assert rank
        for name, moved in rank.items():  # factored: the order of a sum, where it is decoded
            assert moved <= (SUMS if "actor" in name else 0.0), name
