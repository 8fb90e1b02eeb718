"""Stochastic rounding of optimizer states: repeats under a seed, differs at each step."""

import pytest
import torch

import memtrain
from memtrain.optim.fused.adam import AdamW4bit
from memtrain.optim.states import layout
from memtrain.optim.states.compressed import CompressedOptimizer
from memtrain.optim.wrappers.release import ReleaseGradients


def weights():
    torch.manual_seed(3)
    return [torch.nn.Parameter(torch.randn(100, 50)) for _ in range(2)]


def sgd(params, seed):
    choose = layout.Choice(first="B128/DE+SR", seed=seed)
    return CompressedOptimizer(torch.optim.SGD(params, lr=0.0, momentum=1.0), choose)


def adam(params, seed):
    optimizer = AdamW4bit(
        params, lr=0.0, betas=(0.5, 0.5), first="B128/DE+SR", second="B128/DE-0+SR"
    )
    optimizer.choose = layout.Choice(first="B128/DE+SR", second="B128/DE-0+SR", seed=seed)
    return optimizer


def codes(optimizer):
    """All codes of all states of all parameters, in a row."""
    return [
        value["codes"].clone()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, dict)
    ]


def run(make, seed, steps=2):
    optimizer = make(weights(), seed)
    params = optimizer.param_groups[0]["params"]
    for _ in range(steps):
        for param in params:
            param.grad = torch.linspace(0.1, 1.0, 5000).view(100, 50)
        optimizer.step()
    return optimizer


def equal(a, b):
    return [torch.equal(x, y) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("make", [sgd, adam])
def test_a_seed_repeats_and_another_differs(make):
    first, again, other = (codes(run(make, seed)) for seed in (1, 1, 2))
    assert all(equal(first, again))
    assert not any(equal(first, other))


@pytest.mark.parametrize("make", [sgd, adam])
def test_parameters_draw_different_numbers(make):
    found = codes(run(make, 1, steps=1))
    half = len(found) // 2
    assert not any(equal(found[:half], found[half:]))  # though their gradients are equal


def test_steps_draw_different_numbers():
    optimizer = run(adam, 1, steps=1)
    state = next(iter(optimizer.state.values()))
    before = codes(optimizer)
    param = next(iter(optimizer.state))
    x = torch.linspace(0.1, 1.0, 5000).view(100, 50) / 2
    found = []
    for step in (1, 2):
        state["step"].fill_(step)
        found.append(optimizer.packed(param, state, {"exp_avg": x})["exp_avg"]["codes"])
    now, later = found
    assert torch.equal(now, before[0])
    assert not torch.equal(now, later)


def test_nearest_states_have_no_count_of_their_own():
    optimizer = CompressedOptimizer(torch.optim.SGD(weights(), lr=0.1, momentum=0.9))
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all(set(state) == {"momentum_buffer"} for state in optimizer.state.values())


def test_the_configs_seed_is_used_and_unwrap_leaves_nothing_behind():
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(0)
        model = torch.nn.Linear(80, 80)
        plain = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        rule = {"state": "momentum_buffer", "compressor": "B128/DE+SR"}
        cfg = {"preset": "exact", "seed": seed, "optim": {"rules": [rule]}}
        model, optimizer = memtrain.wrap(model, plain, cfg)
        model(torch.ones(3, 80)).square().mean().backward()
        optimizer.step()
        results.append(codes(optimizer)[0])
        _, restored = memtrain.unwrap(model, optimizer)
        assert all(set(state) == {"momentum_buffer"} for state in restored.state.values())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("scale", [1e-6, 1e-3])  # float16: subnormal, normal
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_momentum_is_as_long_as_its_gradients_make_it(dtype, scale):
    """1.2% shorter: -1 is no value of the map, and -0.95 times the scale becomes -0.8875 of it."""
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(256, 512, generator=generator).to(dtype))
    mean = torch.randn(256, 512, generator=generator) * scale
    optimizer, exact = AdamW4bit([param], first="B128/DE+SR"), torch.zeros(256, 512)
    along, whole = 0.0, 0.0
    for step in range(40):
        noise = torch.randn(256, 512, generator=generator) * scale
        param.grad = (mean + noise).to(dtype)
        exact += 0.1 * (param.grad.float() - exact)
        optimizer.step()
        if step >= 20:
            ours = optimizer.unpacked(param, torch.float32)["exp_avg"]
            along, whole = along + (ours * exact).sum(), whole + exact.square().sum()
    assert -0.016 < along / whole - 1 < -0.008


@pytest.mark.parametrize("make", [sgd, adam])
def test_each_parameter_has_its_own_bits_where_gradients_are_released(make):
    optimizer = ReleaseGradients(make(params := weights(), seed=1))
    for param in params:
        (param * torch.linspace(0.1, 1.0, 5000).view(100, 50)).sum().backward()
    optimizer.step()
    found = codes(optimizer)
    assert not any(equal(found[: len(found) // 2], found[len(found) // 2 :]))
