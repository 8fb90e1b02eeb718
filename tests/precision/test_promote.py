"""What overflows in the forward becomes high for good, and that is logged and saved."""

import copy
import io
from math import ceil

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memtrain
from memtrain.config.sources import Config
from memtrain.kernels.floats.formats import FP8_FORWARD, FP16
from memtrain.precision.assignment import Precision
from memtrain.precision.loss_scaling import LossScaler
from memtrain.precision.state import PrecisionState
from tests.precision.test_scale import data, mlp


def wrapped(model, **fields):
    fields = {"assignment": "uniform", "loss_scale": "none", **fields}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return memtrain.wrap(model, optimizer, Config(precision=Precision(**fields)))


def step(model, x, y):
    F.cross_entropy(model(x), y).backward()
    return memtrain.precision_state(model)


def with_large_inputs(share):
    """The share of the inputs' elements that overflow."""
    x, y = data(40)
    x.view(-1)[: ceil(share * x.numel())] = 31.0
    return x, y


def test_a_share_of_one_percent_is_enough_and_less_is_not():
    for share, promoted in ((0.009, []), (0.01, ["(root) / input / input"])):  # 6 and 7 of 640
        model, _ = wrapped(nn.Sequential(nn.Linear(16, 8, bias=False)))
        with torch.no_grad():
            model[0].weight.mul_(1e-3)
        x, y = with_large_inputs(share)
        state = step(model, x, y)
        assert [*state.promotions] == promoted


def test_promotion_is_for_good_and_from_the_next_forward_on():
    x, y = data(40)
    model, _ = wrapped(mlp())
    step(model, torch.zeros_like(x), y)  # so that the hook below sees no trace
    before = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.mul_(1000)
    outputs = []
    model[0].register_forward_hook(lambda m, a, y: outputs.append(y.detach().clone()))
    state = step(model, x, y)
    # relu's input was saturated, so that its output does not overflow yet
    assert [*state.promotions] == ["0.weight", "0 / linear / output"]
    assert [step for step, _ in state.promotions.values()] == [1, 1]
    share = (before.abs() * 1000 >= 31).float().mean().item()
    assert next(iter(state.promotions.values()))[1] == pytest.approx(share)
    assert torch.equal(outputs[0], FP8_FORWARD.round(outputs[0]))
    with torch.no_grad():
        model[0].weight.mul_(0.001)
    step(model, x, y)
    assert len(state.promotions) == 2
    assert not torch.equal(outputs[1], FP8_FORWARD.round(outputs[1]))
    assert torch.equal(outputs[1], FP16.round(outputs[1]))
    # its gradient stays low
    assert "0 / linear / output" in state.backward
    assert state.backward_format("0 / linear / output").bits == 8


def test_the_ratio_falls_with_each_promotion():
    x, y = data(40)
    model, _ = wrapped(mlp())
    state = step(model, x, y)
    before = state.ratio
    with torch.no_grad():
        model[0].weight.mul_(1000)
    step(model, x, y)
    values = {value.name: value.numel for value in state.graph.tensors}
    lost = sum(values[site] for site in state.promotions)
    assert state.ratio == pytest.approx(before - lost / state.graph.elements)
    with torch.no_grad():
        model[0].weight.mul_(0.001)
    step(model, x, y)
    assert state.bits == 16 * state.graph.elements - 8 * round(state.ratio * state.graph.elements)
    assert "step 1: 0.weight" in str(state)


@pytest.mark.parametrize("how", ["uniform", "operator", "operator_out", "size_ordered"])
def test_promotion_goes_with_every_assignment(how):
    x, y = data(40)
    for threshold in (0.01, None):
        model, _ = wrapped(mlp(), assignment=how, promotion=threshold)
        with torch.no_grad():
            model[0].weight.mul_(1000)
        state = step(model, x, y)
        sites = state.promotions.keys()
        assert bool(sites) == (threshold is not None)
        assert sites <= state.forward


def test_everything_may_be_promoted():
    x, y = data(40)
    model, optimizer = wrapped(mlp())
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.full_like(p, 1e3))
    for _ in range(3):  # what follows a saturated tensor overflows once that is high
        state = step(model, x * 100, y)
    assert state.promotions.keys() == state.forward
    optimizer.step()
    optimizer.zero_grad()
    step(model, x, y)
    backward = sum(v.numel for v in state.graph.tensors if v.name in state.backward)
    assert state.ratio == backward / state.graph.elements


def test_evaluation_promotes_nothing():
    x, y = data(40)
    model, _ = wrapped(mlp())
    step(model, x, y)
    with torch.no_grad():
        model(x * 1000)
    assert not step(model, x, y).promotions


def test_a_checkpoint_holds_promotions_and_goes_on_bit_for_bit():
    x, y = data(40)
    model, optimizer = wrapped(mlp(), loss_scale="dynamic", growth_interval=2)
    with torch.no_grad():
        model[0].weight.mul_(1000)
    assert step(model, x, y).promotions
    optimizer.step()
    saved = copy.deepcopy((model.state_dict(), memtrain.state_dict(model)))
    assert through_a_file(saved[1]) == saved[1]
    other, twin = wrapped(mlp(), loss_scale="dynamic", growth_interval=2)
    other.load_state_dict(saved[0])
    memtrain.load_state_dict(other, saved[1])
    for _ in range(3):
        found = []
        for one, its in ((model, optimizer), (other, twin)):
            its.zero_grad()
            state = step(one, x, y)
            its.step()
            found.append((state.ratio, {**state.promotions}, state.scale.value, state.step))
        assert found[0] == found[1]
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_checkpoint_of_other_kind_is_refused():
    model, _ = wrapped(mlp())
    with pytest.raises(ValueError, match=r"the keys \['precision', 'step'\], not \['step'\]"):
        memtrain.load_state_dict(model, {"step": 3})


class Elsewhere(torch.Tensor):
    """Stands for a tensor of another device."""

    device = torch.device("cuda")


def test_overflows_of_two_devices_are_read_from_each(monkeypatch):
    stack = torch.stack

    def one_device(tensors):
        assert len({x.device for x in tensors}) == 1, "Expected all tensors on the same device"
        return stack(tensors)

    monkeypatch.setattr(torch, "stack", one_device)
    state = PrecisionState(Precision())
    reported = []
    monkeypatch.setattr(state, "promote", reported.append)
    scaler = LossScaler(state)
    scaler.count_overflows("a", torch.tensor(3), 10)
    scaler.count_overflows("b", torch.tensor(4).as_subclass(Elsewhere), 10)
    scaler.count_overflows("c", torch.tensor(5), 10)
    scaler._end_backward()
    assert reported == [{"a": 0.3, "b": 0.4, "c": 0.5}]
