"""`memtrain-train budget=...`: the plan of the wrapped run, and its promise."""

import pytest
import torch
from omegaconf import OmegaConf
from rich.console import Console

from memtrain.planner import Rates, write_rates
from memtrain.training.session import Session
from memtrain.training.settings import PlannerConfig, compose, from_mapping


def test_wrong_values_are_named_before_anything_runs():
    with pytest.raises(ValueError, match="unknown allow 'all'"):
        PlannerConfig(allow=["all"])
    assert PlannerConfig().goal().sensitivity == "analytic"
    config = from_mapping(compose(["experiment=smoke", "budget=2MB", "planner.max_error=0.5"]))
    assert (config.budget, config.planner.max_error) == ("2MB", 0.5)


def test_a_resumed_run_gets_the_rates_of_its_start(tmp_path):
    rates = Rates(name="a machine", copy=2e9, launch=1e-6)
    write_rates(rates, tmp_path / "rates.yaml")
    overrides = ["experiment=smoke", "budget=20MB", f"planner.rates={tmp_path}/rates.yaml",
                 "training.runs=[plain]", f"output.folder={tmp_path}"]  # fmt: skip
    session = Session(from_mapping(compose(overrides)))
    (tmp_path / "rates.yaml").unlink()
    again = from_mapping(OmegaConf.load(session.folder / "config.yaml"))
    assert again.planner.goal().rates == rates
    assert again.planner.with_rates() == again.planner
    with pytest.raises(FileNotFoundError, match=r"'none.yaml' do not exist"):
        PlannerConfig(rates="none.yaml")
    with pytest.raises(TypeError, match="allowed: a file, or a mapping"):
        PlannerConfig(rates=3)


@pytest.mark.nightly
def test_a_run_under_a_budget_keeps_its_promise(tmp_path):
    overrides = [
        "experiment=smoke", "budget=2MB", "training.runs=[wrapped]", f"output.folder={tmp_path}",
        "output.quiet=true",
    ]  # fmt: skip
    console = Console(record=True, width=120)
    session = Session(from_mapping(compose(overrides)), console=console)
    summary = session.train()["wrapped"]
    assert session.fit is not None
    assert session.fit.peak.nbytes <= 2_000_000
    assert summary["bytes"]["peak"] == pytest.approx(session.fit.peak.nbytes, rel=0.03)
    assert "promised peak" in console.export_text()
    assert (session.folder / "plan.yaml").read_text().startswith("# A memtrain plan")
    assert torch.isfinite(torch.tensor(summary["train_loss"]))
