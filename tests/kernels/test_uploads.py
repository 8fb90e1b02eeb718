"""Tables of steps on their way to a device that works later than the host asks."""

import copy
from collections import deque
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain.kernels.copies_to_host import AT_ONCE, StreamedCopies
from memtrain.kernels.dispatch import backend
from memtrain.kernels.step import launch, prepared, update_rules
from memtrain.kernels.step.groups import inputs_of
from memtrain.kernels.step.prepared import PreparedStep, PreparedSteps
from memtrain.optim.fused.step_tensors import tensors_of
from memtrain.optim.states.targets import Target
from tests.kernels.test_blockstep import entry


class Late(TorchDispatchMode):
    """A device far behind its host: copies and kernels queue up, and run when the host is done.

    A copy to a table that does not begin in pinned memory would wait for the queue.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.queue, self.kept = [], []
        monkeypatch.setattr(launch, "sendable", self.sendable)
        real = launch.launch
        monkeypatch.setattr(
            launch,
            "launch",
            lambda *given, **more: self.queue.append(partial(real, *given, **more)),
        )

    def sendable(self, numbers, device):
        self.kept.append(numbers.clone())  # as PyTorch's allocator of pinned memory does
        return self.kept[-1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = kwargs or {}
        if func is torch.ops.aten.copy_.default and any(args[1] is x for x in self.kept):
            assert (args[2:] or (given["non_blocking"],)) == (True,)
            self.queue.append(partial(func, *args))
            return args[0]
        return func(*args, **given)

    def run(self):
        for work in self.queue:
            work()


def signature_of(entries):
    parts = [({}, [Target(e.param, e.grad, e.guard, e.master)]) for e in entries]
    states = {e.param: dict(enumerate(e.states)) for e in entries}
    return tensors_of(parts, [tuple(states[e.param]) for e in entries], states)[0]


def step_kept(entries, steps):
    """One step, as the fused optimizers make it."""
    key = signature_of(entries)
    known = steps.find(key)
    if known is not None:
        known.run(inputs_of(entries))
        return
    made = PreparedStep(entries)
    made.run()
    if made.lasting:
        steps.keep(key, made)


def three_steps(entries, tables):
    """The learning rate and the addresses of gradients change from step to step."""
    for step in range(1, 4):
        scalars = update_rules.sgd(lr=0.1 / step, momentum=0.9)
        grads = [entry.grad.clone() * step for entry in entries]
        now = zip(entries, grads, strict=True)
        yield step_kept([e._replace(scalars=scalars, grad=g) for e, g in now], tables), grads


def both(make):
    """The entries after three steps on a device that is behind, and on one that is not."""
    torch.manual_seed(0)
    entries = [entry((40,), "sgd", 32), entry((3, 5), "sgd", 32)]
    launch.programs.cache_clear()
    late, soon = copy.deepcopy(entries), copy.deepcopy(entries)
    with backend("triton"):
        [*three_steps(soon, PreparedSteps())]
        device = make()
        with device:
            held = [*three_steps(late, PreparedSteps())]  # gradients that kernels will read
        assert all(torch.equal(a.param, b.param) for a, b in zip(late, entries, strict=True))
        device.run()
        del held
    return late, soon


def test_a_host_that_runs_ahead_spoils_no_table(monkeypatch):
    late, soon = both(lambda: Late(monkeypatch))
    assert all(torch.equal(a.param, b.param) for a, b in zip(late, soon, strict=True))


def test_what_launches_of_any_stream_find_is_there_at_once(monkeypatch):
    launch.programs.cache_clear()
    device = Late(monkeypatch)
    with device:
        found = launch.programs((1, 2), torch.device("cpu")).tolist()
    device.run()
    assert found == [[0, 0], [1, 0], [1, 1]]


@pytest.fixture
def device(monkeypatch):
    device = Late(monkeypatch)
    monkeypatch.setattr(launch, "programs", lambda counts, device: torch.empty(sum(counts), 2))
    return device


def test_tables_are_bounded(device, monkeypatch):
    made, make = [], launch.new_table
    monkeypatch.setattr(launch, "new_table", lambda *given: made.append(1) or make(*given))
    monkeypatch.setattr(prepared, "MOST", 3)
    tables = PreparedSteps()
    entries = [entry((k,), "sgd", 32) for k in range(1, 6)]
    with backend("triton"), device:
        for one in [*entries, entries[-1], entries[0]]:
            step_kept([one], tables)
    assert len(made) == 6  # the last one was there, the first no more
    assert len(tables) == 3


class Raced(deque):
    """Another thread gives all away, between a look and what follows it."""

    def __len__(self):
        seen = super().__len__()
        self.clear()
        return seen


def in_flight(kept=deque):
    waited, held = [], StreamedCopies.__new__(StreamedCopies)
    stream = SimpleNamespace(wait_event=waited.append)
    held._kept = kept((stream, copied, object()) for copied in range(AT_ONCE))
    return held, waited


def test_a_stream_waits_for_each_copy_in_order():
    held, waited = in_flight()
    held.clear()
    held.clear()
    assert waited == [*range(AT_ONCE)]


def test_what_another_thread_gives_away_meanwhile_is_passed_over():
    held, waited = in_flight(Raced)
    held.clear()
    assert waited == []
