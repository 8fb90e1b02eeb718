"""Names of the literature, and each row of the paper's ablation as a config that trains."""

import itertools
from pathlib import Path

import pytest
import torch

import memtrain
from memtrain.compressors import Block, Key, Rank1, Scaled
from memtrain.compressors.named import named

ABLATION = Path(memtrain.__file__).parent / "configs" / "optim" / "ablation"
# Their second moment has a zero: a coordinate that gets it makes a step of 1 / eps (section 4.1).
ZEROS = ("b2048_de", "b128_de", "b128_de_sr", "b128_e2m2")
ROWS = sorted(path.stem for path in ABLATION.glob("*.yaml"))


@pytest.mark.parametrize(
    ("name", "signed", "want"),
    [
        ("B128/DE+SR", True, Block(rounding="stochastic")),
        ("B256/DE8", True, Block(block_size=256, bits=8)),
        ("B128/DE-05+SR", False, Block(map="DE-0", bits=5, signed=False, rounding="stochastic")),
        ("B128/DE-0", True, Block()),
        ("B128/Power-2", False, Block(map="Power-2", signed=False)),
        ("B128/E2M1", True, Block(map="E2M1")),
        ("B128/E2M1", False, Block(map="E2M1", bits=3, signed=False)),
        ("B24/E4M3", True, Block(block_size=24, map="E4M3", bits=8)),
        ("Rank-1/Linear8+SR", False, Rank1(bits=8, rounding="stochastic")),
        ("tensor/DE", True, Scaled(map="DE", signed=True)),
        ("dim0/Linear", False, Scaled(normalisation="dim0")),
        ("dim01/Linear", False, Scaled(normalisation="dim01")),
        ("rank1-group/Power-38", False, Scaled(normalisation="rank1-group", map="Power-3", bits=8)),
    ],
)
def test_names(name, signed, want):
    assert named(name, signed=signed) == want


def test_bits_are_the_names_or_the_arguments():
    assert named("B128/DE", signed=True, bits=8).bits == 8
    assert named("B128/DE3", signed=True, bits=8).bits == 3


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("dim2/Linear", "dim"), ("B128/DE+sr", "B128/DE"), ("rank1-grup/DE", "rank1-group/DE")],
)
def test_wrong_names_give_a_near_one(wrong, near):
    with pytest.raises(ValueError, match=f"nearest valid name is '{near}"):
        named(wrong, signed=False)


@pytest.mark.parametrize("map", ["DE", "Linear", "Power-2", "Power-3", "E3M4"])
@pytest.mark.parametrize("scale", ["B256", "Rank-1", "tensor", "dim0", "dim1", "rank1-group"])
def test_eight_bits_keep_more_than_four(map, scale):
    x = torch.rand(64, 96)
    errors = []
    for name in (f"{scale}/{map}4" if map != "E3M4" else f"{scale}/E2M2", f"{scale}/{map}"):
        compressor = named(name, signed=False, bits=8)
        errors.append((compressor.decompress(compressor.compress(x, key=Key())) - x).abs().mean())
    assert errors[1] < errors[0] / 2


def test_the_papers_rows_are_there():
    table1 = {"b2048_de", "b128_de", "b128_de_sr", "b2048_de0", "b128_de0", "rank1_de0"}
    assert table1 | {"first_b2048", "first_b128", "bits5", "bits8"} <= set(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_every_row_of_the_ablation_trains(row):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 200), torch.nn.Tanh(), torch.nn.Linear(200, 32), torch.nn.Tanh()
    )
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = memtrain.wrap(
        model, plain, ["preset=optimizer_only", f"optim=ablation/{row}"]
    )
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
