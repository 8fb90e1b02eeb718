"""The share of moments' elements that keep nothing of an update, by hand and in every optimizer."""

from contextlib import nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode

import memtrain
from memtrain.audit.live_storages import storage_nbytes
from memtrain.audit.live_tensors import state_tensors
from memtrain.compressors.base import Key
from memtrain.compressors.codebook import Block
from memtrain.kernels.dispatch import backend
from memtrain.kernels.step import cuda_graph
from memtrain.optim import AdamW4bit, CompressedOptimizer, Lion4bit, SGD8bit, stalled_moments
from memtrain.optim.fused import capturable
from memtrain.optim.states import moment_stalls
from memtrain.optim.states.moment_stalls import MomentStalls, sample
from memtrain.optim.states.optimizer_hooks import innermost

THIRDS = Block(block_size=8, map="Linear", bits=2)
"""Its values are -1, -1/3, 1/3 and 1, times the largest of the block."""


def shares(old, exact):
    """The shares of one block that was `old` and is to be `exact`."""
    stored = dict(THIRDS.compress(old, key=Key()).tensors)
    seen = sample("m", THIRDS, stored, torch.zeros(8))
    assert seen is not None
    stalls = MomentStalls()
    stalls.add(seen, seen.of(exact), dict(THIRDS.compress(exact, key=Key()).tensors))
    return stalls.shares()


def test_an_update_below_half_a_step_of_the_grid_stalls():
    old = torch.tensor([3.0, -3, 1, 1, 1, 1, -1, -1])  # on the grid; its step is 2
    update = torch.tensor([0.0, 0, 0.9, -0.9, 1.1, -1.1, 0, 0.5])
    # Of five that are to move 1.9, 0.1 and -0.5 are rounded back to 1, 1 and -1;
    # 2.1 comes to 3 and -0.1 to -1.
    assert shares(old, old + update) == {"m": 3 / 5}


def test_values_that_follow_their_block_s_scale_have_not_stalled():
    old = torch.tensor([3.0, -3, 1, 1, 1, 1, -1, -1])
    assert shares(old, 0.9 * old) == {"m": 0.0}  # no code changes, and every value does
    largest = old * torch.tensor([0.9] + 7 * [1.0])  # -3 is the largest still
    assert shares(old, largest) == {"m": 1.0}


def test_what_is_not_to_move_is_not_counted():
    assert shares(torch.ones(8), torch.ones(8)) == {}


def in_blocks(params, **options):
    return CompressedOptimizer(torch.optim.AdamW(params, **options))


def momentum(params, lr):
    return SGD8bit(params, lr=lr, momentum=0.9)


@pytest.mark.parametrize(
    ("make", "name", "block"),
    [
        (AdamW4bit, "exp_avg", 128),
        (in_blocks, "exp_avg", 128),
        (Lion4bit, "exp_avg", 128),
        (momentum, "momentum_buffer", 256),
    ],
    ids=["fused", "any", "Lion", "SGD"],
)
def test_all_but_the_largest_stall_where_they_round_to_zero(make, name, block):
    weight = torch.nn.Parameter(torch.zeros(64, 256))
    optimizer = make([weight], lr=1e-3)
    grad = torch.full((64 * 256,), 1e-10)
    grad[::block] = 1.0
    for _ in range(8):
        assert stalled_moments(optimizer) == {}
        weight.grad = grad.view_as(weight).clone()
        optimizer.step()
    assert stalled_moments(optimizer)[name] == 1 - 1 / block


def test_the_fused_step_and_torch_s_own_tell_the_same():
    def made(make):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.zeros(64, 256))
        optimizer = make([weight], lr=1e-3)
        for _ in range(16):
            weight.grad = torch.randn_like(weight)
            optimizer.step()
        return stalled_moments(optimizer)["exp_avg"]

    fused, own = made(AdamW4bit), made(in_blocks)
    assert 0.1 < fused < 0.9
    assert abs(fused - own) <= 2 / 1024  # a value between two codes may round either way


def test_released_gradients_are_looked_at_as_a_whole():
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = memtrain.wrap(
        model, optimizer, ["preset=optimizer_only", "gradients=release"]
    )
    for _ in range(8):
        model(torch.randn(4, 128)).square().mean().backward()
        optimizer.step()
    inner = innermost(optimizer)
    ((_, moving),) = [sums.tolist() for sums in inner.stalls._sums.values()]
    assert 1.5 * 128 * 128 < moving <= 2 * 128 * 128  # both weights; their biases are not in blocks
    assert 0 < stalled_moments(optimizer)["exp_avg"] < 1


def test_what_was_found_takes_no_bytes_of_states():
    weight = torch.nn.Parameter(torch.zeros(64, 256))
    optimizer = AdamW4bit([weight])
    held = []
    for _ in range(9):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
        held.append(storage_nbytes(state_tensors(optimizer)))
    assert stalled_moments(optimizer)
    assert len(set(held[1:])) == 1


class NoRead(TorchFunctionMode):
    """Raises where the host reads a tensor: of a device it would wait for it."""

    reads = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in self.reads:
            raise AssertionError(f"{func} inside a step")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD8bit(p, lr=1e-3, momentum=0.9),
        lambda p: AdamW4bit(p, second="B128/Linear", capturable=True),
        lambda p: CompressedOptimizer(torch.optim.SGD(p, lr=1e-3, momentum=0.9)),
    ],
    ids=["SGD", "capturable", "any"],
)
def test_no_host_waits_for_what_a_device_counts(make, monkeypatch):
    monkeypatch.setattr(capturable, "DEVICES", ("cpu",))
    found = []
    for late in ((), ("cpu",)):  # CPU tensors stand for a device's
        monkeypatch.setattr(moment_stalls, "LATE", late)
        generator = torch.Generator().manual_seed(0)
        weights = [torch.nn.Parameter(torch.zeros(64, k)) for k in (256, 512)]
        optimizer = make(weights)
        for _ in range(16):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            with backend("reference"), NoRead() if late else nullcontext():
                optimizer.step()  # the C++ kernels' tables are read, in host memory
        found.append(stalled_moments(optimizer))
    assert found[0] == found[1]
    assert all(0 < share < 1 for share in found[0].values())


def test_steps_inside_a_capture_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(capturable, "DEVICES", ("cpu",))
    weight = torch.nn.Parameter(torch.zeros(64, 256))
    optimizer = AdamW4bit([weight], second="B128/Linear", capturable=True)
    for step in range(1, 18):
        weight.grad = torch.randn_like(weight)
        monkeypatch.setattr(cuda_graph, "capturing", lambda: step >= 10)  # noqa: B023
        optimizer.step()
        if step == 8:
            looked = stalled_moments(optimizer)
    assert looked.keys() == {"exp_avg", "exp_avg_sq"}
    assert stalled_moments(optimizer) == looked  # not step 16
