"""Saves that are expected, so that no one watches the ops: as if each had been watched."""

import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memtrain.activations.intercept.executor import Executor
from memtrain.activations.intercept.hooks import Interception
from memtrain.activations.intercept.options import Options
from memtrain.activations.saved import expected
from memtrain.activations.saved.op_names import calls
from memtrain.activations.saved.origin import storage_id
from memtrain.audit.live_storages import saved_nbytes
from memtrain.compressors import Group


def attached(model, bits=4):
    interception = Interception(
        model,
        lambda site: Group(bits=bits),
        options=Options(min_elements=64),
        seed=0,
        on_saved=lambda records: None,
    )
    interception.attach()
    return interception


def instruction(run):
    """Code and instruction of the last call that `run` makes of a torch function."""
    found = []

    class Where(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            frame = sys._getframe(1)
            found.append((frame.f_code, frame.f_lasti))
            return func(*args, **(kwargs or {}))

    x = torch.ones(4, 4)
    with Where():
        run(x)
    return found[-1]


class Own:
    def __init__(self):
        self.matmul = torch.matmul

    def of_torch(self, x):
        return torch.matmul(x, x)

    def method(self, x):
        return x.flip(0).matmul(x + 1)

    def operator(self, x):
        return x @ x

    def of_self(self, x):
        return self.matmul(x, x)

    def variable(self, x):
        matmul = torch.matmul
        return matmul(x, x)

    def power(self, x):
        return x**2


@pytest.mark.parametrize(
    ("name", "op", "known"),
    [
        ("of_torch", "matmul", True),
        ("of_torch", "mm", False),
        ("method", "matmul", True),
        ("operator", "matmul", True),
        ("of_self", "matmul", False),
        ("variable", "matmul", False),
        ("power", "square", False),
    ],
)
def test_ops_are_known_where_the_code_names_them(name, op, known):
    code, number = instruction(getattr(Own(), name))
    assert calls(code, number, op) is known


def test_ops_of_settled_modules_are_not_watched(monkeypatch):
    original: Any = Executor.__torch_function__
    seen: list[str] = []

    def watched(self, func, types, args=(), kwargs=None):
        seen.append(self.module)
        return original(self, func, types, args, kwargs)

    monkeypatch.setattr(Executor, "__torch_function__", watched)
    expected.BETWEEN.add(watched.__code__)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))
    attached(model)
    x = torch.randn(32, 16)
    for _ in range(3):
        seen.clear()
        model(x).sum().backward()
    assert set(seen) & {"0", "1", "2"} == {"1"}  # the norm is replaced
    seen.clear()
    model(torch.randn(48, 16)).sum().backward()  # calls of another form are
    assert {"0", "1", "2"} <= set(seen)


class Hidden(nn.Module):
    """Saves what a flag says that no argument tells."""

    def __init__(self):
        super().__init__()
        self.inner, self.exp = nn.Linear(16, 16), False

    def forward(self, x):
        x = self.inner(x)
        return torch.exp(x) if self.exp else torch.sin(x)


def test_an_unexpected_save_is_kept_and_its_module_watched_from_then_on():
    torch.manual_seed(0)
    model, x = Hidden(), torch.randn(32, 16)
    interception = attached(model)
    for _ in range(3):
        model(x).sum().backward()
    model.exp = True
    model.zero_grad()
    model(x).sum().backward()
    ours = [p.grad for p in model.parameters()]
    interception.detach()
    model.zero_grad()
    model(x).sum().backward()
    for one, other in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad, rtol=0, atol=0)
    assert "" in interception.saved.expectations._watched


class Noisy(nn.Module):
    """Reads its input, or what noise is added to, which no one else holds."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x, noise):
        return self.inner(x + noise if noise else x)


def test_what_was_an_input_once_is_compressed_when_it_is_none():
    model, x = Noisy(), torch.randn(128, 64)
    attached(model)
    # The same form of call, by all that is asked of it; at first what is unexpected is kept.
    for noise in (0.0, 0.0, 0.0, 0.1, 0.1):
        held, _ = saved_nbytes(lambda noise=noise: model(x, noise), exclude=[x])
    assert held < x.nbytes / 4


def test_an_exception_leaves_no_expectations():
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(32, 16)
    interception = attached(model)
    model(x).sum().backward()

    def fail(*_):
        raise ValueError("in between")

    handle = model[1].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in between"):
        model(x)
    handle.remove()
    assert not interception.saved.expectations._known
    model(x).sum().backward()
    assert interception.saved.expectations._known


class Averaging(nn.Module):
    """Replaces its buffer, and makes many tensors as large: has one taken the buffer's number?"""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(32, 16))

    def forward(self, x):
        number, self.before = storage_id(self.mean), weakref.ref(self.mean)
        self.mean = self.mean / 2
        many = [self.linear(x) for _ in range(64)]
        self.taken = number in map(storage_id, many)
        return torch.stack(many).tanh()


def test_a_buffer_that_is_replaced_keeps_its_number_to_the_end():
    model, x = Averaging(), torch.randn(32, 16)
    attached(model)
    for _ in range(3):
        model(x).sum().backward()
        assert not model.taken
        assert model.before() is None
