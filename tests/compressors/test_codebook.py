"""Block compressors and the names that the literature gives them."""

import pytest
import torch

from memtrain.compressors import Block, Factored, Identity, Key, Rank1
from memtrain.compressors.named import named
from memtrain.kernels.codebook.values import codebook


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(("map", "signed"), [("DE", True), ("DE", False), ("Linear", False)])
@pytest.mark.parametrize("size", [64, 128, 2048])
def test_error_is_half_a_gap_of_the_map(bits, map, signed, size):
    x = torch.rand(3000) ** 2 * (torch.randn(3000).sign() if signed else 1)
    block = Block(block_size=size, map=map, bits=bits, signed=signed)
    packed = block.compress(x, key=Key())
    values = torch.tensor(codebook(map, bits=bits, signed=signed))
    # half of the widest gap, or what lies beyond the lowest value
    gap = max((values.diff() / 2).max(), (values[0] - (-1 if signed else 0)).abs())
    scale = packed.tensors["scale"].abs().repeat_interleave(size)[:3000]
    error = (block.decompress(packed) - x).abs()
    assert (error <= scale * (gap + 1e-6)).all()
    assert packed.nbytes == -(-3000 // size) * (size * bits // 8 + 4)


def test_values_of_the_map_are_kept_exactly():
    values = torch.tensor(codebook("DE", signed=True))
    x = torch.cat([values, torch.zeros(112), 3 * values, torch.zeros(112)])
    back = Block().decompress(Block().compress(x, key=Key()))
    assert torch.equal(back[:128], x[:128])
    assert torch.allclose(back[128:], x[128:], rtol=2**-23, atol=0)


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
    ],
)
def test_names(name, signed, want):
    assert named(name, signed=signed) == want


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("Rank1/Linear", "Rank-1/Linear"), ("B128/De", "B128/DE"), ("factor", "factored")],
)
def test_wrong_names_give_the_nearest(wrong, near):
    with pytest.raises(ValueError, match=f"'{near}'"):
        named(wrong, signed=False)


@pytest.mark.parametrize("options", [{"block_size": 100}, {"bits": 9}, {"map": "de"}])
def test_bad_fields_raise(options):
    with pytest.raises(ValueError, match=r"must be|allowed"):
        Block(**options)
