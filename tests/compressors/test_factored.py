"""The factored second moment."""

import math

import pytest
import torch

from memtrain.compressors import Factored, Key


def round_trip(x):
    return Factored().decompress(Factored().compress(x, key=Key()))


@pytest.mark.parametrize("shape", [(30, 50), (6, 3, 5, 5), (1, 9)])
def test_rank_one_tensors_come_back(shape):
    row, col = torch.rand(shape[0], 1) + 0.1, torch.rand(1, math.prod(shape[1:])) + 0.1
    x = (row * col).view(shape)
    # means over at most 75 elements, one product, one division: within 80 roundings
    assert torch.allclose(round_trip(x), x, rtol=80 * 2**-24, atol=0)


def test_row_and_column_means_are_kept():
    x = torch.rand(30, 50)
    back = round_trip(x)
    assert torch.allclose(back.mean(0), x.mean(0), rtol=80 * 2**-24, atol=0)
    assert torch.allclose(back.mean(1), x.mean(1), rtol=80 * 2**-24, atol=0)


def test_zeros_stay_zeros():
    assert torch.equal(round_trip(torch.zeros(4, 5)), torch.zeros(4, 5))
    x = torch.rand(4, 5)
    x[2] = 0
    back = round_trip(x)
    assert torch.equal(back[2], x[2])
    assert back.isfinite().all()


def test_bytes_are_rows_and_columns():
    packed = Factored().compress(torch.rand(64, 3, 7, 7, dtype=torch.float64), key=Key())
    assert packed.nbytes == 4 * (64 + 147)
    assert Factored().decompress(packed).dtype == torch.float64


def test_one_dimension_is_refused():
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        Factored().compress(torch.ones(5), key=Key())
