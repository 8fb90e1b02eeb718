"""A run that `torch.distributed.checkpoint` saved and another process's model loads goes on bit
for bit, under every preset: what memtrain counts lies where it is kept."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
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
    "stochastic states": ["preset=optimizer_only", "optim.rules.0.compressor=B128/DE+SR"],
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
    form = StateDictOptions(**how)
    model, optimizer = first
    saved = {"model": model.state_dict(), "optim": get_optimizer_state_dict(*first, options=form)}
    dcp.save(saved, checkpoint_id=folder, no_dist=True)
    model, optimizer = second
    place = {"model": model.state_dict(), "optim": get_optimizer_state_dict(*second, options=form)}
    dcp.load(place, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(place["model"])
    set_optimizer_state_dict(model, optimizer, place["optim"], options=form)


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
