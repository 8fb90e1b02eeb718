"""Names of the literature: which compressor each one is, and the errors of wrong names."""

import pytest
import torch

from memtrain.compressors import Block, Key, Rank1
from memtrain.compressors.named import named


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
    ],
)
def test_names(name, signed, want):
    assert named(name, signed=signed) == want


def test_bits_are_the_names_or_the_arguments():
    assert named("B128/DE", signed=True, bits=8).bits == 8
    assert named("B128/DE3", signed=True, bits=8).bits == 3


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("rank-1/Linear", "Rank-1/Linear"), ("B128/DE+sr", "B128/DE")],
)
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
