"""The ablation of 4-bit second moments: what is zeroed and unstable is counted."""

import pytest
import torch

from experiments import states_ablation
from experiments.optimizer_states import Trained
from experiments.states_ablation import STUDY, train
from experiments.study import LOSS


def test_a_codebook_with_zero_makes_runs_unstable():
    rows = {variant: train("digits", variant, 0, 1e-3, 10) for variant in ("b2048_de", "b2048_de0")}
    with_zero, without = rows.values()
    assert (with_zero["unstable"], without["unstable"], without["zeroed"]) == (1, 0, 0)
    assert with_zero["worst_over_first"] > states_ablation.UNSTABLE > without["worst_over_first"]
    assert with_zero["zeroed"] > 0.1
    assert with_zero["bytes_per_parameter"] == without["bytes_per_parameter"] < 1.2


@pytest.mark.parametrize("losses", [[2.0, float("nan"), 1.0], [2.0, 4.1], [2.0, float("inf")]])
def test_what_is_unstable(losses, monkeypatch):
    model = torch.nn.Flatten()
    run = Trained(model, torch.optim.SGD([torch.ones(1)]), None, None, losses)  # pyright: ignore
    monkeypatch.setattr(states_ablation, "descended", lambda *given: run)
    monkeypatch.setattr(states_ablation, "zeroed", lambda *given: 0.0)
    monkeypatch.setattr(states_ablation, "validate", lambda *given: (0.0, 0.0))
    monkeypatch.setattr(states_ablation, "state_bytes", lambda *given: 0)
    monkeypatch.setattr(torch.nn.Flatten, "parameters", lambda self: iter([torch.ones(1)]))
    assert train("digits", "fp32", 0, 1e-3, len(losses))["unstable"] == 1


def test_the_table_tells_of_runs_that_left():
    rows = [
        dict.fromkeys(STUDY.columns, "1") | {"variant": variant, "seed": seed, LOSS: loss}
        for variant, loss in (("fp32", "1"), ("b128_de", "nan"))
        for seed in ("0", "1")
    ]
    assert STUDY.table(rows)[-1].endswith("| +nan +- nan |  |")
