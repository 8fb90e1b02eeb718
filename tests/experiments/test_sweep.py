"""Sweeps: which runs they make, that they go on where they stopped, what they draw."""

import csv
from collections import Counter

import pytest
import torch

from experiments import sweep
from experiments.__main__ import CONFIGS, main
from experiments.sweep import Cell, GridConfig, SweepConfig, SweepTrainConfig, cells
from experiments.tradeoff_plot import draw, points
from memtrain.training import settings
from memtrain.training.data import build_source
from memtrain.training.run import Run

TINY = [
    "experiment=precision_tradeoff", "data=digits", "training.steps=3", "training.batch=8",
    "sweep.widths=[0.05]", "sweep.families=[squeezenet]", "sweep.seeds=[0]", "output.quiet=true",
    "output.plot=false",
]  # fmt: skip


def compose(overrides):
    found = settings.compose(overrides, SweepTrainConfig, [CONFIGS])
    return settings.from_mapping(found, SweepTrainConfig)


def config(folder, *overrides):
    return compose([*TINY, f"output.folder={folder}", *overrides])


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def counted(monkeypatch):
    """Stands in for training: a run is counted, and its accuracy is its ratio."""
    runs = []

    def run_cell(config, source):
        precision = config.precision
        runs.append((precision.assignment, precision.ratio, source.seed))
        outcome = dict.fromkeys(sweep.RESULTS, "")
        return {**outcome, "accuracy": precision.ratio / 2, "low_ratio": precision.ratio}

    monkeypatch.setattr(sweep, "run_cell", run_cell)
    return runs


def test_the_experiment_holds_what_the_paper_compares():
    found = cells(compose(["experiment=precision_tradeoff"]).sweep)
    assert len(set(found)) == len(found)
    for family in ("squeezenet", "shufflenet_v2", "mobilenet_v2", "resnet18"):
        own = [cell for cell in found if cell.family == family and cell.seed == 0]
        ratios = {cell.ratio for cell in own if cell.assignment == "size_ordered"}
        assert ratios == {tenth / 10 for tenth in range(11)}
        assert {(cell.assignment, cell.promotion) for cell in own} >= {
            *((name, p) for name in ("uniform", "operator", "operator_out") for p in (True, False)),
            ("increasing", True), ("random", True), ("fp32", False),
        }  # fmt: skip
    assert Counter(cell.seed for cell in found).most_common()[-1][1] * 3 == len(found)


def test_the_full_experiment_has_as_many_runs_as_it_says():
    full = compose(["experiment=precision_tradeoff_full"])
    assert len(cells(full.sweep)) == 4 * 4 * 4 * 22
    assert full.training.steps * full.training.batch == pytest.approx(200 * 60_000, rel=2e-3)


def test_assignments_without_a_ratio_run_once():
    grid = GridConfig(assignments=["uniform", "random"], ratios=[0.2, 0.4], promotions=[True])
    found = cells(SweepConfig(families=["a"], seeds=[5], grids=[grid, grid]))
    assert found == [
        Cell("a", 1.0, "uniform", 1.0, True, 5),
        Cell("a", 1.0, "random", 0.2, True, 5),
        Cell("a", 1.0, "random", 0.4, True, 5),
    ]


