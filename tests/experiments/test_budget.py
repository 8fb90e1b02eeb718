"""`memtrain-train budget=...`: the plan of the wrapped run, and its promise."""

import pytest
import torch
from rich.console import Console

from memtrain.experiments.budget import PlannerConfig, promise
from memtrain.experiments.config import compose, from_mapping
from memtrain.experiments.session import Session
from memtrain.peak import Moment
from memtrain.planner import Fit


def test_a_promise_is_one_line():
    peak = Moment("step", "step", 2**20, {})
    found = Fit(
        plan=None, budget=2**21, peak=peak, seconds=1.0, plain_seconds=1.0, least_seconds=1.0,
        error=0.0, exact=True, states="torch", chosen={}, rates="byte counts",
        sensitivity="analytic",
    )  # type: ignore[arg-type]  # fmt: skip
    assert promise(found, 2**19) == (
        "budget 2.00 MiB: promised peak 1.00 MiB, measured 512.00 KiB (0.500 of it)"
    )
    assert promise(found, 0).endswith("no step was metered")


def test_wrong_values_are_named_before_anything_runs():
    with pytest.raises(ValueError, match="unknown allow 'all'"):
        PlannerConfig(allow=["all"])
    assert PlannerConfig().goal().sensitivity == "analytic"
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
