"""Compressors of states: which one each name of the literature is, and the errors of wrong ones."""

import pytest
import torch

from memtrain.compressors import Block, Factored, Identity, Key, Rank1
from memtrain.compressors.named import named
from memtrain.kernels.codebook.values import codebook


@pytest.mark.parametrize(
    ("name", "signed", "want"),
    [
        ("identity", True, Identity()),
        ("factored", False, Factored()),
        ("B128/DE", True, Block()),
        ("B2048/DE", True, Block(block_size=2048)),
        ("B128/DE-0", False, Block(map="DE-0", signed=False)),
        ("B128/Linear", False, Block(map="Linear", signed=False)),
        ("Rank-1/Linear", False, Rank1()),
        ("Rank-1/DE-0", False, Rank1(map="DE-0")),
        ("B128/DE+SR", True, Block(rounding="stochastic")),
        ("B256/DE8", True, Block(block_size=256, bits=8)),
        ("B128/DE-05+SR", False, Block(map="DE-0", bits=5, signed=False, rounding="stochastic")),
        ("B128/DE-0", True, Block()),
        ("B128/Power-2", False, Block(map="Power-2", signed=False)),
        ("B128/E2M1", True, Block(map="E2M1")),
        ("B128/E2M1", False, Block(map="E2M1", bits=3, signed=False)),
        ("B24/E4M3", True, Block(block_size=24, map="E4M3", bits=8)),
        ("Rank-1/Linear8+SR", False, Rank1(bits=8, rounding="stochastic")),
    ],
)
def test_names(name, signed, want):
    assert named(name, signed=signed) == want


def test_bits_are_the_names_or_the_arguments():
    assert named("B128/DE", signed=True, bits=8).bits == 8
    assert named("B128/DE3", signed=True, bits=8).bits == 3


WRONG = {
    "rank-1/Linear": "Rank-1/Linear",
    "Rank1/Linear": "Rank-1/Linear",
    "B128/DE+sr": "B128/DE",
    "B128/De": "B128/DE",
    "factor": "factored",
}


@pytest.mark.parametrize(("wrong", "near"), WRONG.items())
def test_wrong_names_give_a_near_one(wrong, near):
    with pytest.raises(ValueError, match=f"nearest valid name is '{near}"):
        named(wrong, signed=False)


@pytest.mark.parametrize("map", ["DE", "Linear", "Power-2", "Power-3", "E3M4"])
@pytest.mark.parametrize("scale", ["B256", "Rank-1"])
def test_eight_bits_keep_more_than_four(map, scale):
    x = torch.rand(64, 96)
    errors = []
    for name in (f"{scale}/{map}4" if map != "E3M4" else f"{scale}/E2M2", f"{scale}/{map}"):
        compressor = named(name, signed=False, bits=8)
        errors.append((compressor.decompress(compressor.compress(x, key=Key())) - x).abs().mean())
    assert errors[1] < errors[0] / 2


def test_values_of_the_map_are_kept_exactly():
    values = torch.tensor(codebook("DE", signed=True))
    x = torch.cat([values, torch.zeros(112), 3 * values, torch.zeros(112)])
    back = Block().decompress(Block().compress(x, key=Key()))
    assert torch.equal(back[:128], x[:128])
    assert torch.allclose(back[128:], x[128:], rtol=2**-23, atol=0)


@pytest.mark.parametrize("options", [{"block_size": 100}, {"bits": 9}, {"map": "de"}])
def test_bad_fields_raise(options):
    with pytest.raises(ValueError, match=r"must be|allowed"):
        Block(**options)


def test_factors_take_the_bytes_of_rows_and_columns():
    packed = Factored().compress(torch.rand(64, 3, 7, 7, dtype=torch.float64), key=Key())
    assert packed.nbytes == 4 * (64 + 147)
    assert Factored().decompress(packed).dtype == torch.float64


def test_factors_of_one_dimension_are_refused():
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        Factored().compress(torch.ones(5), key=Key())
