"""Lion with a momentum in 4 bits ends as near to the solution of least squares as in 8 bits."""

import pytest
import torch
from torch import nn

from memtrain.optim import Lion4bit, Lion8bit


def excess(kind, seed, steps, *, falls):
    """Squared distance from the solution, with noisy targets: mean of the last tenth of steps."""
    generator = torch.Generator().manual_seed(seed)
    solution = torch.randn(64, 128, generator=generator) / 128**0.5
    weight = nn.Parameter(torch.zeros(64, 128))
    optimizer, found = kind([weight], lr=1e-3), []
    for step in range(steps):
        x, noise = (torch.randn(32, n, generator=generator) for n in (128, 64))
        weight.grad = (x @ (weight.detach() - solution).t() - noise).t() @ x / 16
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / steps * falls)
        optimizer.step()
        found.append(float((weight.detach() - solution).square().sum()))
    return sum(found[-steps // 10 :])


@pytest.mark.parametrize("falls", [False, True])
@pytest.mark.parametrize(
    ("steps", "seed"),
    [(2000, 0), *(pytest.param(5000, seed, marks=pytest.mark.nightly) for seed in range(5))],
)
def test_four_bits_end_within_twice_the_excess_of_eight(steps, seed, falls):
    four, eight = (excess(kind, seed, steps, falls=falls) for kind in (Lion4bit, Lion8bit))
    assert four <= 2 * eight
