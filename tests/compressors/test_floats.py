"""Byte codes: every number of a format comes back, bit for bit."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memtrain.compressors import Float, Key
from memtrain.plan.compressor_specs import build_compressor
from memtrain.precision import FP8_FORWARD, FP16, FloatFormat, named_format


def test_only_zero_loses_its_sign_and_infinity_its_name():
    x = torch.tensor([-0.0, torch.inf, -torch.inf, torch.nan])
    gradients, ieee = Float(format="fp8_backward"), Float(format="e5m2")
    y = gradients.decompress(gradients.compress(x, key=Key()))
    assert not y[0].signbit()
    assert y[1:].isnan().all()
    y = ieee.decompress(ieee.compress(x, key=Key()))
    assert y[0].signbit()
    assert y[1:3].tolist() == [torch.inf, -torch.inf]
    assert y[3].isnan()


def test_float16_that_rounds_past_its_largest_saturates():
    wide = Float(format=FloatFormat(5, 2))  # up to 114688: 65504 would be 65536
    x = torch.tensor([65504.0, -65504.0], dtype=torch.float16)
    assert wide.decompress(wide.compress(x, key=Key())).tolist() == [57344.0, -57344.0]


def test_a_fake_tensor_may_be_the_first():
    with FakeTensorMode():
        packed = Float(format="1-5-9").compress(torch.ones(3, dtype=torch.float16), key=Key())
    assert packed.nbytes == 6


def test_a_config_names_it():
    assert build_compressor({"name": "float", "format": "e4m3fn"}) == Float(format="e4m3fn")
    assert build_compressor({"name": "float"}) == Float(format="fp8_forward")


def test_widths_name_a_format():
    assert named_format("1-6-9") == FP16
    assert named_format("1-4-3+4") == FP8_FORWARD
    assert named_format("1-3-4").max == 2.0**4 * (2 - 2.0**-4)


@pytest.mark.parametrize("name", ["fp9", "1-4", "1-4-3-4", "", "E4M3"])
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match=r"unknown; allowed: fp8_forward, .*, 1-E-M, 1-E-M\+bias"):
        Float(format=name)


def test_formats_that_cannot_be_stored_are_refused():
    with pytest.raises(ValueError, match="17 bits with the sign; allowed: 3 to 16"):
        Float(format="1-8-8")
    with pytest.raises(TypeError, match="format=8; allowed: a name or a FloatFormat"):
        Float(format=8)
    with pytest.raises(TypeError, match=r"torch.float64 is not allowed"):
        Float().compress(torch.ones(3, dtype=torch.float64), key=Key())
