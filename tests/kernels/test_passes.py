"""A step of fake tensors for CUDA allocates what the Triton step does between its kernels."""

from itertools import accumulate

import pytest
import torch
from torch import nn

from memtrain.audit.peak.recorder import StorageRecorder
from memtrain.kernels.dispatch import backend, simulating
from memtrain.kernels.step.prepared import PreparedSteps
from memtrain.kernels.step.update_rules import COUNT, on_device
from tests.kernels.forms import FORMS, entry_of
from tests.kernels.kept_steps import step_kept
from tests.kernels.steps import fused_step

TABLE = torch.zeros(2**12, dtype=torch.int64)


def held(run):
    """The most bytes alive besides what was there, and those in the end."""
    recorder = StorageRecorder(nn.Identity())
    with recorder:
        run()
    alive = [*accumulate(delta for _, delta, _, _ in recorder.events)] or [0]
    return max(alive), alive[-1]


@pytest.fixture
def unlaunched(monkeypatch):
    """No kernel is run, and no table travels: what torch allocates does not depend on them."""
    pytest.importorskip("triton")
    from memtrain.kernels.step import launch

    monkeypatch.setattr(launch, "launch", lambda *given, **options: None)
    monkeypatch.setattr(launch, "new_table", lambda size, device: 2 * (TABLE[:size],))
    monkeypatch.setattr(launch, "send", lambda numbers, to: None)
    return launch


def entries(form):
    return [entry_of(form, kept, shape) for kept in ("bf16", "float32") for shape in SHAPES[form]]


SHAPES = {form: [(320, 256), (64, 640)] for form in FORMS}
SHAPES["rank-1"] = [(320, 256), (8, 16, 32)]


@pytest.mark.parametrize("form", FORMS)
def test_a_simulated_step_holds_what_the_launches_do(form, unlaunched):
    given = entries(form)
    with backend("triton"):
        fused_step(given)  # tables of programs are made at the first call
        real = held(lambda: fused_step(given))
    with simulating("cuda"):
        assert held(lambda: fused_step(given)) == real
    assert (real[0] > 0) == (form in ("rank-1", "factored", "8 bits, factored", "2 bits"))
    with simulating():
        assert held(lambda: fused_step(given)) == (0, 0)
        turned = [e._replace(grad=e.grad.mT.contiguous().mT) for e in given]
        assert held(lambda: fused_step(turned))[0] == sum(e.grad.nbytes for e in given)


@pytest.mark.parametrize("form", ["4 bits", "rank-1", "factored", "2 bits"])
def test_the_vectors_of_a_step_that_a_graph_may_capture_stay(form, unlaunched, monkeypatch):
    given = entries(form)
    rows = on_device(given[0].scalars, len(given), torch.device("cpu"))
    given = [e._replace(scalars=row) for e, row in zip(given, rows, strict=True)]
    sent = torch.zeros(len(given) // 2, COUNT)
    monkeypatch.setattr(unlaunched.table_triton, "point", lambda *given: None)
    monkeypatch.setattr(unlaunched, "stacked", lambda scalars, device: sent)

    def stepped(steps):
        step_kept(given, steps)
        step_kept(given, steps)

    kept = PreparedSteps(), PreparedSteps()
    with backend("triton"):
        fused_step(given)  # the tables of programs
        real = held(lambda: stepped(kept[0]))
    with simulating("cuda"):
        assert held(lambda: stepped(kept[1])) == real
    assert (real[1] > 0) == (form != "4 bits")
