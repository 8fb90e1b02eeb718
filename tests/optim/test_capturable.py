"""`capturable=True`: nothing of a step is read on the host; the results are the same.

A graph itself needs a GPU (`tests/test_gpu.py`); here CPU tensors stand for a device's.
"""

import copy

import pytest
import torch
from torch import nn

from memtrain import optim
from memtrain.kernels.dispatch import backend
from memtrain.kernels.step import cuda_graph
from memtrain.optim import CompressedOptimizer, SplitWeights
from memtrain.optim.fused import capturable
from memtrain.optim.states import in_groups
from tests.kernels.test_capture import NoHost
from tests.optim.behaviours import ADAMS, FUSED, make

TRITON = ["AdamW4bit", "AdamW8bit", "Lion4bit"]  # nightly, but for SGD4bit


@pytest.fixture
def _any_device(monkeypatch):
    monkeypatch.setattr(capturable, "DEVICES", ("cpu", "cuda"))


def params():
    return [nn.Parameter(torch.randn(shape)) for shape in [(40, 33), (7, 3, 5), (130,)]]


def set_gradients(given, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in given:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


@pytest.mark.usefixtures("_any_device")
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *((name, "reference") for name in FUSED),
        ("SGD4bit", "triton"),
        *(pytest.param(name, "triton", marks=pytest.mark.nightly) for name in TRITON),
    ],
)
def test_steps_equal_plain_ones_and_read_nothing_on_the_host(name, kernels, monkeypatch):
    plain = params()
    given = [nn.Parameter(p.detach().clone()) for p in plain]
    lr = torch.tensor(0.01)
    ours = make(name, given, lr=lr, capturable=True, min_elements=0)
    theirs = make(name, plain, lr=0.01, min_elements=0)
    with backend(kernels):
        for step in range(3):
            set_gradients(given, step)
            set_gradients(plain, step)
            lr.fill_(0.01 / (1 + step))
            theirs.param_groups[0]["lr"] = lr.item()
            theirs.step()
            if step == 0:
                ours.step()  # makes states and tables
                continue
            with monkeypatch.context() as inside, NoHost():
                inside.setattr(cuda_graph, "capturing", lambda: True)
                ours.step()
    assert all(torch.equal(a, b) for a, b in zip(given, plain, strict=True))
    for a, b in zip(given, plain, strict=True):
        assert str(ours.state[a]) == str(theirs.state[b])


@pytest.mark.usefixtures("_any_device")
@pytest.mark.parametrize("name", ADAMS)
def test_it_is_switched_by_a_checkpoint(name):
    given, other = params(), params()
    ours, theirs = make(name, given, capturable=True), make(name, other)
    for on, off in ((ours, theirs), (theirs, ours)):
        for own in (given, other):
            set_gradients(own, 1)
        on.step()
        off.load_state_dict(copy.deepcopy(on.state_dict()))
        assert off.param_groups[0]["capturable"] == on.param_groups[0]["capturable"]
        off.step()
        states = [optimizer.state[own[0]] for optimizer, own in ((ours, given), (theirs, other))]
        assert states[0]["step"].dtype == states[1]["step"].dtype == torch.float32
    assert ours.state[given[0]]["step"].item() == 4


@pytest.mark.parametrize("name", FUSED)
def test_parameters_on_a_cpu_are_refused_before_any_change(name):
    param = nn.Parameter(torch.ones(80, 80))
    param.grad = torch.ones_like(param)
    optimizer = make(name, [param], capturable=True)
    with pytest.raises(ValueError, match="needs parameters on cuda"):
        optimizer.step()
    assert torch.equal(param, torch.ones_like(param))
    assert not optimizer.state


def test_a_capture_without_it_is_refused(monkeypatch):
    given = params()
    set_gradients(given, 0)
    optimizer = optim.AdamW4bit(given)
    monkeypatch.setattr(cuda_graph, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match="capturable=False"):
        optimizer.step()
    general = CompressedOptimizer(torch.optim.RMSprop(given))
    with pytest.raises(RuntimeError, match="new tensors at each step"):
        general.step()
    released = optim.ReleaseGradients(torch.optim.SGD(given))
    with pytest.raises(RuntimeError, match="norm on the host"):
        released.step()


