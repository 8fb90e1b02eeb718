"""Stochastic rounding has no bias, also where bfloat16 is far from a group's bounds."""

import pytest
import torch

from memtrain.kernels.group import group

SEED = -12345678901234


def z_scores(x, codes, bounds, bits, step):
    """How many standard errors the mean of many decodings of the row `x` is off, [8]."""
    count = codes.shape[0]
    values = group.group_dequantize(codes, bounds, bits, 8, 8 * count).view(count, 8).double()
    place = (x.double() - bounds[0, 0].double()) / step
    chance = place - place.floor()
    error = step * (chance * (1 - chance) / count).sqrt()
    # The random numbers have 16 bits: a mean may be off by 2**-17 of a step.
    return ((values.mean(0) - x.double()).abs() - 2.0**-17 * step).clamp(min=0) / error


AWKWARD = [
    [1.0039, 1.0041, 1.2, 1.3333, 1.5, 1.7, 1.77, 1.8009],
    [-3.0077, -0.1, -0.003, 0.0011, 0.5, 1.1, 2.2, 2.9921],
    [1000.1, 1000.3, 1001.0, 1001.7, 1002.2, 1003.0, 1003.3, 1003.9],
]


@pytest.mark.parametrize("row", AWKWARD, ids=["ones", "signed", "offset"])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_stochastic_rounding_is_unbiased(row, bits):
    # 3 x 3 x 8 means; |z| > 5.5 has probability 3.8e-8, any of them 2.7e-6 (and the seed is fixed).
    x = torch.tensor(row)
    codes, bounds = group.group_quantize(x.repeat(40_000, 1), bits, 8, SEED)
    lo, hi = bounds[0].double()
    assert (z_scores(x, codes, bounds, bits, (hi - lo) / (2**bits - 1)) < 5.5).all()


def test_rounding_the_bounds_after_encoding_is_biased():
    # The flaw of ActNN, which the test above would find: encode with the exact bounds, decode with
    # the rounded ones.
    x = torch.tensor(AWKWARD[0])
    codes, bounds = group.group_quantize(x.repeat(40_000, 1), 4, 8, SEED, True, True)
    lo, hi = bounds[0].bfloat16().double()
    assert z_scores(x, codes, bounds.bfloat16(), 4, (hi - lo) / 15).max() > 50
