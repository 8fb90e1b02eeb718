"""A run that `torch.distributed.checkpoint` saved and another process's model loads goes on bit
for bit, under every preset: what memtrain counts lies where it is kept."""

from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import memtrain
from memtrain.config.sources import options

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning",
    "ignore:quantisation noise of the saved activations:UserWarning",
)
PRESETS = [preset for preset in options("preset") if preset != "checkpointed"]
OTHERS = {
    "stochastic weights": ["preset=all_four", "weights=bf16+sr", "release.clip=previous"],
    "stochastic states": ["preset=optimizer_only", "optim.rules.0.compressor=B128/DE-0+SR"],
    "plain optimizer": ["preset=activations_only", "weights=bf16+8"],
    "low precision": ["preset=precision_only", "precision=size_ordered"],
}

NAMES = [*PRESETS, *OTHERS]
QUICK = ("balanced", "all_four", "actnn_l3", "stochastic weights", "low precision")


def made(cfg, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.GELU(), nn.Sequential(nn.Linear(128, 128), nn.GELU()),
        nn.Dropout(0.1), nn.Linear(128, 64),
    )  # fmt: skip
    return memtrain.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), cfg)


def trained(model, optimizer, steps):
    losses = []
    for step in steps:
        torch.manual_seed(step)
        x = torch.randn(32, 64)
        loss = (model(x).float() - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def through_dcp(first, second, folder, **how):
    """Save one run's model and optimizer, and load them into another's."""
    save(first, folder, **how)
    load(second, folder, **how)


def save(run, folder, **how):
    dcp.save(state_of(run, **how), checkpoint_id=folder, no_dist=True)


def load(run, folder, **how):
    place = state_of(run, **how)
    dcp.load(place, checkpoint_id=folder, no_dist=True)
    run[0].load_state_dict(place["model"])
    set_optimizer_state_dict(*run, place["optim"], options=StateDictOptions(**how))


def state_of(run, **how):
    states = get_optimizer_state_dict(*run, options=StateDictOptions(**how))
    return {"model": run[0].state_dict(), "optim": states}


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in NAMES],
)
def test_it_goes_on_bit_for_bit(name, tmp_path):
    cfg = OTHERS.get(name, name)
    first, second = made(cfg, 0), made(cfg, 1)
    trained(*first, range(3))
    through_dcp(first, second, tmp_path)
    assert memtrain.state_dict(second[0]) == memtrain.state_dict(first[0])
    assert trained(*second, range(3, 6)) == trained(*first, range(3, 6))
    for ours, theirs in zip(second[0].parameters(), first[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_flattened_it_goes_on_bit_for_bit(tmp_path):
    first, second = made("balanced", 0), made("balanced", 1)
    trained(*first, range(3))
    through_dcp(first, second, tmp_path, flatten_optimizer_state_dict=True)
    assert trained(*second, range(3, 6)) == trained(*first, range(3, 6))


def test_flattened_split_weights_are_refused(tmp_path):
    first, second = made("all_four", 0), made("all_four", 1)
    trained(*first, range(3))
    with pytest.raises(ValueError, match="without flatten_optimizer_state_dict"):
        through_dcp(first, second, tmp_path, flatten_optimizer_state_dict=True)


@pytest.mark.parametrize("where", ["step", "save"])
def test_a_run_cut_off_goes_on_from_the_checkpoint_before(where, tmp_path, monkeypatch):
    """Files that a killed process leaves; `tests/optim/test_distributed.py` kills some."""
    first, second = made("all_four", 0), made("all_four", 1)
    trained(*first, range(2))
    save(first, tmp_path / "kept")
    expected = trained(*first, range(2, 4))
    if where == "step":  # half of the weights have been stepped in the backward
        first[0][1].register_full_backward_hook(cut_off)
        with pytest.raises(KeyboardInterrupt):
            trained(*first, range(4, 5))
    else:
        write = FileSystemWriter.write_data

        def half(writer, plan, planner):
            items = plan.items[: len(plan.items) // 2]
            write(writer, replace(plan, items=items), planner).wait()
            cut_off()

        monkeypatch.setattr(FileSystemWriter, "write_data", half)
        with pytest.raises(CheckpointException):
            save(first, tmp_path / "later")
        assert [file.name for file in (tmp_path / "later").iterdir()] == ["__0_0.distcp"]
    load(second, tmp_path / "kept")
    assert trained(*second, range(2, 4)) == expected


def cut_off(*_):
    raise KeyboardInterrupt
