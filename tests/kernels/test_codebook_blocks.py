"""The codebook quantiser: published codebooks, worked cases, kernels equal to the reference."""

import pytest
import torch

from memtrain.kernels.codebook.quantize import (
    dequantize_blocks,
    quantize_blocks,
)
from memtrain.kernels.codebook.values import Codebook, codebook
from memtrain.kernels.dispatch import backend
from memtrain.kernels.packing import bits as bitpack

# fmt: off
SIGNED_DE = [
    -0.8875, -0.6625, -0.4375, -0.2125, -0.0775, -0.0325, -0.0055, 0,
    0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0,
]
UNSIGNED_DE = [
    0, 0.00325, 0.00775, 0.02125, 0.04375, 0.06625, 0.08875, 0.15625,
    0.26875, 0.38125, 0.49375, 0.60625, 0.71875, 0.83125, 0.94375, 1.0,
]
# fmt: on
def test_codebooks_have_the_published_values():
    assert codebook("DE", signed=True) == pytest.approx(SIGNED_DE, abs=1e-15)
    assert codebook("DE", signed=False) == pytest.approx(UNSIGNED_DE, abs=1e-15)
    assert codebook("DE-0", signed=False) == pytest.approx([0.00325, *UNSIGNED_DE[1:]], abs=1e-15)
    assert codebook("Linear", signed=False) == tuple(k / 16 for k in range(1, 17))
    linear = codebook("Linear", signed=True)
    assert linear == pytest.approx(torch.linspace(-1, 1, 16, dtype=torch.float64).tolist())


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_worked_case(name):
    # scale 2: the normalised values are 1, -0.8, 0.1, 0 and -1, which has no code of its own;
    # 0.145 is the midpoint of 0.0775 and 0.2125
    x = torch.tensor([2.0, -1.6, 0.2, 0.0, -2.0, 0.28])
    with backend(name):
        codes, scale = quantize_blocks(x, Codebook("DE", 4, True), block_size=128)
    assert scale.tolist() == [2.0]
    assert bitpack.unpack(codes, 4)[0, :7].tolist() == [15, 0, 10, 7, 0, 10, 7]


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_the_first_of_the_largest_magnitude_is_the_scale(name):
    x = torch.zeros(4, 128)
    x[0, 5], x[0, 70] = -2.0, 2.0
    x[1, 5], x[1, 70] = 2.0, -2.0
    x[2, 127] = -1e-42
    x[3] = -0.0
    with backend(name):
        codes, scale = quantize_blocks(x, Codebook("DE", 4, True), block_size=128)
        back = dequantize_blocks(codes, scale, Codebook("DE", 4, True), numel=512).view(4, 128)
        unsigned = quantize_blocks(x, Codebook("DE", 4, False), block_size=128)[1]
    assert scale.tolist() == [-2.0, 2.0, x[2, 127].item(), 0.0]
    assert not scale[3].signbit()
    assert unsigned.tolist() == scale.abs().tolist()
    assert back[0, [5, 70]].tolist() == [-2.0, pytest.approx(2 * 0.8875)]
    assert torch.equal(back[1], -back[0])
    assert back[2, 127] == x[2, 127]


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_ties_go_to_the_lower_index(name):
    # Linear: values k / 16, so the midpoints (2 k + 1) / 32 are exact
    x = torch.tensor([1.0, 3 / 32, 5 / 32, 31 / 32])
    with backend(name):
        codes, _ = quantize_blocks(x, Codebook("Linear", 4, False), block_size=128)
    assert bitpack.unpack(codes, 4)[0, :4].tolist() == [15, 0, 1, 14]