def test_a_sweep_goes_on_where_it_stopped(tmp_path, counted, monkeypatch):
    first = sweep.Sweep(config(tmp_path))
    whole = len(first.cells)
    real = sweep.run_cell

    def stops(config, source):
        if len(counted) == 5:
            raise KeyboardInterrupt
        return real(config, source)

    monkeypatch.setattr(sweep, "run_cell", stops)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert len(read(first.results)) == 5
    monkeypatch.setattr(sweep, "run_cell", real)
    assert sweep.Sweep(config(tmp_path)).train() == whole - 5
    assert len(counted) == len(read(first.results)) == whole
    assert sweep.Sweep(config(tmp_path, "output.plot=true")).train() == 0
    assert (first.folder / "tradeoff.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("promoted", [0, 3])
def test_a_run_that_promoted_nothing_is_also_the_one_without(tmp_path, monkeypatch, promoted):
    runs = []

    def run_cell(config, source):
        runs.append(config.precision.promotion)
        outcome = dict.fromkeys(sweep.RESULTS, "")
        return {**outcome, "accuracy": len(runs) / 8, "low_ratio": 1.0, "promoted": promoted}

    monkeypatch.setattr(sweep, "run_cell", run_cell)
    own = sweep.Sweep(config(tmp_path))
    own.cells = [Cell("squeezenet", 0.05, "uniform", 1.0, on, 0) for on in (True, False)]
    own.train()
    accuracies = [row["accuracy"] for row in own.rows()]
    assert accuracies == (["0.125", "0.125"] if promoted == 0 else ["0.125", "0.25"])
    assert runs == ([0.01] if promoted == 0 else [0.01, None])


def test_other_settings_are_other_runs(tmp_path, counted):
    first = sweep.Sweep(config(tmp_path))
    first.train()
    other = sweep.Sweep(config(tmp_path, "training.steps=4"))
    assert other.rows() == []
    assert other.train() == len(first.cells)
    assert len(first.rows()) == len(other.rows()) == len(first.cells)


def test_the_cell_decides_the_run(tmp_path):
    own = sweep.Sweep(config(tmp_path))
    made = own.config_of(Cell("resnet18", 0.1, "random", 0.5, True, 7))
    assert (made.model["family"], made.model["width"], made.seed) == ("resnet18", 0.1, 7)
    precision = made.precision
    assert (precision.assignment, precision.ratio, precision.seed) == ("random", 0.5, 7)
    assert precision.promotion == own.config.precision.promotion
    assert not precision.keep_first
    operator = own.config_of(Cell("resnet18", 0.1, "operator", 1.0, False, 0)).precision
    assert (operator.promotion, operator.keep_first, operator.keep_last) == (None, True, True)


def test_a_run_is_trained_and_told(tmp_path):
    own = sweep.Sweep(config(tmp_path))
    source = build_source(own.config.data, 0)
    outcomes = {}
    for assignment in ("fp32", "size_ordered"):
        cell = Cell("squeezenet", 0.05, assignment, 1.0, True, 0)
        outcomes[assignment] = sweep.run_cell(own.config_of(cell), source)
    assert outcomes["fp32"]["low_ratio"] == 0
    assert 0.5 < outcomes["size_ordered"]["low_ratio"] < 1
    assert outcomes["size_ordered"]["train_loss"] != outcomes["fp32"]["train_loss"]
    assert all(0 <= outcome["accuracy"] <= 1 for outcome in outcomes.values())
    assert {*sweep.RESULTS} == {*outcomes["fp32"]} == {*outcomes["size_ordered"]}


def test_a_run_that_diverges_is_a_result(tmp_path, monkeypatch):
    def diverges(run):
        run.step += 1
        raise FloatingPointError("the loss is nan")

    monkeypatch.setattr(Run, "train_step", diverges)
    own = config(tmp_path, "precision.assignment=fp32")
    outcome = sweep.run_cell(own, build_source(own.data, 0))
    assert outcome["diverged_at"] == 1
    assert outcome["train_loss"] == ""
    assert 0 <= outcome["accuracy"] <= 1


def test_accuracy_counts_every_image(tmp_path):
    own = config(tmp_path)
    source = build_source(own.data, 0)
    run = Run("plain", own, source)
    images, targets = source.parts["validation"]
    run.model = torch.nn.Module()
    seen = []

    def forward(x):
        seen.append(len(x))
        return torch.nn.functional.one_hot(torch.full((len(x),), 3), 10)

    run.model.forward = forward
    assert sweep.accuracy(run, source) == int((targets == 3).sum()) / len(targets)
    assert sum(seen) == len(images)


def test_points_are_means_of_the_seeds():
    rows = [
        {"assignment": "random", "promotion": "True", "ratio": ratio, "low_ratio": low,
         "accuracy": accuracy}
        for ratio, low, accuracy in (("0.5", "0.4", "0.6"), ("0.1", "0.2", "0.8"),
                                     ("0.5", "0.6", "0.9"))
    ]  # fmt: skip
    first, second = points(rows, "random", True)
    assert (first.accuracy, first.seeds) == (0.8, 1)
    assert second == pytest.approx((0.5, 0.75, 0.6, 0.9, 2))
    assert points(rows, "random", False) == []


def test_nothing_to_draw_is_drawn(tmp_path):
    draw(tmp_path / "x.png", [])
    assert (tmp_path / "x.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sweep.families=[vgg]", "model.family='vgg'; allowed: squeezenet"),
        ("sweep.seeds=[]", r"sweep.seeds=\[\] is empty"),
        ("sweep.grids.0.assignments=[largest]", "precision.assignment='largest'; allowed"),
        ("sweep.grids.0.ratios=[2]", "2.0; allowed: 0 to 1"),
        ("data=stdlib", "model.name='cifar' takes images|data.name='stdlib'; allowed"),
    ],
)
def test_bad_sweeps(tmp_path, override, message):
    with pytest.raises(ValueError, match=message):
        sweep.Sweep(config(tmp_path, override))


def test_the_command_runs_a_sweep(tmp_path, counted, capsys):
    assert main([*TINY, f"output.folder={tmp_path}"]) == 0
    assert len(counted) == 22
    assert main([*TINY, f"output.folder={tmp_path}", "sweep.seeds=[]"]) == 2
    assert "sweep.seeds=[] is empty" in capsys.readouterr().err
