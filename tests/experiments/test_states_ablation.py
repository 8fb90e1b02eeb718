"""The ablation of 4-bit second moments: what is zeroed and unstable is counted."""

import pytest
import torch

from experiments import states_ablation
from experiments.optimizer_states import Trained
from experiments.states_ablation import VARIANTS, train, zeroed
from experiments.study import groups_of


def test_a_codebook_with_zero_makes_runs_unstable():
    rows = {variant: train("digits", variant, 0, 1e-3, 10) for variant in ("b2048_de", "b2048_de0")}
    with_zero, without = rows.values()
    assert (with_zero["unstable"], without["unstable"], without["zeroed"]) == (1, 0, 0)
    assert with_zero["worst_over_first"] > states_ablation.UNSTABLE > without["worst_over_first"]
    assert with_zero["zeroed"] > 0.5
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


def test_only_what_was_above_zero_counts():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 100, bias=False))
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-3, betas=(0.9, 0.99))
    images = torch.rand(8, 1, 8, 8)
    images[..., :4] = 0  # half of the weights get no gradient: their moments are 0 and not lost
    model(images).sum().backward()
    optimizer.step()
    run = Trained(model, optimizer, None, lambda step: (images, torch.zeros(8).long()), [])  # pyright: ignore
    assert zeroed(run, 1) == 0
    assert set(VARIANTS) >= {"fp32", "b128_de_sr", "rank1_linear", "factored"}
