"""The rank-1 compressor."""

import pytest
import torch

from memtrain.compressors import Block, Key, Rank1


@pytest.mark.parametrize("shape", [(40, 77), (8, 3, 7, 7), (500, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_half_a_step_of_the_least_maximum(shape, dtype):
    x = (torch.rand(shape) * torch.rand(shape[0]).view(-1, *[1] * (len(shape) - 1))).to(dtype)
    back = Rank1().decompress(Rank1().compress(x, key=Key()))
    assert back.dtype == dtype
    least = x.float()
    for d in range(x.dim()):
        others = [k for k in range(x.dim()) if k != d]
        maxima = x.float().amax(others, keepdim=True).expand(shape)
        least = maxima if d == 0 else torch.minimum(least, maxima)
    # The spacing of Linear's values is 1/16; below the lowest one the error is at most 1/16
    lowest = x.float() < least / 16
    room = torch.where(lowest, least / 16, least / 32)
    if dtype == torch.bfloat16:
        room = room + 2**-8 * least
    assert ((back.float() - x.float()).abs() <= room + 1e-6 * least).all()


def test_rank_one_matrices_of_powers_of_two_are_exact():
    x = torch.tensor([[1.0], [4.0], [0.5]]) * torch.ones(1, 10)
    assert torch.equal(Rank1().decompress(Rank1().compress(x, key=Key())), x)


def test_one_dimension_is_quantised_in_blocks():
    x = torch.rand(300)
    block = Block(map="Linear", signed=False)
    a, b = Rank1().compress(x, key=Key()), block.compress(x, key=Key())
    assert torch.equal(a.tensors["codes"], b.tensors["codes"])
    assert torch.equal(a.tensors["scale"], b.tensors["scale"])
    assert torch.equal(Rank1().decompress(a), block.decompress(b))


def test_an_outlier_column_does_not_drown_the_rest():
    x = torch.full((64, 128), 2.0**-10)
    x[:, 9] = 1.0
    block = Block(map="Linear", signed=False)
    blocks = block.decompress(block.compress(x, key=Key()))
    # every block holds an outlier, so small values become its lowest one; rank-1 keeps all
    assert torch.equal(Rank1().decompress(Rank1().compress(x, key=Key())), x)
    assert blocks[0, 0] == 1 / 16


def test_signed_values_keep_their_sign():
    x = torch.randn(20, 30)
    rank1 = Rank1(map="DE", signed=True)
    back = rank1.decompress(rank1.compress(x, key=Key()))
    kept = back != 0
    assert kept.any()
    assert torch.equal(back[kept].sign(), x[kept].sign())
