"""Fake results of ops, as real ones are: norms, losses, folds, grouped products."""

from itertools import product

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import memtrain
from memtrain.activations.trace.fake_results import RealResults
from memtrain.audit.peak.measure import measure
from memtrain.audit.peak.predict import predict
from memtrain.audit.peak.training_step import StepOptions

HALVES = (torch.bfloat16, torch.float16)


def check_predicted(*given):
    predicted, measured = predict(*given).peak, measure(*given).peak
    assert (predicted.phase, predicted.nbytes) == (measured.phase, measured.nbytes)


def batch(x, weight, running):
    mean = None if running is None else torch.zeros(8, dtype=running)
    var = None if running is None else torch.ones(8, dtype=running)
    return torch.native_batch_norm(x, weight, weight, mean, var, True, 0.1, 1e-5)


def group(x, weight, running):
    return torch.native_group_norm(x, weight, weight, 4, 8, 25, 2, 1e-5)


def layer(x, weight, running):
    return torch.native_layer_norm(x.transpose(1, 3).contiguous(), [8], weight, weight, 1e-5)


@pytest.mark.parametrize("norm", [batch, group, layer])
@pytest.mark.parametrize(
    ("own", "weights", "running"),
    [
        (own, weights, running)
        for own in HALVES
        for weights, running in product((own, torch.float32, None), repeat=2)
    ],
    ids=str,
)
def test_statistics_of_norms_have_their_dtype(norm, own, weights, running):
    def results():
        weight = None if weights is None else torch.ones(8, dtype=weights)
        return [
            (t.shape, t.dtype) for t in norm(torch.zeros(4, 8, 5, 5, dtype=own), weight, running)
        ]

    try:
        real = results()
    except RuntimeError:  # torch refuses these dtypes side by side
        pytest.skip("no such norm")
    with FakeTensorMode(), RealResults():
        assert results() == real


def test_a_network_of_batch_norms_under_autocast_peaks_where_it_is_said_to():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, options = torch.randn(4, 3, 32, 32), StepOptions(autocast=torch.bfloat16)
    given = model, optimizer, x, "balanced", options
    check_predicted(*given)


class Unfolds(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        x = nn.functional.unfold(self.first(x), 3, padding=1)
        return self.last(nn.functional.fold(x, (32, 32), 3, padding=1))


def test_what_fold_makes_has_the_memory_of_its_input():
    model = Unfolds()
    given = model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 4, 32, 32)
    for cfg in (None, "balanced"):
        check_predicted(*given, cfg)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "name", ["mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"]
)
def test_a_loss_has_the_memory_of_its_elements(name, reduction):
    def size(shape=(64, 32)):
        loss = getattr(nn.functional, name)
        return (
            loss(torch.full(shape, 0.5), torch.ones(shape), reduction=reduction)
            .untyped_storage()
            .nbytes()
        )

    shapes = (64, 32), (1, 1), ()
    real = [size(shape) for shape in shapes]
    with FakeTensorMode(), RealResults():
        assert [size(shape) for shape in shapes] == real


def test_a_step_with_a_loss_of_many_elements_is_predicted():
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1024))
    options = StepOptions(loss=lambda y: nn.functional.mse_loss(y, torch.zeros_like(y)))
    given = model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(256, 64)
    for cfg in (None, "balanced"):
        check_predicted(*given, cfg, options)


class Experts(nn.Module):
    """Eight experts, each for a run of rows: as mixtures of experts do with sorted tokens."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(8, 64, 96) / 8)
        self.down = nn.Parameter(torch.randn(8, 96, 64) / 8)

    def forward(self, x):
        ends = torch.arange(1, 9, dtype=torch.int32, device=x.device) * (len(x) // 8)
        hidden = nn.functional.silu(nn.functional.grouped_mm(x, self.up, offs=ends))
        return nn.functional.grouped_mm(hidden, self.down, offs=ends).square().mean()


def test_saved_tensors_and_peaks_are_predicted_as_they_are():
    model, x = nn.Sequential(nn.Linear(64, 64), Experts()), torch.randn(256, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    report = memtrain.audit(model, x, "balanced", optimizer=optimizer, peak=True, measure=True)
    predicted = memtrain.make_plan(model, optimizer, "balanced", batch=x).entries("activation")
    model, optimizer = memtrain.wrap(model, optimizer, "balanced")
    model(x).backward()
    assert predicted == memtrain.plan_of(model).entries("activation")
    for reported, seen in (
        (report.timeline, report.measured),
        (report.planned_timeline, report.planned_measured),
    ):
        assert abs(reported.peak.nbytes - seen.peak.nbytes) <= 0.03 * seen.peak.nbytes
