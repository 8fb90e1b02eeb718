"""`memtrain-report budget=...` and plan files on the command line."""

import pytest
import torch
from torch import nn

from memtrain import planner
from memtrain.cli import report_budget
from memtrain.cli.models import Built
from memtrain.cli.report_request import requested, settings
from memtrain.config import Config
from memtrain.peak import Moment, StepOptions


def asked(*overrides):
    return requested(["model=gpt2", *overrides])


def test_the_keys_of_a_budget_reach_the_planner(monkeypatch):
    given = {}

    def fit(model, optimizer, batch, budget, cfg, *, goal):
        given.update(budget=budget, goal=goal, cfg=cfg)
        return "found"

    monkeypatch.setattr(report_budget, "fit", fit)
    request, config = asked(
        "budget=24GiB", "allow='recompute, release'", "max_error=0.5", "objective=error", "seed=3"
    )
    built, step = Built(*[None] * 3), StepOptions(device="cpu")  # type: ignore[arg-type]
    assert report_budget.planned(request, config, built, step) == "found"
    assert given["budget"] == "24GiB"
    assert given["cfg"].seed == 3
    goal = given["goal"]
    assert (goal.names, goal.max_error, goal.objective) == ({"recompute", "release"}, 0.5, "error")
    assert goal.options is step
    assert report_budget.planned(asked()[0], config, built, step) is None


def test_the_keys_are_shown_where_they_mean_something():
    request, _ = asked()
    assert "allow" not in settings(request, ["model=gpt2"], None)
    request, _ = asked("budget=24GiB")
    assert settings(request, ["model=gpt2"], None)["allow"] == "quantise,recompute"


def test_a_plan_file_takes_the_place_of_the_keys(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("memtrain_plan: 1\nseed: 7\n")
    request, config = asked(f"plan={path}")
    assert report_budget.chosen(request, config).seed == 7
    assert report_budget.chosen(asked()[0], config) is config
    request, _ = asked("plan=nowhere.yaml")
    with pytest.raises(ValueError, match="is no file"):
        report_budget.chosen(request, config)


def test_a_plan_is_written(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    built = Built(model, torch.optim.AdamW(model.parameters()), torch.ones(32, 64))
    report_budget.save(tmp_path / "plan.yaml", built, Config(seed=5))
    assert "seed: 5" in (tmp_path / "plan.yaml").read_text()


def test_wrong_values_are_named():
    built, step = Built(*[None] * 3), StepOptions()  # type: ignore[arg-type]
    for key, message in (
        ("allow=everything", "unknown allow 'everything'"),
        ("objective=joy", "unknown objective 'joy'"),
        ("max_error=-1", "max_error=-1"),
    ):
        request, config = asked("budget=1GiB", key)
        with pytest.raises(ValueError, match=message):
            report_budget.planned(request, config, built, step)


def test_what_does_not_fit_is_told_in_lines(capsys):
    from rich.console import Console

    moment = Moment("step", "step", 3 * 2**30, {"weights": 2**30, "gradients": 2**31})
    error = planner.DoesNotFit(2**30, moment, ["a smaller model"])
    report_budget.show_misfit(Console(soft_wrap=True), error)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "memtrain-report: budget=1.00 GiB is too small: the smallest peak found is 3.00 GiB, "
        "in the step"
    )
    assert "gradients 2.00 GiB, weights 1.00 GiB" in lines[1]
    assert lines[2].endswith("what would help: a smaller model")
