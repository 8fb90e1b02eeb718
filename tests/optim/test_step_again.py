"""Steps from the table of the step before: as if each had made its own."""

import copy

import pytest
import torch
from torch import nn

from memtrain.kernels import cpu, dispatch
from memtrain.optim import AdamW4bit, AdamW8bit, SGD4bit
from memtrain.optim.fused.again import StepAgain

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")


def nothing(params, optimizer):
    pass


def rate(params, optimizer):
    optimizer.param_groups[0]["lr"] *= 0.5


def without_one(params, optimizer):
    params[0].grad = None


def transposed(params, optimizer):
    params[0].grad = params[0].grad.t().contiguous().t()


def moved(params, optimizer):
    params[0].data = params[0].data.clone()


def smaller(params, optimizer):
    params[0].grad, params[0].grad_dtype = None, None
    params[0].grad = torch.ones(64, 128, dtype=torch.bfloat16)


def loaded(params, optimizer):
    held = [dict(state) for state in optimizer.state.values()]  # else its addresses may serve again
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    del held


def added(params, optimizer):
    params.append(nn.Parameter(torch.ones(64, 128)))
    params[-1].grad = torch.ones(64, 128)
    optimizer.add_param_group({"params": [params[-1]], "lr": 0.1})


def replaced(params, optimizer):
    state = optimizer.state[params[0]]
    name = next(name for name in state if name != "step")
    state[name] = copy.deepcopy(state[name])


def swapped(params, optimizer):
    own = optimizer.param_groups[0]["params"]
    own[0], own[1] = own[1], own[0]


def reordered(params, optimizer):
    state = optimizer.state.pop(params[0])
    optimizer.state[params[0]] = state


def counted_apart(params, optimizer):
    if "step" in optimizer.state[params[0]]:
        optimizer.state[params[0]]["step"].add_(7)  # where it is


def counted_as_float64(params, optimizer):
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].double()


CHANGES = [nothing, rate, without_one, transposed, moved, smaller, loaded, added, replaced]
CHANGES += [swapped, reordered, counted_apart, counted_as_float64]
SAME = [nothing, rate, counted_apart]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [AdamW4bit, AdamW8bit, SGD4bit])
def test_steps_from_a_kept_table_equal_steps_from_their_own(make, change):
    results = []
    for kept in (True, False):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(64, 128)) for _ in range(2)]
        params.append(nn.Parameter(torch.randn(128)))
        options = {"momentum": 0.9} if make is SGD4bit else {}
        optimizer = make(params, lr=1e-2, **options)
        for k in range(5):
            for param in params:
                param.grad = torch.randn_like(param)
            if k == 3:
                change(params, optimizer)
            if not kept:
                vars(optimizer).pop("_again", None)
            optimizer.step()
        counts = [state.get("step", torch.tensor(0)) for state in optimizer.state.values()]
        results.append([*[param.detach().clone() for param in params], *counts])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_makes_a_table_of_its_own(monkeypatch, change):
    original, runs = StepAgain.run, []

    def run(self, gradients, scalars):
        runs.append(len(gradients))
        original(self, gradients, scalars)

    monkeypatch.setattr(StepAgain, "run", run)
    params = [nn.Parameter(torch.randn(64, 128)) for _ in range(2)]
    optimizer = AdamW4bit(params, lr=1e-2)
    for k in range(4):
        for param in params:
            param.grad = torch.randn_like(param)
        if k == 3:
            change(params, optimizer)
        optimizer.step()
    assert runs == [2] * (3 if change in SAME else 2)


def test_a_forced_backend_is_not_passed_over(monkeypatch):
    param = nn.Parameter(torch.randn(64, 128))
    optimizer = AdamW4bit([param], lr=1e-2)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    monkeypatch.setattr(StepAgain, "run", None)  # fails where it is called
    with dispatch.backend("reference"):
        optimizer.step()


def test_a_table_keeps_no_state_alive():
    param = nn.Parameter(torch.randn(64, 128))
    optimizer = AdamW4bit([param], lr=1e-2)
    param.grad = torch.ones_like(param)
    optimizer.step()
    again = vars(optimizer)["_again"]
    storage = param.grad.untyped_storage()._weak_ref()
    codes = optimizer.state[param]["exp_avg"]["codes"].untyped_storage()._weak_ref()
    optimizer.state.clear()
    param.grad = None
    assert again is vars(optimizer)["_again"]
    assert torch.UntypedStorage._expired(storage)
    assert torch.UntypedStorage._expired(codes)
