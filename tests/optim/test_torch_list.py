"""The list of torch's own tests of AdamW, for every optimizer of memtrain.

Beside `test_torch_behaviours.py`: how groups are checked, what old checkpoints and pickles lack,
what is printed, recorded and copied.
"""

import copy

import pytest
import torch
from torch import nn

from memtrain.optim import ReleaseGradients, SplitWeights
from tests.optim.behaviours import (
    GENERAL,
    every,
    fused,
    make,
    parameter,
    step_equally,
    twin,
)


@every
def test_what_is_no_list_of_leaves_is_refused(name):
    with pytest.raises(TypeError, match="iterable"):
        make(name, parameter(5))
    with pytest.raises(ValueError, match="empty parameter list"):
        make(name, [])
    with pytest.raises(ValueError, match="non-leaf"):
        make(name, [parameter(5) * 2])
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        make(name, [3])


@every
def test_parameters_given_twice(name):
    param = parameter(80, 80)
    alone = twin(param)
    with pytest.raises(ValueError, match="more than one parameter group"):
        make(name, [{"params": [param]}, {"params": [param], "lr": 0.1}])
    optimizer = make(name, [param])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [param]})
    with pytest.raises(TypeError, match="set"):
        optimizer.add_param_group({"params": {parameter(5)}})
    assert len(optimizer.param_groups) == 1
    step_equally((param, optimizer), (alone, make(name, [alone])))


@every
def test_named_parameters_keep_their_names(name):
    model = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 10))
    optimizer = make(name, model.named_parameters())
    names = [n for n, _ in model.named_parameters()]
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == names
    model(torch.ones(1, 80)).sum().backward()
    optimizer.step()
    other = make(name, copy.deepcopy(model).named_parameters())
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["param_names"] == names


@every
def test_deep_copied_groups_make_another_optimizer(name):
    param = parameter(80, 80)
    optimizer = make(name, [{"params": [param], "lr": 0.05}], weight_decay=0.1)
    groups = copy.deepcopy(optimizer.param_groups)
    (own,) = groups[0]["params"]
    own.grad = param.grad.clone()
    other = make(name, groups)
    assert own is not param
    step_equally((param, optimizer), (own, other))
    assert other.param_groups[0]["lr"] == 0.05


@every
def test_it_is_printed_with_its_groups(name):
    optimizer = make(name, [{"params": [parameter(5)]}, {"params": [parameter(6)], "lr": 0.125}])
    text = repr(optimizer)
    assert text.startswith(name)
    assert "Parameter Group 1" in text
    assert "lr: 0.125" in text
    assert "params" not in text


@pytest.mark.parametrize("name", ["AdamW4bit", "SGD8bit", "Lion4bit", GENERAL, "around"])
def test_profilers_find_its_steps_by_name(name):
    param = parameter(8, 8)
    if name == "around":
        optimizer = ReleaseGradients(SplitWeights(make("AdamW4bit", [param])))
        name = "ReleaseGradients"
        param.grad = torch.ones_like(param)
    else:
        optimizer = make(name, [param])
    with torch.autograd.profiler.profile() as profile:
        optimizer.step()
        optimizer.zero_grad()
    names = [event.name for event in profile.function_events]
    steps = [found for found in names if found.startswith("Optimizer.step#")]
    assert steps == [f"Optimizer.step#{name}.step"]  # the inner one's is no step of its own
    assert f"Optimizer.zero_grad#{name}.zero_grad" in names


@fused
@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("lr", -1.0, "Invalid learning rate"),
        ("lr", float("nan"), "Invalid learning rate"),
        ("weight_decay", -0.1, "Invalid weight_decay value"),
        ("betas", (1.0, 0.5), "Invalid beta parameter at index 0"),
        ("betas", (0.5, -0.1), "Invalid beta parameter at index 1"),
        ("min_elements", -1, "min_elements must be at least 0"),
    ],
)
def test_options_out_of_range_are_refused(name, option, value, match):
    if option not in (*make(name, [parameter(5)]).defaults, "min_elements"):
        option, value, match = "momentum", -0.5, "Invalid momentum value"
    with pytest.raises(ValueError, match=match):
        make(name, [parameter(5)], **{option: value})


@every
def test_empty_parameters_and_groups_do_nothing(name):
    empty, full = nn.Parameter(torch.zeros(0, 8)), parameter(80, 80)
    empty.grad = torch.zeros_like(empty)
    optimizer = make(name, [{"params": []}, {"params": [empty, full]}])
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert empty.shape == (0, 8)
