"""Each row of the 4-bit paper's ablation is a config that trains."""

import itertools

import pytest
import torch

import memtrain
from experiments.__main__ import CONFIGS
from memtrain.config.sources import compose, from_mapping, options

# Their second moment has a zero: a coordinate that gets it makes a step of 1 / eps (section 4.1).
ZEROS = ("b2048_de", "b128_de", "b128_de_sr", "b128_e2m2")
ROWS = [
    name.removeprefix("ablation/")
    for name in options("optim", [CONFIGS])
    if name.startswith("ablation/")
]


def test_the_papers_rows_are_there():
    table1 = {"b2048_de", "b128_de", "b128_de_sr", "b2048_de0", "b128_de0", "rank1_de0"}
    assert table1 | {"first_b2048", "first_b128", "bits5", "bits8"} <= set(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_every_row_of_the_ablation_trains(row):
    torch.manual_seed(0)
    cfg = compose(["preset=optimizer_only", f"optim=ablation/{row}"], searchpath=[CONFIGS])
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 200), torch.nn.Tanh(), torch.nn.Linear(200, 32), torch.nn.Tanh()
    )
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = memtrain.wrap(model, plain, from_mapping(cfg))
    x = torch.randn(64, 32)
    losses = []
    for _ in range(6):
        loss = (model(x) - x).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.tensor(losses).isfinite().all()
    if row not in ZEROS:
        assert all(after < before for before, after in itertools.pairwise(losses))
    weight = model[0].weight
    kept = {
        state: value for state, value in optimizer.state[weight].items() if isinstance(value, dict)
    }
    assert kept
    for state, payload in kept.items():
        assert payload["codes"].dtype == torch.uint8, state
