"""Modules that come after `wrap`: compressed, and a warning where nothing steps them."""

import warnings

import pytest
import torch
from torch import nn

import memtrain
from memtrain.audit.live_storages import saved_nbytes


class Adapted(nn.Module):
    """A linear layer with a low-rank one beside it, as an adapter is."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 8)
        self.up = nn.Sequential(nn.GELU(), nn.Linear(8, base.out_features))

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def train(model, optimizer):
    model(torch.randn(256, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def adapt(model):
    model[2] = Adapted(model[2])
    model.to(model[0].weight.dtype)
    return [p for name, p in model[2].named_parameters() if "base" not in name]


@pytest.mark.parametrize(
    ("preset", "steps_before"),
    [("balanced", 0), ("balanced", 1), ("all_four", 0), ("all_four", 1), ("optimizer_only", 0)],
)
def test_parameters_that_came_later_and_are_in_no_group_are_one_warning(preset, steps_before):
    model = network()
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), preset)
    for _ in range(steps_before):
        train(model, optimizer)
    added = adapt(model)
    with pytest.warns(RuntimeWarning, match=r"2\.down\.weight, .* and 1 more: in no group .*added"):
        train(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer)
        optimizer.add_param_group({"params": added})
        train(model, optimizer)
    assert all(param in optimizer.state for param in added)


def test_what_was_left_out_at_wrap_or_is_frozen_is_no_warning():
    model = network()
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model[0].parameters()), "balanced")
    for param in adapt(model):
        param.requires_grad_(False)
    train(model, optimizer)  # warnings are errors here


def test_a_later_modules_activations_are_compressed():
    model, x = network(), torch.randn(256, 64)
    added = network()
    plain = saved_nbytes(lambda: added(x), exclude=[x])[0]
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), "balanced")
    train(model, optimizer)
    before = saved_nbytes(lambda: model(x), exclude=[x])[0]
    model.append(added)
    optimizer.add_param_group({"params": [*added.parameters()]})
    assert saved_nbytes(lambda: model(x), exclude=[x])[0] - before < 0.5 * plain
    train(model, optimizer)


WAYS = {
    "kept": "balanced",
    "released": "all_four",
    "on the host": ["preset=all_four", "optim.device=cpu"],
    "without hooks on modules": ["preset=optimizer_only", "gradients=release"],
}


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_others_were_assigned_over_are_an_error(way, steps_before):
    model = network()
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), WAYS[way])
    for _ in range(steps_before):
        train(model, optimizer)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    model.load_state_dict(state)
    train(model, optimizer)  # copied into the parameters: as ever
    model.load_state_dict(state, assign=True)
    for _ in range(2):  # until it is fixed
        with pytest.raises(RuntimeError, match=r"0\.weight, .* and 1 more: in no .*assign=True"):
            train(model, optimizer)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


def test_parameters_that_were_taken_out_of_the_groups_are_a_warning():
    model = network()
    groups = [{"params": [*model[k].parameters()]} for k in (0, 2)]
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(groups), "balanced")
    other = torch.optim.SGD(optimizer.param_groups.pop()["params"], lr=0.1)
    before = [x.detach().clone() for x in model.parameters()]
    with pytest.warns(RuntimeWarning, match=r"^2\.weight, 2\.bias: in no group .*removed"):
        train(model, optimizer)
    train(model, optimizer)
    train(model, other)
    assert not any(map(torch.equal, model.parameters(), before))
