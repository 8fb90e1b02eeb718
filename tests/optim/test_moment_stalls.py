"""The share of moments' elements that keep nothing of an update, by hand and in every optimizer."""

import pytest
import torch

import memtrain
from memtrain.audit.live_storages import storage_nbytes
from memtrain.audit.live_tensors import state_tensors
from memtrain.compressors.base import Key
from memtrain.compressors.codebook import Block
from memtrain.optim import AdamW4bit, CompressedOptimizer, Lion4bit, SGD8bit, stalled_moments
from memtrain.optim.states.moment_stalls import MomentStalls, sample

THIRDS = Block(block_size=8, map="Linear", bits=2)
"""Its values are -1, -1/3, 1/3 and 1, times the largest of the block."""


def shares(old, exact):
    """The shares of one block that was `old` and is to be `exact`."""
    stored = dict(THIRDS.compress(old, key=Key()).tensors)
    seen = sample("m", THIRDS, stored, torch.zeros(8))
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
    inner = memtrain.optim.state_report.innermost(optimizer)
    assert len(inner.stalls._found) == 2
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
