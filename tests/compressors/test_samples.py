"""Bits per sample: who gets them, what it costs, and that the mean stays the tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from memtrain.compressors import Group, Key, Samples
from memtrain.compressors.samples import sensitivity

FIRST = Key(seed=1)


def roundtrip(compressor, x, key=FIRST):
    packed = compressor.compress(x, key=key)
    return packed, compressor.decompress(packed)


def steps(x, width, group_size):
    """One step of each sample's groups: what the error stays below."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % group_size), value=torch.nan)
    groups = groups.view(len(x), -1, group_size)
    low = groups.nan_to_num(nan=torch.inf).amin(2)
    high = groups.nan_to_num(nan=-torch.inf).amax(2)
    # bounds are rounded outwards to bfloat16: each by less than 2**-7 of itself
    return ((high - low) + 2**-7 * (high.abs() + low.abs())) / (2**width - 1)


def test_the_most_sensitive_samples_get_the_most_bits():
    x = torch.randn(6, 512) * torch.tensor([1.0, 10, 2, 100, 3, 0.1])[:, None]
    compressor = Samples(bits=(8, 4, 2))
    packed, y = roundtrip(compressor, x)
    assert packed.tensors["order"].tolist() == [3, 1, 4, 2, 0, 5]
    given_bits = {3: 8, 1: 8, 4: 4, 2: 4, 0: 2, 5: 2}
    for sample, width in given_bits.items():
        error = (y[sample] - x[sample]).abs().view(2, 256).amax(1)
        step = steps(x[sample : sample + 1], width, 256)[0]
        assert (error <= step).all()
        assert (error > step / 4).any()  # and not at more bits than it was given


def test_sensitivity_worked_by_hand():
    x = torch.tensor([[0.0, 1, 2, 3, 0, 0, 0, 5, 7, 7], [4.0] * 10])
    # groups of 8: (5 - 0)**2 + (7 - 7)**2, the padding repeats the 7
    assert sensitivity(x, group_size=8).tolist() == [25.0, 0.0]
    assert sensitivity(torch.tensor(3.0)).tolist() == [0.0]
    assert sensitivity(torch.empty(3, 0)).tolist() == [0.0, 0.0, 0.0]
    assert sensitivity(torch.empty(0, 4)).shape == (0,)


@pytest.mark.parametrize("shape", [(1, 300), (1,), (), (5,), (0, 7), (4, 0), (3, 2, 5, 70)])
def test_shapes_and_bytes(shape):
    x = torch.randn(shape)
    compressor = Samples(bits=(5, 3, 1), group_size=64)
    packed, y = roundtrip(compressor, x)
    n = shape[0] if shape else 1
    size = torch.Size(shape[1:]).numel()
    length = min(64, max(8, -(-size // 8) * 8))
    groups = -(-size // length)
    codes = sum(width * groups * length // 8 for width in compressor.widths(n))
    order = n if len(set(compressor.widths(n))) > 1 else 0
    assert packed.nbytes == codes + 4 * n * groups + order
    assert y.shape == x.shape
    with FakeTensorMode() as mode:
        assert compressor.compress(mode.from_tensor(x), key=Key()).nbytes == packed.nbytes


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 90),
    st.lists(st.integers(1, 8), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_every_sample_comes_back_at_its_place(n, size, bits, dtype):
    # Two values, both of which the bounds hold: every width is exact, and samples differ.
    low = torch.arange(n)[:, None] * 3.0
    x = (low + (torch.arange(size) % 2)).to(dtype)
    assert torch.equal(roundtrip(Samples(bits=tuple(bits), group_size=32), x)[1], x)


def test_one_width_is_group_with_rows_padded():
    x = torch.randn(4, 512)
    mine = roundtrip(Samples(bits=(3,), rounding="nearest"), x)[1]
    assert torch.equal(mine, roundtrip(Group(bits=3, rounding="nearest"), x)[1])


def test_the_mean_over_keys_is_the_tensor():
    x = torch.randn(4, 64)
    compressor = Samples(bits=(4, 1), group_size=32)
    n = 1000
    total = torch.zeros_like(x, dtype=torch.float64)
    for seed in range(n):
        total += roundtrip(compressor, x, Key(seed=seed))[1]
    # a rounding's standard deviation is at most half a step; six of the mean's
    limit = 6 * 0.5 * steps(x, 1, 32).repeat_interleave(32, 1) / n**0.5
    assert ((total / n - x).abs() <= limit).all()


def test_widths_do_not_share_random_bits():
    x = torch.cat([torch.rand(1, 256) * 2, torch.rand(1, 256)])
    x[:, 0], x[0, 1], x[1, 1] = 0, 2, 1
    x[1] = x[0] / 2
    y = roundtrip(Samples(bits=(3, 2)), x)[1]
    ups = [(y[row] > x[row]) for row in (0, 1)]
    # Same draws would round nearly the same elements up; independent ones agree by half.
    assert 0.3 < (ups[0] == ups[1]).float().mean() < 0.7


@pytest.mark.parametrize("bits", [(2,), (4, 2, 1)])
def test_bad_numbers_change_no_other_element(bits):
    x = torch.randn(3, 512)
    x[1, 300] = x[1, 301]  # no extreme
    clean, others = roundtrip(Samples(bits=bits), x)[1], torch.ones(3, 512, dtype=torch.bool)
    others[1, 300] = False
    for bad in (torch.nan, torch.inf, -torch.inf):
        x[1, 300] = bad
        y = roundtrip(Samples(bits=bits), x)[1]
        assert torch.equal(y[others], clean[others])
        assert y.isfinite().all()


def test_equal_hand_outs_are_equal_values():
    assert Samples(bits=(1, 4)) == Samples(bits=[4, 1])
    assert hash(Samples(bits=[4, 1])) == hash(Samples(bits=(4, 1)))
    assert repr(Samples(bits=(2, 2))) == "Samples(bits=2, group_size=256)"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": ()}, "at least one width"),
        ({"bits": (4, 9)}, "bits=9"),
        ({"bits": (4, 2.5)}, "bits=2.5"),
        ({"group_size": 0}, "group_size=0"),
        ({"rounding": "up"}, "rounding='up'"),
    ],
)
def test_fields_out_of_range_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Samples(**fields)


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="int64"):
        Samples().compress(torch.arange(300), key=Key())
