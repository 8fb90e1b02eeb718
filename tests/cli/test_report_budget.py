"""`memtrain-report budget=...` and plan files on the command line."""

import io
import json
import time
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

import memtrain
from memtrain import planner
from memtrain.audit.peak import Moment, StepOptions, Timeline
from memtrain.cli.command_line import working
from memtrain.cli.render.json_file import as_text
from memtrain.cli.render.report_data import ReportData, budget_lines
from memtrain.cli.render.text_tables import show
from memtrain.cli.report import budget
from memtrain.cli.report.arguments import parse_keys, settings
from memtrain.cli.report.main import main
from memtrain.config.sources import Config


def asked(*overrides):
    return parse_keys(["model=gpt2", *overrides])


def test_the_keys_of_a_budget_reach_the_planner(monkeypatch):
    given = {}

    def fit(model, optimizer, batch, budget, cfg, *, goal, progress):
        given.update(budget=budget, goal=goal, cfg=cfg)
        return "found"

    monkeypatch.setattr(budget, "fit", fit)
    request, config = asked(
        "budget=24GiB", "allow='recompute, release'", "max_error=0.5", "objective=error", "seed=3"
    )
    built, step = (None, None, None), StepOptions(device="cpu")
    found = budget.plan_for_budget(request, config, built, budget.planner_goal(request, step))
    assert found == "found"
    assert given["budget"] == "24GiB"
    assert given["cfg"].seed == 3
    goal = given["goal"]
    assert (goal.names, goal.max_error, goal.objective) == ({"recompute", "release"}, 0.5, "error")
    assert goal.options is step
    assert budget.planner_goal(asked()[0], step) is None
    assert budget.plan_for_budget(asked()[0], config, built, None) is None


def test_the_keys_are_shown_where_they_mean_something():
    request, _ = asked()
    assert "allow" not in settings(request, ["model=gpt2"], None)
    request, _ = asked("budget=24GiB")
    assert settings(request, ["model=gpt2"], None)["allow"] == "quantise,recompute"


def test_a_preset_is_shown_where_it_decides():
    for overrides, shown in (
        ([], "balanced"),
        (["preset=exact"], "exact"),
        (["budget=24GiB"], None),
        (["plan=a.yaml"], None),
    ):
        request, _ = asked(*overrides)
        assert settings(request, ["model=gpt2", *overrides], None).get("preset") == shown


