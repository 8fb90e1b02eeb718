import copy
import pickle

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from memtrain.compressors.fewbit import register as fewbit_register
from memtrain.compressors.fewbit.register import register, registered
from memtrain.compressors.fewbit.solver import table


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """A registry of its own."""
    monkeypatch.setattr(fewbit_register, "REGISTERED", {})


def swish(x):
    return x * torch.sigmoid(x)


class Spy(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_registered_function_gets_the_table_of_its_twin():
    mine = register(swish, bits=2)
    built_in = table("silu", 2)
    assert mine.name == mine.__name__ == "swish"
    assert fewbit_register.REGISTERED["swish"] is mine
    step = mine.table()
    assert np.allclose(step.boundaries, built_in.boundaries, rtol=0, atol=1e-6)
    assert np.allclose(step.levels, built_in.levels, rtol=0, atol=1e-6)
    assert step.error == pytest.approx(built_in.error, rel=1e-6)
    assert len(mine.table(4).levels) == 16


def test_calls_are_plain_outside_and_seen_inside():
    mine = register(swish)
    x = torch.randn(10)
    assert torch.equal(mine(x), swish(x))
    with Spy() as spy:
        y = mine(x)
    assert torch.equal(y, swish(x))
    assert spy.seen[0] is mine
    assert spy.seen[0].__name__ == "swish"


def test_it_solves_under_the_callers_modes():
    plain = register(swish).table()
    with Spy() as spy, FakeTensorMode(), torch.inference_mode(), torch.autocast("cpu"):
        mine = register(swish)
        assert mine.table() == plain
    assert spy.seen == []


def test_a_derivative_of_ones_own_is_what_is_approximated():
    def identity(x):
        return torch.ones_like(x)

    through = register(torch.round, "rounded", identity, bits=1)
    assert set(through.table().levels) == {1.0}
    steps = register(torch.round, "steps", bits=1)  # torch's own derivative of round is 0
    assert set(steps.table().levels) == {0.0}


def test_an_even_derivative_uses_both_halves():
    assert register(torch.tanh, "my_tanh").table(2).parity == "even"
    assert register(torch.tanh, "skew_tanh", interval=(-9.0, 10.0)).table(2).parity == "plain"


def test_a_later_function_takes_the_place_of_an_earlier_one_with_its_own_table():
    first = register(swish, "same")
    other = register(torch.sin, "same")
    assert fewbit_register.REGISTERED["same"] is other
    assert other.table() != first.table() == register(swish).table()


def test_it_is_a_decorator_and_survives_pickle_and_deepcopy():
    @register
    def bump(x):
        return torch.exp(-x * x)

    assert bump(torch.zeros(1)).item() == 1.0
    assert pickle.loads(pickle.dumps(bump)) is bump
    assert copy.deepcopy(bump) is bump
    data = pickle.dumps(bump)
    fewbit_register.REGISTERED.clear()
    with pytest.raises(ValueError, match="'bump' is not registered in this process"):
        pickle.loads(data)
    with pytest.raises(ValueError, match="'bump'"):
        registered("bump")


@pytest.mark.parametrize(
    ("fn", "arguments", "word"),
    [
        (lambda x: x, {}, "<lambda>"),
        (swish, {"name": "two words"}, "two words"),
        (swish, {"name": "gelu"}, "'gelu' is taken by a built-in"),
        (swish, {"bits": 0}, "bits 0"),
        (swish, {"interval": (1, 1)}, r"\(1, 1\)"),
        (swish, {"interval": (0, float("inf"))}, "inf"),
        (torch.sum, {"name": "total"}, "'total' gives .*float64"),
        (lambda x: x.float(), {"name": "narrow"}, "float32"),
        (lambda x: 1, {"name": "number"}, "gives int"),
        (lambda x: x.softmax(0), {"name": "soft"}, "not elementwise"),
        (torch.log, {"name": "logarithm"}, "not finite, the first at -10"),
        (torch.abs, {"name": "holed", "derivative": lambda x: x.abs() / x}, "derivatives .* at 0"),
    ],
)
def test_what_cannot_be_registered_is_named(fn, arguments, word):
    with pytest.raises(ValueError, match=word):
        register(fn, **arguments)
    assert fewbit_register.REGISTERED == {}


def test_what_is_no_function_is_a_type_error():
    with pytest.raises(TypeError, match="int"):
        register(3, "three")
