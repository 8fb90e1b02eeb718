"""Hooks around saving and loading, for every optimizer and those around others."""

import copy

import pytest
import torch
from torch import nn

from memtrain.optim import ReleaseGradients, SplitWeights, compress
from tests.optim.behaviours import FUSED, GENERAL, make, parameter

AROUND = {
    "SplitWeights": lambda o: SplitWeights(o, "bf16+8"),
    "ReleaseGradients": ReleaseGradients,
    "both": lambda o: ReleaseGradients(SplitWeights(o, "bf16+8")),
}


def every(name, params):
    if name not in AROUND:
        return make(name, params)
    return AROUND[name](make("AdamW4bit", params))


@pytest.mark.parametrize("name", [*FUSED, GENERAL, *AROUND])
def test_hooks_see_and_replace_what_is_saved_and_loaded(name):
    param, calls = parameter(80, 80), []
    optimizer = every(name, [param])
    param.grad = torch.ones_like(param)
    optimizer.step()

    def saving(found):
        assert found is optimizer
        calls.append("saving")

    def saved(found, state_dict):
        assert found is optimizer
        assert "memtrain" in state_dict  # the whole of it
        calls.append("saved")
        return {**state_dict, "note": 7}

    def loading(found, state_dict):
        assert found is optimizer
        assert state_dict.pop("note") == 7
        calls.append("loading")
        groups = [{**group, "lr": 0.5} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    def loaded(found):
        assert found.param_groups[0]["lr"] == 0.5
        assert found.state[param]
        calls.append("loaded")

    handles = [
        optimizer.register_state_dict_pre_hook(saving),
        optimizer.register_state_dict_post_hook(saved),
        optimizer.register_load_state_dict_pre_hook(loading),
        optimizer.register_load_state_dict_post_hook(loaded),
    ]
    state_dict = optimizer.state_dict()
    assert state_dict["note"] == 7
    optimizer.load_state_dict(state_dict)
    assert state_dict["note"] == 7  # the hook popped it from a copy
    assert calls == ["saving", "saved", "loading", "loaded"]
    for handle in handles:
        handle.remove()
    assert "note" not in optimizer.state_dict()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert len(calls) == 4


@pytest.mark.parametrize("plain", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("around", [None, *AROUND])
def test_hooks_registered_before_still_run_once(plain, around):
    param, calls = parameter(80, 80), []
    original = plain([param])
    original.register_state_dict_pre_hook(lambda _: calls.append("saving"))
    original.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    original.register_step_post_hook(lambda *_: calls.append("stepped"))
    optimizer = compress(original)
    optimizer = AROUND[around](optimizer) if around else optimizer
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["stepped", "saving", "loaded"]


def test_hooks_of_every_optimizer_run_around_ours():
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    for name in (*FUSED, GENERAL, *AROUND):
        calls: list[object] = []
        param = parameter(80, 80)
        optimizer = every(name, [param])
        handles = [
            register_optimizer_step_pre_hook(lambda o, *_: calls.append(o)),  # noqa: B023
            register_optimizer_step_post_hook(lambda o, *_: calls.append(o)),  # noqa: B023
        ]
        try:
            optimizer.step()
        finally:
            for handle in handles:
                handle.remove()
        assert [type(found) for found in calls] == [type(optimizer)] * 2, name


@pytest.mark.parametrize("name", ["AdamW4bit", GENERAL, *AROUND])
def test_a_pre_hook_may_replace_the_closure(name):
    param = nn.Parameter(torch.ones(80, 80))
    optimizer = every(name, [param])

    def with_closure(_, args, kwargs):
        return (args[0], lambda: torch.tensor(3.0)), kwargs

    optimizer.register_step_pre_hook(with_closure)
    assert optimizer.step() == 3.0
    optimizer.register_step_pre_hook(lambda *_: "neither None nor a pair")
    with pytest.raises(RuntimeError, match="must return None or a tuple"):
        optimizer.step()
