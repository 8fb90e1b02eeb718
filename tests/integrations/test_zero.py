"""DeepSpeed's ZeRO, by a stand-in that does to parameters and groups what ZeRO does."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memtrain

FORBIDDEN = r"allowed: weights=keep and gradients=keep \(the preset balanced\), or FSDP2"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 8)).bfloat16()


def zero(optimizer, mark):
    """What `deepspeed.initialize` does: one float32 vector a group, a mark on what it took."""
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            setattr(param, mark, number)
        flat = [param.detach().float().flatten() for param in group["params"]]
        group["params"] = [nn.Parameter(torch.cat(flat))]
    return SimpleNamespace(optimizer=optimizer, param_groups=optimizer.param_groups)


@pytest.mark.parametrize("mark", ["_hp_mapping", "ds_id"])  # of ZeRO 1 and 2, of ZeRO 3
@pytest.mark.parametrize("preset", ["all_four", ["gradients=release"], ["weights=bf16+8"]], ids=str)
def test_what_needs_the_parameters_themselves_is_refused_before_a_change(preset, mark):
    model = network()
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), preset)
    engine = zero(optimizer, mark)
    kept = [param.detach().clone() for param in model.parameters()]

    def train():
        model(torch.randn(32, 64).bfloat16()).sum().backward()
        engine.optimizer.step()

    with pytest.raises(RuntimeError, match=f"ZeRO joined 4 parameters .*{FORBIDDEN}"):
        train()
    assert all(map(torch.equal, kept, model.parameters()))
    assert not optimizer.state


@pytest.mark.parametrize("preset", ["balanced", "all_four"])
def test_wrap_around_its_optimizer_says_where_to_call_it(preset):
    model = network()
    engine = zero(torch.optim.AdamW(model.parameters()), "ds_id")
    with pytest.raises(ValueError, match=r"call memtrain\.wrap before deepspeed\.initialize"):
        memtrain.wrap(model, engine, preset)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_states_and_activations_are_compressed_under_it():
    model = network()
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), "balanced")
    engine = zero(optimizer, "_hp_mapping")
    (flat,) = optimizer.param_groups[0]["params"]
    model(torch.randn(64, 64).bfloat16()).sum().backward()
    flat.grad = torch.cat([param.grad.float().flatten() for param in model.parameters()])
    engine.optimizer.step()
    assert set(optimizer.state[flat]["exp_avg"]) == {"codes", "scale"}
