"""Groups, and those of logarithms of which only exp() is asked: these are cut off far below."""

import math

import pytest
import torch

from memtrain.compressors import Group, Host, Identity, Key, Patch
from memtrain.compressors.log_group import SPAN, cut_, of_logarithms


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 0}, "bits=0; allowed: 1 to 8"),
        ({"bits": 9}, "bits=9; allowed: 1 to 8"),
        ({"bits": 2.5}, r"bits=2\.5; allowed: integers"),
        ({"bits": True}, "bits=True; allowed: integers"),
        ({"group_size": 0}, "group_size=0; allowed: multiples of 8 from 8 to 16384"),
        ({"group_size": 12}, "group_size=12; allowed: multiples of 8"),
        ({"group_size": 16392}, "group_size=16392; allowed: multiples of 8"),
        ({"rounding": "up"}, "rounding='up'; allowed: 'stochastic', 'nearest'"),
    ],
)
def test_wrong_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Group(**fields)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("kind", [Group, Patch])
def test_only_floats_are_taken(kind, dtype):
    with pytest.raises(TypeError, match=r"allowed: torch\.float32"):
        kind().compress(torch.zeros(8, dtype=dtype), key=Key())


@pytest.mark.parametrize("bits", range(1, 9))
def test_bytes_are_those_of_the_docstring(bits):
    compressor = Group(bits=bits, group_size=64)
    packed = compressor.compress(torch.randn(10, 100), key=Key())
    assert packed.nbytes == 16 * (64 * bits // 8 + 4)


@pytest.mark.parametrize("kind", [Group, Patch])
def test_the_key_feeds_stochastic_rounding_only(kind):
    x = torch.randn(1000)
    for rounding, differs in (("stochastic", True), ("nearest", False)):
        compressor = kind(rounding=rounding)
        payloads = [compressor.compress(x, key=Key(step=step)) for step in (1, 2)]
        codes = [payload.tensors[compressor.parts[0]] for payload in payloads]
        assert torch.equal(*codes) != differs


def around(x):
    code = Group(bits=8, group_size=8, rounding="nearest", floor=-SPAN)
    return code.decompress(code.compress(x, key=Key()))


def test_a_range_of_log_probabilities_ends_below_zero():
    # by hand: from -20 to 0 in 255 steps of 4 / 51; -1 is 242.25 steps up, -2 is 229.5
    x = torch.tensor([0.0, -1.0, -2.0, -1e9, -math.inf, -25.0, -20.0, -19.0])
    codes = [255, 242, 230, 0, 0, 0, 0, 13]  # -2 lies half way, which is rounded up
    expected = torch.tensor([-20 + code * 20 / 255 if code else -120 for code in codes])
    torch.testing.assert_close(around(x), expected)


def test_what_lies_within_the_range_is_quantised_as_by_a_group():
    torch.manual_seed(0)
    x, key = torch.randn(5, 77).log_softmax(-1), Key(seed=3)
    group = Group(bits=8, group_size=64)
    one, two = (kind.compress(x, key=key) for kind in (group, of_logarithms(group)))
    for name, part in one.tensors.items():
        assert torch.equal(part, two.tensors[name])
    assert around(torch.empty(0)).shape == (0,)


def test_a_group_is_replaced_and_other_compressors_are_not():
    group = Group(bits=3, group_size=64, whole_rows=True)
    found = of_logarithms(group)
    assert vars(found) == vars(group) | {"floor": -SPAN}
    assert of_logarithms(Host(inner=group)).inner == found != group
    assert of_logarithms(Identity()) == Identity()
    x = torch.tensor([-math.inf, 0.0])
    cut_(x, Identity())
    assert x.tolist() == [-math.inf, 0.0]
    cut_(x, group)
    assert x.tolist() == [-SPAN, 0.0]
