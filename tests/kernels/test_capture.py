"""Steps whose numbers are on the device: equal to those of the host, over kept tables."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace as Step

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain.kernels.dispatch import backend
from memtrain.kernels.step import cuda_graph, launch, prepared, update_rules
from memtrain.kernels.step.prepared import PreparedSteps
from memtrain.kernels.step.table_triton import point
from memtrain.optim import AdamW4bit
from memtrain.optim.fused import capturable
from tests.kernels import test_adamw, test_blockstep, test_entries
from tests.kernels.kept_steps import step_kept
from tests.kernels.steps import fused_step

CPU = torch.device("cpu")


class NoHost(TorchDispatchMode):
    """Raises where a value is read on the host, or a tensor is made of host memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::_local_scalar_dense", "aten::lift_fresh"):
            raise AssertionError(f"{func} inside a step that a graph captures")
        return func(*args, **(kwargs or {}))


LR, BETAS = 1e-2, (0.9, 0.999)


def test_addresses_are_those_of_the_tensors():
    tensors = [torch.randn(k + 1) for k in range(19)]
    table = torch.zeros(19, 3, dtype=torch.int64)
    point(table, 1, tensors)
    assert table[:, 1].tolist() == [x.data_ptr() for x in tensors]
    assert not table[:, [0, 2]].any()


def test_numbers_of_the_device_are_those_of_the_host():
    options = {"betas": BETAS, "eps": 1e-8, "weight_decay": 0.1}
    steps = torch.arange(1, 200).double()
    for more in ({}, {"decoupled": False, "maximize": True}):
        lr = torch.tensor(LR).double()
        given = update_rules.adamw(steps, lr=lr, **options, **more)
        rows = update_rules.on_device(given, len(steps), CPU)
        want = [update_rules.adamw(t, lr=lr.item(), **options, **more) for t in range(1, 200)]
        assert torch.equal(rows[:, : len(want[0])].float(), torch.tensor(want))
    lion = update_rules.lion(lr=torch.tensor([LR]).double(), betas=BETAS, weight_decay=0.1)
    want = update_rules.lion(lr=torch.tensor(LR).item(), betas=BETAS, weight_decay=0.1)
    rows = update_rules.on_device(lion, 2, CPU)[:, : len(want)]
    assert torch.equal(rows.float(), torch.tensor([want, want]))


def of_step(entry, step, on_device):
    """The entry with the scalars of a step."""
    given = entry.scalars
    if entry.rule == "adamw":
        t = torch.tensor([step]).double() if on_device else step
        given = update_rules.adamw(t, lr=LR, betas=BETAS, eps=1e-8, weight_decay=0.1)
    row = update_rules.on_device(given, 1, entry.param.device)[0] if on_device else given
    return entry._replace(scalars=row)


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("kind", [*test_adamw.CODECS, "adamw", "sgd", "lion"])
def test_steps_equal_those_with_numbers_of_the_host(kind, name, monkeypatch):
    shape = (3, 5, 7) if kind == "rank1" else (9, 21)
    if kind in test_adamw.CODECS:
        start = test_adamw.entry(shape, kind, None)
    else:
        start = test_blockstep.entry(shape, kind, 8, weight_decay=0.1)
    here, there, tables = copy.deepcopy(start), copy.deepcopy(start), PreparedSteps()
    with backend(name):
        for step in range(1, 3 if name == "triton" else 4):
            grad = torch.randn(shape)  # at another address each time
            here = here._replace(grad=grad)
            there = there._replace(grad=grad.clone())
            fused_step([of_step(here, step, on_device=False)])
            entries = [of_step(there, step, on_device=True)]
            with NoHost() if name == "triton" and step > 1 else nullcontext():
                step_kept(entries, tables)
            monkeypatch.setattr(cuda_graph, "capturing", lambda: True)  # from the second step on
    assert torch.equal(here.param, there.param)
    for mine, theirs in zip(here.states, there.states, strict=True):
        assert all(torch.equal(mine[part], theirs[part]) for part in mine)


def test_a_capture_makes_no_tables(monkeypatch):
    entry = of_step(test_adamw.entry((5, 7), "block", None), 1, on_device=True)
    start, tables = entry.param.clone(), PreparedSteps()
    monkeypatch.setattr(cuda_graph, "capturing", lambda: True)
    with backend("triton"), pytest.raises(RuntimeError, match="make a step with a gradient"):
        step_kept([entry], tables)
    assert torch.equal(entry.param, start)


def test_captured_steps_stay_and_others_are_few(monkeypatch):
    steps, inside = PreparedSteps(), [False]
    monkeypatch.setattr(cuda_graph, "capturing", lambda: inside[0])
    captured, other = Step(captured=False), Step(captured=False)
    steps.keep(1, "captured", captured)
    steps.keep(2, "other", other)
    inside[0] = True
    assert steps.find(1, "captured") is captured
    inside[0] = False
    for k in range(2 * prepared.LIMIT):
        steps.keep(1, k, Step(captured=False))
    assert steps.find(1, "captured") is captured
    assert steps.find(1, 2 * prepared.LIMIT - 1) is not None
    assert steps.find(1, 0) is None
    assert steps.find(2, "other") is other  # of other parameters
    monkeypatch.setattr(prepared, "MOST", 16)
    for k in range(16):  # parameters that were replaced, say
        steps.keep(10 + k, "more", Step(captured=False))
    assert steps.find(2, "other") is None
    assert steps.find(1, "captured") is captured


def test_a_step_of_many_kinds_is_captured_as_it_was_made(monkeypatch):
    monkeypatch.setattr(capturable, "DEVICES", ("cpu", "cuda"))
    made, make = [], launch.TritonGroup.__init__
    monkeypatch.setattr(launch.TritonGroup, "step", lambda self, inputs: None)
    monkeypatch.setattr(
        launch.TritonGroup, "__init__", lambda self, *args: made.append(1) or make(self, *args)
    )
    shapes = [(128, 128), (127, 65), (8192,), (8193,), (128,), (7,)]
    dtypes = torch.bfloat16, torch.float32
    params = [nn.Parameter(torch.randn(s, dtype=dtype)) for dtype in dtypes for s in shapes]
    optimizer = AdamW4bit(params, lr=torch.tensor(1e-3), capturable=True)
    counts = []
    with backend("triton"):
        for _ in range(3):
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
            counts.append(len(made))
        assert counts[0] == counts[1] == counts[2] > prepared.LIMIT
        monkeypatch.setattr(cuda_graph, "capturing", lambda: True)
        optimizer.step()


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_a_tick_draws_other_bits(name):
    tick = torch.zeros((), dtype=torch.int64)
    results = []
    for count, of_host in ((0, 6), (3, 5), (3, 5)):  # 6 ^ 0 = 6, 6 ^ 3 = 5
        tick.fill_(count)
        torch.manual_seed(1)
        entry = test_blockstep.entry((40, 20), "sgd", 32)
        drawn = test_entries.halved(entry, "bf16+sr", 6)
        with_tick = drawn._replace(master=drawn.master._replace(tick=tick))
        by_host = copy.deepcopy(drawn)._replace(master=drawn.master._replace(seed=of_host))
        with backend(name):
            fused_step([with_tick, by_host])
        assert torch.equal(with_tick.param, by_host.param)
        results.append(with_tick.param.detach().clone())
    assert not torch.equal(results[0], results[1])
    assert torch.equal(results[1], results[2])
