"""Steps of parameters that are not contiguous: copies, one at a time, to the same bits.

A step of fake tensors for CUDA allocates what the Triton step does between its kernels.
"""

import copy
import math
from itertools import accumulate

import pytest
import torch
from torch import nn

from memtrain.audit.peak.recorder import StorageRecorder
from memtrain.kernels.dispatch import backend, simulating
from memtrain.kernels.step.prepared import PreparedStep
from tests.kernels.forms import FORMS, entry_of, tensors
from tests.kernels.steps import fused_step

SHAPES = [(32, 16, 3, 3), (64, 24, 2, 2)]
KEPT = {"float32": 4 + 4, "bf16+8": 2 + 2 + 1}
"""How weights are kept -> bytes an element of the weight, its gradient and its correction."""


def last(x):
    return x.contiguous(memory_format=torch.channels_last)


def channels_last(entry):
    master = entry.master
    if master.correction is not None:
        master = master._replace(correction=last(master.correction))
    return entry._replace(param=last(entry.param), grad=last(entry.grad), master=master)


def entries(form):
    return [entry_of(form, kept, shape) for kept in KEPT for shape in SHAPES]


def check(straight, name):
    turned = [channels_last(entry) for entry in copy.deepcopy(straight)]
    with backend(name):
        fused_step(straight)
        fused_step(turned)
    for one, other in zip(straight, turned, strict=True):
        assert other.param.is_contiguous(memory_format=torch.channels_last)
        assert all(map(torch.equal, tensors(one), tensors(other)))


@pytest.mark.parametrize("form", FORMS)
def test_channels_last_weights_are_stepped_as_contiguous_ones(form):
    check(entries(form), "cpu")


@pytest.mark.parametrize(
    "form",
    [
        form if form == "factored" else pytest.param(form, marks=pytest.mark.nightly)
        for form in FORMS
    ],
)
def test_triton_steps_them_so_too(form):
    check([entry_of(form, "bf16+8", (16, 8, 3, 3))], "triton")


@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_a_guard_that_is_not_finite_leaves_them_as_they_are(name):
    guard = torch.tensor(math.inf)
    entry = channels_last(entry_of("factored", "bf16+8", (16, 8, 3, 3)))._replace(guard=guard)
    before = copy.deepcopy(tensors(entry))
    with backend(name):
        assert len(PreparedStep([entry])._copied) == (
            name == "triton"
        )  # without a wait of the host
        fused_step([entry])
        assert all(map(torch.equal, tensors(entry), before))
        guard.fill_(1.0)
        fused_step([entry])
    assert not torch.equal(entry.param, before[0])


@pytest.mark.parametrize("form", FORMS)
def test_a_step_holds_the_copies_of_one_parameter(form):
    given = [channels_last(entry) for entry in entries(form)]
    most = max(KEPT[kept] * torch.Size(shape).numel() for kept in KEPT for shape in SHAPES)
    fused_step(given)  # codebooks are made at the first call
    real, left = held(lambda: fused_step(given))
    assert (left, most <= real <= most + 64) == (0, True)  # scalars, too
    with simulating():
        assert held(lambda: fused_step(given)) == (most, 0)


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


WHOLE = {form: [(320, 256), (64, 640)] for form in FORMS}
WHOLE["rank-1"] = [(320, 256), (8, 16, 32)]
WITHOUT_VECTORS = ("exact", "4 bits", "4 bits, stochastic", "8 bits", "lion", "sgd", "no state")


@pytest.mark.parametrize("form", FORMS)
def test_a_simulated_step_of_contiguous_ones_holds_what_the_launches_do(form, unlaunched):
    given = [entry_of(form, kept, shape) for kept in ("bf16", "float32") for shape in WHOLE[form]]
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


@pytest.mark.parametrize("form", FORMS)
def test_a_simulated_step_holds_what_the_launches_do(form, unlaunched):
    given = [channels_last(entry) for entry in entries(form)]
    with backend("triton"):
        fused_step(given)  # tables of programs are made at the first call
        real = held(lambda: fused_step(given))
    with simulating("cuda"):
        assert held(lambda: fused_step(given)) == real


def launches(monkeypatch, given):
    """Names and grids of the kernels that a step launches; none is executed."""
    launch, taken = pytest.importorskip("memtrain.kernels.step.launch"), []
    monkeypatch.setattr(
        launch,
        "launch",
        lambda kernel, grid, *_, **options: taken.append((kernel.fn.__name__, grid)),
    )
    with backend("triton"):
        fused_step(given)
    return taken


def test_small_weights_that_are_copied_share_launches(monkeypatch):
    shapes = [(64, 64, 3, 3), *3 * [(16, 64, 3, 3)]]
    given = [channels_last(entry_of("factored", "float32", shape)) for shape in shapes]
    assert len(launches(monkeypatch, given)) == 2 * 4


def test_the_sums_of_a_tall_matrix_are_spread_over_programs(monkeypatch):
    given = [entry_of("factored", "float32", (2100, 256))]
    taken = dict(launches(monkeypatch, given))
    assert taken["_reduce_kernel"] == (9 * 2,)
    assert taken["_mean_kernel"] == (17 + 2,)
    assert taken["_ratio_kernel"] == (3,)


@pytest.mark.parametrize("form", ["factored", "2 bits"])
def test_triton_adds_up_a_tall_matrix(form):
    ours, theirs = (entry_of(form, "float32", (2100, 128)) for _ in range(2))
    with backend("triton"):
        fused_step([ours])
    with backend("reference"):
        fused_step([theirs])
    for name in ("row", "col"):
        torch.testing.assert_close(ours.states[1][name], theirs.states[1][name])
    torch.testing.assert_close(ours.param, theirs.param, rtol=1e-3, atol=1e-4)
