"""memtrain-report: the peak, real steps beside it, the sizes that fit a memory."""

import json
import sys

import pytest
import torch

from memtrain.audit.peak import Moment, Timeline
from memtrain.audit.report import Report
from memtrain.cli.command_line import working
from memtrain.cli.models.build_model import build
from memtrain.cli.models.request import Request
from memtrain.cli.render.report_data import (
    MAX_MOMENTS,
    ReportData,
    downsample,
    live_at_peak,
    peak_lines,
    size_lines,
    timelines,
)
from memtrain.cli.report.budget import largest_sizes
from memtrain.cli.report.main import main
from memtrain.config.sources import load


def test_the_peak_is_reported_with_what_is_alive_then(report):
    alive = live_at_peak(report)
    assert (alive["total"].plain, alive["total"].planned) == (34078720, 20971520)
    assert sum(pair.plain for name, pair in alive.items() if name != "total") == 34078720
    assert peak_lines(report)[0].startswith(
        "baseline: 32.50 MiB at the peak, in the backward of h.1.mlp.act / gelu; tensors ask for "
    )
    bare = Report(rows=(), kept=(), unmatched=(), loss=True)
    assert (live_at_peak(bare), peak_lines(bare), timelines(bare)) == ({}, [], {})


def test_a_measured_peak_stands_beside_the_predicted_one():
    def line(nbytes):
        return Timeline((Moment("step", "step", nbytes, {"weights": nbytes}),))

    report = Report(
        rows=(), kept=(), unmatched=(), loss=True, timeline=line(1010), planned_timeline=line(99),
        measured=line(1000), planned_measured=line(100),
    )  # fmt: skip
    lines = [text.partition("; ")[2] for text in peak_lines(report)]
    assert [*lines[:2], *lines[4:]] == ["", "", "predicted +1.0%", "predicted -1.0%"]
    assert all(line.startswith("at the peak 0.00 KiB of them are live") for line in lines[2:4])


@pytest.mark.parametrize("count", [1, 2, MAX_MOMENTS, MAX_MOMENTS + 1, 5 * MAX_MOMENTS + 3])
def test_thinning_keeps_the_peak_and_the_order(count):
    sizes = torch.randperm(count).tolist()
    moments = [Moment(str(index), "forward", size, {}) for index, size in enumerate(sizes)]
    kept = downsample(moments)
    assert len(kept) == min(count, MAX_MOMENTS)
    assert max(moment.nbytes for moment in kept) == count - 1
    assert [int(moment.label) for moment in kept] == sorted(int(moment.label) for moment in kept)
    assert downsample([]) == []


def test_a_real_step_confirms_the_predicted_one(builder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["model=py:theirs:build", "batch=64", "--measure", "--json", "a.json"]) == 0
    text, errors = capsys.readouterr()
    assert "predicted and measured on the CPU" in errors
    assert "planned, measured:" in text
    content = json.loads((builder / "a.json").read_text())
    for side in ("plain", "planned"):
        predicted, measured = content["peak"][side], content["measured_peak"][side]
        assert predicted == pytest.approx(measured, rel=0.03)
    assert content["timeline"]["plain"][0]["phase"] == "forward"


def test_a_model_that_reads_its_data_is_measured(builder, capsys):
    assert main(["model=py:theirs:branch", "device=cpu", "--measure", "--json", "a.json"]) == 0
    text = capsys.readouterr().out
    reported = " ".join(text.split())
    assert "saved activations: unknown, left out: Branch reads a tensor's values" in reported
    assert "weights: unknown" not in reported
    assert "measure a real step instead" not in reported
    content = json.loads((builder / "a.json").read_text())
    rows = {row["name"]: row["plain"] for row in content["rows"]}
    assert rows["linear.weight"] == rows["linear.weight / adamw / exp_avg"] == 4 * 64 * 64
    assert content["peak"] is None
    assert content["measured_peak"]["plain"] > 4 * 64 * 64


def test_sizes_that_fit_are_those_of_the_search(builder, capsys, monkeypatch):
    def search(model, batch, cfg, memory, *, optimizer, what, most, options):
        return type("Found", (), {"size": 1234 if cfg is None else 5678})

    monkeypatch.setattr("memtrain.cli.report.budget.largest", search)
    assert main(["model=py:theirs:build", "--no-peak", "memory=2MB", "--json", "a.json"]) == 0
    content = json.loads((builder / "a.json").read_text())["fits"]
    assert (content["memory"], set(content)) == (2_000_000, {"memory", "batch"})
    assert (content["batch"]["plain"], content["batch"]["planned"]) == (1234, 5678)
    words = " ".join(capsys.readouterr().out.split())
    assert "largest batch in 1.91 MiB: 1,234 (baseline), 5,678 (planned)" in words


def test_text_models_are_asked_for_their_longest_sequence(monkeypatch):
    pytest.importorskip("transformers")
    asked = []

    def search(model, batch, cfg, memory, *, optimizer, what, most, options):
        asked.append((what, most, cfg is None))
        return type("Found", (), {"size": min(most, 5000)})

    monkeypatch.setattr("memtrain.cli.report.budget.largest", search)
    from rich.console import Console

    request = Request(model="gpt2", memory="24GB")
    sizes = largest_sizes(
        build(request), request, load([]), request.step, lambda what: working(Console(), what)
    )
    assert asked == [("batch", 2**20, True), ("batch", 2**20, False), ("seq", 1024, True),
                     ("seq", 1024, False)]  # fmt: skip
    report = Report(rows=(), kept=(), unmatched=(), loss=True)
    assert list(size_lines(ReportData(report, {}, sizes, 24 * 10**9))) == [
        "largest batch in 22.35 GiB: 5,000 (baseline), 5,000 (planned)",
        "longest sequence in 22.35 GiB: 1,024, the model's limit (baseline), "
        "1,024, the model's limit (planned)",
    ]
    sizes = {"batch": {"plain": 0, "planned": 1, "limit": 9}}
    assert list(size_lines(ReportData(report, {}, sizes, 1))) == [
        "largest batch in 0.00 KiB: none (baseline), 1 (planned)"
    ]


def test_a_batch_without_tensors_is_one_clear_line(builder, capsys):
    (builder / "words.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(2, 2), ['a', 'b']\n"
    )
    assert main(["model=py:words:build"]) == 1
    error = capsys.readouterr().err
    assert "tensor" in error
    assert error.count("\n") == 1


CONVERTED = """
import torch
from torch import nn


def build():
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    return model.CONVERSION, torch.zeros(8, 64, dtype=torch.bfloat16)
"""


@pytest.mark.parametrize("how", ["to(torch.bfloat16)", "bfloat16()", "half().to(torch.bfloat16)"])
def test_a_builder_may_convert_its_model(how, builder):
    (builder / "converted.py").write_text(CONVERTED.replace("CONVERSION", how))
    try:
        model = build(Request(model="py:converted:build"))[0]
        assert [p.dtype for p in model.parameters()] == 5 * [torch.bfloat16]
        assert all(isinstance(p, torch.nn.Parameter) for p in model.parameters())
        assert main(["model=py:converted:build", "--json", "a.json"]) == 0
    finally:
        sys.modules.pop("converted", None)
    content = json.loads((builder / "a.json").read_text())
    assert content["categories"]["weights"]["plain"] == 2 * (64 * 64 + 4 * 64)