@pytest.mark.usefixtures("_any_device")
def test_a_gradient_more_or_less_needs_a_step_outside_of_captures(monkeypatch):
    given = params()
    optimizer = optim.SGD8bit(given, lr=0.1, momentum=0.9, capturable=True, min_elements=0)
    with backend("triton"):
        set_gradients(given, 0)
        optimizer.step()
        given[1].grad = None
        start = [p.detach().clone() for p in given]
        with monkeypatch.context() as inside:
            inside.setattr(cuda_graph, "capturing", lambda: True)
            with pytest.raises(RuntimeError, match="exactly these parameters"):
                optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(given, start, strict=True))
        optimizer.step()
        with monkeypatch.context() as inside:
            inside.setattr(cuda_graph, "capturing", lambda: True)
            optimizer.step()
    assert not torch.equal(given[0], start[0])
    assert torch.equal(given[1], start[1])


@pytest.mark.usefixtures("_any_device")
def test_a_choice_without_a_kernel_is_not_captured(monkeypatch):
    given = params()
    set_gradients(given, 0)
    optimizer = optim.AdamW4bit(given, first="B64/DE", capturable=True, min_elements=0)
    optimizer.step()
    monkeypatch.setattr(cuda_graph, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match="no fused kernel"):
        optimizer.step()


@pytest.mark.usefixtures("_any_device")
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_random_bits_differ_between_replays_and_repeat_from_a_checkpoint(kernels, monkeypatch):
    def weights(steps, saved=None):
        torch.manual_seed(0)
        param = nn.Parameter(torch.rand(40, 30))
        inner = optim.SGD4bit([param], lr=1e-3, momentum=0.9, capturable=True)
        optimizer = SplitWeights(inner, "bf16+sr")
        if saved is not None:
            optimizer.load_state_dict(saved[0])
            param.data.copy_(saved[1])
        for step in range(steps):
            param.grad = torch.ones_like(param)
            with monkeypatch.context() as inside:
                inside.setattr(cuda_graph, "capturing", lambda: step > 0 and kernels == "triton")  # noqa: B023
                optimizer.step()
        return optimizer, param

    with backend(kernels):
        optimizer, whole = weights(3)
        assert in_groups.found(optimizer.state_dict())["weights"]["steps"] == 3
        first, half = weights(2)
        _, resumed = weights(1, copy.deepcopy((first.state_dict(), half.detach())))
    assert torch.equal(whole, resumed)
    assert not torch.equal(whole, half)
    ticks = capturable.Ticks(5)
    ticks.on(torch.device("cpu")).add_(2)  # a graph's replays
    assert int(copy.deepcopy(ticks)) == 7


@pytest.mark.usefixtures("_any_device")
def test_options_are_read_where_parameters_are():
    """A learning rate of one device, parameters of two."""
    group = {"capturable": True, "lr": torch.tensor(0.1), "betas": (torch.tensor(0.9), 0.99)}
    there = capturable.options_on(group, torch.device("meta"))
    assert there["lr"].is_meta
    assert there["betas"][0].is_meta
    assert there["betas"][1] == 0.99
    here = capturable.options_on(group, torch.device("cpu"))
    assert here["lr"] is group["lr"]
    assert capturable.options_on({**group, "capturable": False}, torch.device("meta"))["lr"].is_cpu


@pytest.mark.usefixtures("_any_device")
def test_bits_that_the_host_counts_are_refused_in_a_capture(monkeypatch):
    weight = nn.Parameter(torch.randn(64, 32, 3, 3).to(memory_format=torch.channels_last))
    optimizer = SplitWeights(make("AdamW4bit", [weight], capturable=True), "bf16+sr")
    weight.grad = torch.randn_like(weight)
    with backend("triton"):
        optimizer.step()
        monkeypatch.setattr(cuda_graph, "capturing", lambda: True)
        with pytest.raises(RuntimeError, match="of a weight that is not contiguous cannot be capt"):
            optimizer.step()
