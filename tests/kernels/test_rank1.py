"""The rank-1 quantiser: worked cases, and kernels equal to the reference."""

import math

import pytest
import torch

from memtrain.kernels import cpu
from memtrain.kernels.codebook import rank1
from memtrain.kernels.codebook.values import Codebook
from memtrain.kernels.dispatch import backend
from memtrain.kernels.packing import bits as bitpack

ALL = ["reference", "cpu", "triton"]
LINEAR = Codebook("Linear", 4, False)


@pytest.mark.parametrize("name", ALL)
def test_worked_case(name):
    # row maxima 4 and 1, column maxima 4 and 2: scales [[4, 2], [1, 1]]
    x = torch.tensor([[4.0, 2.0], [0.25, 1.0]])
    with backend(name):
        codes, scale = rank1.quantize(x, LINEAR)
        back = rank1.dequantize(codes, scale, LINEAR, shape=(2, 2))
    assert scale.tolist() == [4, 1, 4, 2]
    # normalised 1, 1, 1/4, 1 on the map (k + 1) / 16
    assert bitpack.unpack(codes, 4)[0, :4].tolist() == [15, 15, 3, 15]
    assert torch.equal(back, x)


def test_three_dimensions_take_the_least_of_three():
    x = torch.arange(1.0, 25.0).view(2, 3, 4)
    scale = rank1.maxima(x)
    assert scale.tolist() == [12, 24, 16, 20, 24, 21, 22, 23, 24]
    want = torch.stack(
        [torch.minimum(torch.tensor(s), x.amax((0, 2)).view(3, 1)) for s in (12.0, 24.0)]
    )
    want = torch.minimum(want, x.amax((0, 1)).view(1, 1, 4))
    least = torch.minimum(scale[:2, None], rank1.columns(scale, (2, 3, 4))[None])
    assert torch.equal(least.view(2, 3, 4), want)


@pytest.mark.parametrize("level", [0, 1], ids=["portable", "avx2"])
def test_other_instruction_sets_equal_the_reference(level):
    x = torch.rand(50, 77)
    want = rank1.quantize_reference(x, LINEAR)
    try:
        cpu.call("mt_limit_isa", level)
        with backend("cpu"):
            codes, _ = rank1.quantize(x, LINEAR)
            back = rank1.dequantize(*want, LINEAR, shape=x.shape)
    finally:
        cpu.call("mt_limit_isa", 2)
    assert torch.equal(codes, want[0])
    assert torch.equal(back, rank1.dequantize_reference(*want, LINEAR, x.shape))


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy, in the interpreter
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_spoil_one_element(name, bad):
    x = torch.rand(10, 20) + 0.5
    x[3, 4] = bad
    with backend(name):
        back = rank1.dequantize(*rank1.quantize(x, LINEAR), LINEAR, shape=x.shape)
    fine = torch.ones_like(x, dtype=torch.bool)
    fine[3, 4] = False
    assert not back[3, 4].isfinite()
    # every other element has a finite maximum of at most 1.5, so its step is below 1.5 / 16
    assert (back - x)[fine].abs().max() <= 1.5 / 32 + 1e-6


@pytest.mark.parametrize("name", ALL)
def test_zero_rows_and_subnormals_decode_to_nothing_big(name):
    x = torch.zeros(4, 300)
    x[1] = 1.0
    x[2] = 1e-42
    with backend(name):
        back = rank1.dequantize(*rank1.quantize(x, LINEAR), LINEAR, shape=x.shape)
    assert torch.equal(back[[0, 1, 3]], x[[0, 1, 3]])
    assert back[2].max() <= 1e-42


def test_one_dimension_is_refused():
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        rank1.quantize(torch.ones(5), LINEAR)
