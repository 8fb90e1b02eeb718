"""`memtrain-train budget=...`: the plan of the wrapped run, and its promise."""

import pytest
import torch
from rich.console import Console

from memtrain.training.session import Session
from memtrain.training.settings import PlannerConfig, compose, from_mapping


def test_wrong_values_are_named_before_anything_runs():
    with pytest.raises(ValueError, match="unknown allow 'all'"):
        PlannerConfig(allow=["all"])
    config = from_mapping(compose(["experiment=smoke", "budget=2MB", "planner.max_error=0.5"]))
    assert (config.budget, config.planner.max_error) == ("2MB", 0.5)


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
