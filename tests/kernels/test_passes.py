"""A step of fake tensors for CUDA allocates what the Triton step does between its kernels."""

from itertools import accumulate

import pytest
import torch
from torch import nn

from memtrain.audit.peak.recorder import StorageRecorder
from memtrain.kernels.dispatch import backend, simulating
from tests.kernels.forms import FORMS, entry_of
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
WITHOUT_VECTORS = ("exact", "4 bits", "4 bits, stochastic", "8 bits", "lion", "sgd", "no state")


@pytest.mark.parametrize("form", FORMS)
def test_a_simulated_step_holds_what_the_launches_do(form, unlaunched):
    given = entries(form)
    with backend("triton"):
        fused_step(given)  # tables of programs are made at the first call
        real = held(lambda: fused_step(given))
    with simulating("cuda"):
        assert held(lambda: fused_step(given)) == real
    assert (real[0] == 0) == (form in WITHOUT_VECTORS)
    with simulating():
        assert held(lambda: fused_step(given)) == (0, 0)
        turned = [e._replace(grad=e.grad.mT.contiguous().mT) for e in given]
        assert held(lambda: fused_step(turned))[0] == sum(e.grad.nbytes for e in given)
