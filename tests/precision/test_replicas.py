"""Processes that train replicas decide together: skipped steps, the scale, promotions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memtrain

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this torch has no torch.distributed"
)
SCRIPT = Path(__file__).with_name("replicas.py")


@pytest.fixture
def alone():
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(**fields):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    cfg = {"preset": "precision_only", "precision": {"assignment": "uniform", **fields}}
    return memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), cfg)


def test_what_another_rank_found_counts(alone, monkeypatch):
    model, optimizer = wrapped(promotion=0.01)
    replica = DistributedDataParallel(model)
    real, other = dist.all_reduce, {}

    def all_reduce(table, group=None):
        real(table, group=group)
        table += torch.tensor(other.get("table", [0.0] * len(table)), dtype=table.dtype)
        other["seen"] = table.tolist()

    def step():
        optimizer.zero_grad()
        before = model[0].weight.detach().clone()
        replica(torch.ones(8, 8)).square().mean().backward()
        optimizer.step()
        return not torch.equal(before, model[0].weight)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    assert step()
    state = memtrain.precision_state(model)
    names = [value.name for value in state.graph.tensors]
    assert other["seen"][:2] == [0.0, 0.0]
    assert other["seen"][3 : 5 + 1] == [64.0, 0.0, 128.0]  # of the input and the first weight
    nothing = [0.0] * (2 + 2 * len(names))
    other["table"] = [1.0, *nothing[1:]]  # another rank's gradient has overflowed
    assert not step()
    assert (state.scale.overflows, state.scale.value) == (1, 2.0**15)
    other["table"] = [1.0, 1.0, *nothing[2:]]  # because its loss was not finite
    assert step()
    assert state.scale.overflows == 1
    other["table"] = [0.0, 0.0, 2.0, 64.0, *nothing[4:]]  # 2 of 128 in the two inputs together
    step()
    assert [(site, ratio) for site, (_, ratio) in state.promotions.items()] == [(names[0], 2 / 128)]


def test_without_replicas_nothing_is_asked(alone, monkeypatch):
    model, _ = wrapped()
    monkeypatch.setattr(dist, "all_reduce", None)
    model(torch.ones(8, 8)).square().mean().backward()


def test_fully_sharded_models_are_refused(alone):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (1,))
    model, _ = wrapped()
    fully_shard(model[0], mesh=mesh)
    with pytest.raises(
        ValueError, match=r"precision: 0 is under fully_shard.*allowed: Distributed"
    ):
        model(torch.ones(8, 8))
    model = fully_shard(nn.Linear(8, 8), mesh=mesh)
    with pytest.raises(ValueError, match=r"precision: the model is under fully_shard"):
        memtrain.wrap(
            model, torch.optim.SGD(model.parameters(), lr=0.1),
            {"preset": "precision_only", "precision": {"assignment": "uniform"}},
        )  # fmt: skip


@pytest.mark.nightly
def test_an_overflow_on_one_rank_skips_every_ranks_step(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=300) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], outputs
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in outputs)
    assert first == second
    assert first["changed"] == [True, False, True, True]
    assert (first["scale"], first["overflows"]) == (2.0**15, 1)
    assert [step for step, *_ in first["promoted"]] == [2]
