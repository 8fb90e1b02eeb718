"""The AdamW step of tensors in parts: all parts here, in one process, beside the whole."""

from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain.kernels.dispatch import backend
from memtrain.kernels.step import shard as shards
from memtrain.kernels.step import sharded, update_rules
from memtrain.kernels.step.codecs import ratio
from memtrain.kernels.step.shard import Shard
from memtrain.kernels.step.step import Entry
from tests.kernels.steps import fused_step
from tests.kernels.test_adamw import CODECS

STEPS = 3
HYPER = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}


def entry(param, kind, shard=None):
    """A parameter's entry before its first step."""
    shape = param.shape
    codecs = CODECS[kind]
    bits, size = codecs[0].bits, codecs[0].block
    blocks = -(-param.numel() // size)
    coded = {"codes": torch.zeros(blocks, size * bits // 8, dtype=torch.uint8)}
    first = {**coded, "scale": torch.zeros(blocks)}
    if kind == "rank1":
        second = {"codes": coded["codes"].clone(), "scale": torch.zeros(sum(shape))}
    else:
        second = {"row": torch.zeros(shape[0]), "col": torch.zeros(shape[1:].numel())}
    numbers = update_rules.adamw(1, **HYPER)
    return Entry(param, param, (first, second), codecs, "adamw", numbers, shard=shard)


def first(entry):
    return entry.codecs[0].decode(entry.states[0], entry.param.shape)


def second(entry):
    """The second moment, decoded."""
    codec, state = entry.codecs[1], entry.states[1]
    if codec.kind == "rank1":
        return codec.decode(state, entry.param.shape)
    row, col = state["row"], state["col"]
    mean = shards.mean_of(row, col, entry.shard or Shard(tuple(entry.param.shape), ()))
    return (ratio(row, col, mean).unsqueeze(1) * col).view(entry.param.shape)


def together(parts):
    """`shards.all_reduce` where all processes are here: each part's tensors stand in a row."""

    def all_reduce(pending, op):
        tensors = [tensor for _, tensor in pending]
        each = len(tensors) // parts
        for k in range(each):
            total = torch.stack(tensors[k::each])
            total = total.amax(0) if op == "max" else total.sum(0)
            for tensor in tensors[k::each]:
                tensor.copy_(total)

    return all_reduce


SPLITS = [
    ((6, 128), [4, 2], 0),
    ((5, 3, 35), [3, 2, 0], 0),
    ((9, 77), [4, 4, 1], 0),
    ((4, 256), [128, 128], 1),
    ((3, 6, 20), [5, 1], 1),
]
BY_KERNELS = SPLITS[:3]  # those split by rows


@pytest.mark.parametrize("kind", ["rank1", "factored", "factored8"])
@pytest.mark.parametrize(
    ("name", "shape", "cuts", "dim"),
    [
        *(("reference", *split) for split in SPLITS),
        ("triton", *BY_KERNELS[0]),
        *(pytest.param("triton", *s, marks=pytest.mark.nightly) for s in BY_KERNELS[1:]),
    ],
    ids=str,
)
def test_parts_equal_the_whole(shape, cuts, dim, kind, name, monkeypatch):
    monkeypatch.setattr(sharded, "all_reduce", together(len(cuts)))
    start = torch.randn(shape)
    place = Shard(shape, ((dim, "all"),))
    whole = entry(start.clone(), kind)
    parts = [entry(part.contiguous().clone(), kind, place) for part in start.split(cuts, dim)]
    rows = torch.randn(shape[0]).exp().view(-1, *[1] * (len(shape) - 1))
    for step in range(1, STEPS + 1):
        grad = torch.randn(shape) * rows
        # L2 decay reads the parameters, which later differ where blocks do.
        options = {"decoupled": False, "maximize": True} if step == 1 else {}
        numbers = update_rules.adamw(step, weight_decay=0.1, **HYPER, **options)
        grads = [part.contiguous() for part in grad.split(cuts, dim)]
        own = [p._replace(grad=g, scalars=numbers) for p, g in zip(parts, grads, strict=True)]
        with backend(name):
            fused_step([whole._replace(grad=grad, scalars=numbers)])
            fused_step(own)
    got = torch.cat([second(part) for part in parts], dim)
    # Sums in another order: one rounding for each term added, in the rows, the columns, the mean.
    terms = max(shape[0], start[0].numel())
    sums = 3 * terms * 2.0**-24 if kind != "rank1" else 0.0
    assert torch.allclose(got, second(whole), rtol=sums, atol=0)
    same_blocks = [(128,)] if kind == "factored8" else [(128,), (256,)]
    if shape[1:] in same_blocks:
        p, q = torch.cat([part.param for part in parts], dim), whole.param
        update = (q - start).abs().max()
        room = STEPS * ((4 * 2.0**-23 + sums) * update + 2.0**-23 * q.abs().max())
        assert (p - q).abs().max() <= room
        assert torch.equal(torch.cat([first(part) for part in parts], dim), first(whole))


def test_reductions_are_the_same_on_every_part(monkeypatch):
    """What `all_reduce` is handed: rank-1's maxima of all dimensions but the split one."""
    scale = torch.arange(9.0)
    shard = Shard((8, 3, 4), ((0, "a"), (2, "b")))
    pending = shards.of_maxima(scale, torch.Size((2, 3, 4)), shard)
    found = [(group, tensor.tolist()) for group, tensor in pending]
    assert found == [
        ("a", [2.0, 3.0, 4.0]), ("a", [5.0, 6.0, 7.0, 8.0]),
        ("b", [0.0, 1.0]), ("b", [2.0, 3.0, 4.0]),
    ]  # fmt: skip
    assert shards.of_sums("rows", "columns", shard) == [("a", "columns"), ("b", "rows")]


class Group(NamedTuple):
    """Stands in for a process group."""

    name: str
    _device_types = (torch.device("cpu"),)


def test_one_collective_a_group_and_nan_is_the_largest(monkeypatch):
    calls = []

    def fake(tensor, op=None, group=None):
        calls.append((group, tensor.tolist(), op))

    monkeypatch.setattr(torch.distributed, "all_reduce", fake)
    x, y = Group("x"), Group("y")
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])
    shards.all_reduce([(x, a), (x, b), (y, b)], "sum")
    assert [(group, values) for group, values, _ in calls] == [(x, [1.0, 2.0, 3.0]), (y, [3.0])]
    calls.clear()
    worst = torch.tensor([-torch.nan, torch.inf, 0.0])
    shards.all_reduce([(x, worst)], "max")
    ((_, (nan, inf, zero), _),) = calls
    assert nan > inf > zero == 0  # as integers
    assert worst[0].isnan()
    shards.all_reduce([], "max")
    assert len(calls) == 1


class Waits(TorchDispatchMode):
    """Refuses what makes the host wait for a tensor's value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["rank1", "factored"])
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_a_guard_that_is_not_finite_refuses_parts_without_a_wait(name, kind, monkeypatch):
    """A gradient with Inf, in one part: its whole parameter and its states stay as they were."""
    monkeypatch.setattr(sharded, "all_reduce", together(2))

    def made():
        parts = torch.ones(6, 128).split([4, 2])
        return [entry(part.clone(), kind, Shard((6, 128), ((0, None),))) for part in parts]

    def step(entries, bad):
        generator = torch.Generator().manual_seed(0)
        for k, one in enumerate(entries):
            grad = torch.randn(one.param.shape, generator=generator)
            grad[0, 5] += torch.inf if bad and k else 0.0
            entries[k] = one._replace(grad=grad, guard=torch.tensor(torch.inf if bad else 1.0))
        with Waits():
            sharded.step(entries)
        tensors = [t for one in entries for state in one.states for t in state.values()]
        return [t.clone() for t in (*[one.param for one in entries], *tensors)]

    with backend(name):
        ours, theirs = made(), made()
        first = step(ours, bad=False)
        assert all(map(torch.equal, first, step(ours, bad=True)))
        step(theirs, bad=False)
        assert all(map(torch.equal, step(ours, bad=False), step(theirs, bad=False)))
        assert not torch.equal(first[0], ours[0].param)
