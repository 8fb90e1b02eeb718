"""Steps from what an earlier step has prepared: as if each had prepared its own."""

import copy
import sys

import pytest
import torch
from torch import nn

from memtrain.kernels import cpu, dispatch
from memtrain.kernels.step.prepared import PreparedStep, PreparedSteps
from memtrain.optim import AdamW4bit, AdamW8bit, SGD4bit
from memtrain.optim.fused.step_tensors import tensors_of
from memtrain.optim.states.targets import parts_of
from memtrain.optim.wrappers.release import ReleaseGradients
from memtrain.optim.wrappers.weights import SplitWeights

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


def counted_separately(params, optimizer):
    if "step" in optimizer.state[params[0]]:
        optimizer.state[params[0]]["step"].add_(7)  # where it is


def counted_as_float64(params, optimizer):
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].double()


CHANGES = [nothing, rate, without_one, transposed, moved, smaller, loaded, added, replaced]
CHANGES += [swapped, reordered, counted_separately, counted_as_float64]
SAME = [nothing, rate, counted_separately, counted_as_float64, reordered]


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
                vars(optimizer)["_steps"] = PreparedSteps()
            optimizer.step()
        counts = [state.get("step", torch.tensor(0)) for state in optimizer.state.values()]
        results.append([*[param.detach().clone() for param in params], *counts])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def made(monkeypatch):
    """Of how many entries each prepared step was."""
    original, found = PreparedStep.__init__, []

    def init(self, entries):
        found.append(len(entries))
        original(self, entries)

    monkeypatch.setattr(PreparedStep, "__init__", init)
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_prepared_anew(made, change):
    params = [nn.Parameter(torch.randn(64, 128)) for _ in range(2)]
    optimizer = AdamW4bit(params, lr=1e-2)
    for k in range(4):
        for param in params:
            param.grad = torch.randn_like(param)
        if k == 3:
            change(params, optimizer)
        optimizer.step()
    assert len(made) == (1 if change in SAME else 2)


def test_steps_that_alternate_are_prepared_once(made):
    params = [nn.Parameter(torch.randn(64, 128)) for _ in range(3)]
    optimizer = AdamW4bit(params, lr=1e-2)
    for k in range(9):
        for param in params:
            param.grad = torch.randn_like(param)
        if k % 3:
            params[k % 3].grad = None
        optimizer.step()
    assert made == [3, 2, 2]


def test_a_forced_backend_prepares_its_own(made):
    param = nn.Parameter(torch.randn(64, 128))
    optimizer = AdamW4bit([param], lr=1e-2)
    for name in ("cpu", "cpu", "reference", "reference", "cpu"):
        param.grad = torch.ones_like(param)
        with dispatch.backend(name):
            optimizer.step()
    assert made == [1, 1, 1]  # no table serves the reference


def test_a_prepared_step_keeps_no_tensor_alive():
    param = nn.Parameter(torch.randn(64, 128))
    optimizer = AdamW4bit([param], lr=1e-2)
    param.grad = torch.ones_like(param)
    optimizer.step()
    storage = param.grad.untyped_storage()._weak_ref()
    codes = optimizer.state[param]["exp_avg"]["codes"].untyped_storage()._weak_ref()
    optimizer.state.clear()
    param.grad = None
    assert len(optimizer._steps) == 1
    assert torch.UntypedStorage._expired(storage)
    assert torch.UntypedStorage._expired(codes)


def calls(run):
    """How many functions, of Python and of C, are called."""
    count = 0

    def seen(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.fixture
def unlaunched(monkeypatch):
    """The host path that CUDA takes, on CPU tensors and without kernels."""
    pytest.importorskip("triton")
    from memtrain.kernels.step import launch

    monkeypatch.setattr(launch, "launch", lambda *given, **options: None)
    with dispatch.backend("triton"):
        yield


def prepared(make, number):
    """An optimizer of small parameters after two steps, and these."""
    shapes = [(64, 64)] * 4 + [(64, 128)] * 3 + [(64,)] * 2
    params = [nn.Parameter(torch.randn(shapes[k % 9])) for k in range(number)]
    optimizer = make(params)
    for _ in range(2):
        step(optimizer, params)
    return optimizer, params


def step(optimizer, params, count=lambda run: run()):
    """One step from new gradients, released ones one by one; what `count` says of it."""
    grads = [torch.ones_like(param) for param in params]
    if not isinstance(optimizer, ReleaseGradients):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        return count(optimizer.step)

    def release():
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
            optimizer.on_gradient(param)

    found = count(release)
    optimizer.step()
    return found


STEPPED = {
    "8 bits": lambda p: AdamW8bit(p, min_elements=0),
    "rank-1": lambda p: AdamW4bit(p, min_elements=0),
    "factored": lambda p: AdamW4bit(p, min_elements=0, second="factored"),
    "2 bits": lambda p: AdamW4bit(p, min_elements=0, first="Lloyd-Max", second="factored"),
    "sgd": lambda p: SGD4bit(p, lr=1e-3, momentum=0.9, min_elements=0),
}
RELEASED = {
    "8 bits": lambda p: ReleaseGradients(AdamW8bit(p, min_elements=0)),
    "split": lambda p: ReleaseGradients(SplitWeights(AdamW8bit(p, min_elements=0), "bf16+8")),
    "clipped": lambda p: ReleaseGradients(AdamW8bit(p, min_elements=0), clip="parameter"),
}


@pytest.mark.parametrize("name", STEPPED)
def test_a_parameter_more_takes_a_prepared_step_few_calls(name, unlaunched):
    """25 calls (SGD: 21), two for each tensor of a payload; preparing takes 270."""
    few, many = (step(*prepared(STEPPED[name], n), calls) for n in (90, 180))
    assert (many - few) / 90 <= 25


def test_a_step_has_the_states_of_each_parameter():
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    groups = [{"params": params[:1]}, {"params": params[1:], "momentum": 0.9}]
    optimizer = SGD4bit(groups, lr=0.1, min_elements=0)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    parts = parts_of(optimizer.param_groups)
    _, (_, found, *_) = tensors_of(parts, [(), ("momentum_buffer",)], optimizer.state)
    kept = [optimizer.state[param]["momentum_buffer"] for param in params[1:]]
    assert [len(states) for states in found] == [0, 1, 1]
    assert all(states[0] is one for states, one in zip(found[1:], kept, strict=True))


@pytest.mark.parametrize("name", RELEASED)
def test_released_gradients_are_linear_in_the_number_of_parameters(name, unlaunched):
    few, many = (step(*prepared(RELEASED[name], n), calls) / n for n in (90, 360))
    assert many <= 1.01 * few
