"""Checkpoints that 0.1 wrote before its modules were sorted load, and hold what they held.

`tests/data/checkpoints_0_1.pt` has, for each case, the state of the model, of the optimizer and of
what `wrap` adds, and a hash of the optimizer's states as plain float32, all as 0.1 wrote them after
three steps.
"""

import hashlib
from pathlib import Path

import pytest
import torch
from torch import nn

import memtrain
from memtrain import optim
from memtrain.optim.states import in_groups

FILE = Path(__file__).parent / "data" / "checkpoints_0_1.pt"
OPTIMIZERS = {
    "AdamW4bit": lambda p: optim.AdamW4bit(p, lr=1e-2),
    "AdamW4bitFactor": lambda p: optim.AdamW4bitFactor(p, lr=1e-2),
    "AdamW8bit": lambda p: optim.AdamW8bit(p, lr=1e-2),
    "AdamW8bitFactor": lambda p: optim.AdamW8bitFactor(p, lr=1e-2),
    "SGD4bit": lambda p: optim.SGD4bit(p, lr=1e-2, momentum=0.9),
    "SGD8bit": lambda p: optim.SGD8bit(p, lr=1e-2, momentum=0.9),
    "Lion4bit": lambda p: optim.Lion4bit(p, lr=1e-3),
    "Lion8bit": lambda p: optim.Lion8bit(p, lr=1e-3),
    "RMSprop": lambda p: optim.compress(torch.optim.RMSprop(p, lr=1e-3)),
}
CONFIGS = {
    "all_four": ["preset=all_four"],
    "stochastic": ["preset=optimizer_only", "optim.rules.0.compressor=B128/DE-0+SR"],
    "accumulated": ["preset=all_four", "release.accumulate=2"],
    "low_precision": ["preset=precision_only", "precision=size_ordered"],
    "automatic_bits": ["preset=actnn_l3"],
}
CASES = [*OPTIMIZERS, *CONFIGS]
UNPORTABLE = ("all_four", "accumulated")  # the optimizers around are none that hold states
WITH_ZERO = ("stochastic",)  # code 0 of a second moment was 0 (B128/DE)


def made(case):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 64), nn.GELU(), nn.Linear(64, 8))
    if case in OPTIMIZERS:
        return model, OPTIMIZERS[case](model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return memtrain.wrap(model, optimizer, CONFIGS[case])


def train(model, optimizer, steps):
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(32, 80)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def flat(value, path=()):
    """Every leaf of a nested state with its path."""
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in flat(inner, (*path, key))]
    if isinstance(value, list | tuple):
        return [leaf for i, inner in enumerate(value) for leaf in flat(inner, (*path, i))]
    return [(path, value)]


def plain_hash(optimizer):
    """Of the states that a plain optimizer would load."""
    state = optim.portable_state_dict(optimizer)["state"]
    tensors = [value for _, value in flat(state) if isinstance(value, torch.Tensor)]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


def as_before(saved):
    """A checkpoint as 0.1 laid it out: what is memtrain's own by itself."""
    own = in_groups.found(saved)
    own.pop("model", None)
    found = {**in_groups.unmarked(in_groups.without(saved)), "memtrain": saved.get("memtrain", {})}
    for group in found["param_groups"]:
        group.pop("memtrain", None)
    if "weights" in own:
        states = saved["state"].items()
        own["weights"]["corrections"] = {i: s["weight_correction"] for i, s in states}
    if own:
        found["memtrain"] = {**found["memtrain"], **own, "format": 1}
    return found


def assert_same(found, expected):
    found, expected = dict(flat(found)), dict(flat(expected))
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[path].dtype == value.dtype, path
            assert torch.equal(found[path], value), path
        else:
            assert found[path] == value, path


@pytest.fixture(scope="module")
def old():
    return torch.load(FILE, weights_only=True)


@pytest.mark.parametrize("case", CASES)
def test_it_loads_and_holds_the_same(old, case):
    model, optimizer = made(case)
    train(model, optimizer, 1)  # something else to overwrite
    model.load_state_dict(old[case]["model"])
    optimizer.load_state_dict(old[case]["optimizer"])
    if case in CONFIGS:
        memtrain.load_state_dict(model, old[case]["memtrain"])
        assert_same(memtrain.state_dict(model), old[case]["memtrain"])
    assert_same(as_before(optimizer.state_dict()), old[case]["optimizer"])
    if case not in (*UNPORTABLE, *WITH_ZERO):
        assert plain_hash(optimizer) == old[case]["plain_hash"]
    train(model, optimizer, 2)


@pytest.mark.parametrize("case", CASES)
def test_the_same_run_writes_the_same_layout(old, case):
    model, optimizer = made(case)
    train(model, optimizer, 3)
    found = dict(flat(as_before(optimizer.state_dict())))
    expected = dict(flat(old[case]["optimizer"]))
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert (found[path].shape, found[path].dtype) == (value.shape, value.dtype), path