def test_a_plan_file_takes_the_place_of_the_keys(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("memtrain_plan: 1\nseed: 7\n")
    request, config = asked(f"plan={path}")
    assert budget.load_config(request, config).seed == 7
    assert budget.load_config(asked()[0], config) is config
    request, _ = asked("plan=nowhere.yaml")
    with pytest.raises(ValueError, match="is no file"):
        budget.load_config(request, config)
    with pytest.raises(ValueError, match=r"plan= with 'seed=3'; allowed: "):
        asked(f"plan={path}", "seed=3")


def test_a_plan_is_written(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    built = model, torch.optim.AdamW(model.parameters()), torch.ones(32, 64)
    budget.save_plan(tmp_path / "plan.yaml", built, Config(seed=5), StepOptions())
    assert "seed: 5" in (tmp_path / "plan.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["budget=24 potatoes"], "budget='24 potatoes' is not a size; allowed: a number and a un"),
        (["budget=1GiB", "allow=everything"], "unknown allow 'everything'"),
        (["plan=corrupt.yaml"], "corrupt.yaml"),
        (["plan=none.yaml"], "is no file"),
    ],
)
def test_a_mistake_is_one_clear_line_before_anything_is_built(
    arguments, message, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr("memtrain.cli.report.main.build", lambda request: pytest.fail("built"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corrupt.yaml").write_text("memtrain_plan: 1\nseed: [3\n")
    assert main(["model=gpt2", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_plan_of_another_model_names_its_sites(builder, capsys):
    lines = "{name: group, bits: 4}"
    head = "memtrain_plan: 1\nactivations:\n  sites:\n"
    (builder / "a.yaml").write_text(f"{head}    h.9 / gelu / input: {lines}\n")
    assert main(["model=py:theirs:build", "plan=a.yaml", "--no-peak"]) == 2
    error = capsys.readouterr().err
    assert "do not exist (the model has no such modules): h.9 / gelu / input" in error
    (builder / "b.yaml").write_text(f"{head}    1 / silu / input: {lines}\n")
    assert main(["model=py:theirs:build", "plan=b.yaml", "--no-peak"]) == 0
    assert "matched nothing: activations.sites: 1 / silu / input" in capsys.readouterr().out


def test_what_does_not_fit_is_reported_in_lines(capsys):
    moment = Moment("step", "step", 3 * 2**30, {"weights": 2**30, "gradients": 2**31})
    error = planner.DoesNotFit(2**30, moment, ["a smaller model"])
    budget.print_misfit(Console(soft_wrap=True), error)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "memtrain-report: budget=1.00 GiB is too small: the smallest peak found is 3.00 GiB, "
        "in the step"
    )
    assert "gradients 2.00 GiB, weights 1.00 GiB" in lines[1]
    assert lines[2].endswith("what would help: a smaller model")


@pytest.mark.nightly
def test_a_budget_from_the_command_line_to_the_files(builder, capsys):
    model = "model=py:theirs:build"
    arguments = [model, "batch=512", "device=cpu", "budget=1.5MB", "--json", "a.json"]
    assert main([*arguments, "--plan", "a.yaml"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "the baseline does not fit 1.43 MiB" in text
    assert "preset=" not in text
    content = json.loads((builder / "a.json").read_text())
    assert content["planner"]["promised_peak"] == content["peak"]["planned"] <= 1_500_000
    assert "promised peak" in text
    assert main([model, "batch=512", "device=cpu", "plan=a.yaml", "--json", "b.json"]) == 0
    again = json.loads((builder / "b.json").read_text())
    assert again["peak"] == content["peak"]
    assert again["unmatched_rules"] == []


def test_what_the_planner_found_is_in_the_json_and_in_the_tables(report, settings):
    model = nn.Linear(8, 8)
    plan = memtrain.make_plan(model, torch.optim.SGD(model.parameters()), Config())
    found = planner.Fit(
        plan=plan, budget=2**21,
        timeline=Timeline((Moment("step", "step", 2**20, {"weights": 2**20}),)),
        seconds=1.2, plain_seconds=1.0, error=0.5,
        states="factored", chosen={"group 4": 2, "recompute": 1},
    )  # fmt: skip
    data = ReportData(report, settings, fit=found)
    content = json.loads(as_text(data))["planner"]
    assert (content["budget"], content["promised_peak"]) == (2**21, 2**20)
    assert content["states"] == "factored"
    assert content["chosen"] == {"group 4": 2, "recompute": 1}
    assert (content["seconds"], content["plain_seconds"]) == (1.2, 1.0)
    assert (content["error"], content["weights"], content["gradients"]) == (0.5, "keep", "keep")
    console = Console(file=io.StringIO(), width=80)
    show(console, data)
    page = console.file.getvalue()
    for words in ("1.00 MiB, in the step", "+20.0% against plain PyTorch", "2 with 4-bit group",
                  "factored; weights: keep"):  # fmt: skip
        assert words in page
    # plain takes 32.5 MiB at its peak, planned 20
    for limit, first, second in (
        (40, "the baseline fits 40.00 MiB: it needs 32.50 MiB",
         "the plan fits: 20.00 MiB, and 20.00 MiB stay free"),
        (25, "the baseline does not fit 25.00 MiB: it needs 32.50 MiB, most of it "
             "weights (16.00 MiB) and saved activations (12.00 MiB)",
         "the plan fits: 20.00 MiB, and 5.00 MiB stay free"),
        (10, "the baseline does not fit 10.00 MiB", "the plan does not fit: 20.00 MiB"),
    ):  # fmt: skip
        data = ReportData(report, settings, fit=replace(found, budget=limit * 2**20))
        lines = [*budget_lines(data)]
        assert lines[0].startswith(first)
        assert lines[1].endswith(second)
    assert [*budget_lines(ReportData(report, settings))] == []


def test_a_bar_shows_the_stage_and_its_parts():
    console = Console(force_terminal=True, width=100, file=io.StringIO())
    with working(console, "planning") as reported:
        reported("the peak of a plan", 3, 11)
        time.sleep(0.15)
    shown = console.file.getvalue()
    assert "planning: the peak of a plan" in shown
    assert "3 of at most 11" in shown
