"""Split weights: bit-exact round trips, stated bounds, equal backends, unbiased rounding."""

import pytest
import torch

from memtrain.kernels.dispatch import backend
from memtrain.kernels.step import split as step_split
from memtrain.kernels.step.split import merge, split, split_reference

FORMS = [torch.int8, torch.int16, None]
BF16 = torch.bfloat16


def floats(*patterns):
    return torch.tensor([p - 2**32 if p >> 31 else p for p in patterns]).int().view(torch.float32)


def bits(x):
    return x.contiguous().view(torch.int32)


def every_upper_half(lower):
    """All 65,536 upper halves of a float32 above one lower half."""
    words = (torch.arange(2**16) << 16) | lower
    return torch.where(words > 2**31 - 1, words - 2**32, words).int().view(torch.float32)


def halves(master, form, dtype=BF16, **more):
    weight = torch.empty_like(master, dtype=dtype)
    correction = None if form is None else torch.empty_like(master, dtype=form)
    split(master, weight, correction, **more)
    return weight, correction


def test_worked_cases():
    # 0x3F808000 lies between the bfloat16 numbers 0x3F80 and 0x3F81: a tie.
    x = floats(0x3F808000, 0x3F807FFF, 0xBF800081, 0x3F810180)
    weight, correction = halves(x, torch.int16)
    assert (
        bits(weight.float()).tolist()
        == bits(floats(0x3F810000, 0x3F800000, 0xBF800000, 0x3F810000)).tolist()
    )
    assert correction.tolist() == [-0x8000, 0x7FFF, 0x81, 0x180]
    weight, correction = halves(x, torch.int8)
    # Lower bytes: 00, FF (up), 81 (up), 80 (a tie: to the even 0x02).
    assert correction.tolist() == [-0x80, -0x80, 1, 2]
    assert (
        bits(merge(weight, correction)).tolist()
        == bits(floats(0x3F808000, 0x3F808000, 0xBF800100, 0x3F810200)).tolist()
    )


@pytest.mark.parametrize("lower", [0, 1, 0x7F, 0x80, 0x81, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234])
def test_sixteen_bits_lose_nothing(lower):
    x = every_upper_half(lower)
    weight, correction = halves(x, torch.int16)
    back = merge(weight, correction)
    number = ~x.isnan()
    assert torch.equal(bits(back)[number], bits(x)[number])
    assert back[~number].isnan().all()
    assert torch.equal(weight.isnan(), ~number)
    # the weight is a nearest one: as near as torch's own rounding
    finite = x.isfinite() & weight.isfinite()
    assert torch.equal(
        (weight.double() - x.double()).abs()[finite],
        (x.to(BF16).double() - x.double()).abs()[finite],
    )
    assert torch.equal(weight.isinf(), x.to(BF16).isinf())


@pytest.mark.parametrize("lower", [0, 1, 0x7F, 0x80, 0x81, 0x17F, 0x180, 0x7FFF, 0x8000, 0xFFFF])
def test_eight_bits_lose_half_an_ulp_of_24_bits(lower):
    x = every_upper_half(lower)
    x = x[x.isfinite() & (x.abs() < 3.4e38)].double()
    back = merge(*halves(x.float(), torch.int8)).double()
    _, exponent = torch.frexp(x)
    ulp = torch.ldexp(torch.ones_like(x), (exponent - 16).clamp(min=-141))  # 15 mantissa bits
    assert ((back - x).abs() <= ulp / 2).all()
    normal = x.abs() >= 2.0**-126
    assert ((back - x).abs()[normal] <= 2.0**-16 * x.abs()[normal]).all()
    assert ((x == 0) == (back == 0))[normal].all()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_special_numbers(form):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 0.0])
    back = merge(*halves(x, form))
    assert torch.equal(back[:2], x[:2])
    assert back[2].isnan()
    assert bits(back)[3:].tolist() == [-(2**31), 0]
    top = floats(0x7F7FFFFF)  # float32's largest number
    assert merge(*halves(top, form)).item() == (top.item() if form == torch.int16 else torch.inf)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_large_weight_goes_in_pieces(form, dtype, monkeypatch):
    x = torch.randint(-(2**31), 2**31, (7, 9, 5), dtype=torch.int64).int().view(torch.float32)
    for view in (x, x.mT, x[0, 0]):
        weight, correction = halves(view, form, dtype)
        master = merge(weight, correction)
        monkeypatch.setattr(step_split, "_PIECE", 4)
        found = halves(view, form, dtype)
        assert torch.equal(found[0].view(torch.int16), weight.view(torch.int16))
        assert form is None or torch.equal(found[1], correction)
        assert torch.equal(bits(merge(*found)), bits(master))
        monkeypatch.undo()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_any_strides(form):
    x = torch.randn(6, 8, 10)
    for view in (x.permute(2, 0, 1), x[:, ::2], x[:1].expand(3, 8, 10)):
        like = merge(*halves(view.contiguous(), form))
        weight, correction = halves(view, form)
        assert torch.equal(merge(weight, correction), like)
        gap = torch.zeros(*view.shape, 2, dtype=BF16)[..., 0]  # a weight that is not dense
        split(view, gap, correction)
        assert torch.equal(gap, weight)


@pytest.mark.parametrize("name", ["cpu", "triton"])
@pytest.mark.parametrize("shape", [(1,), (1024,), (5000,), (70, 31)], ids=str)
def test_stochastic_backends_equal_the_reference(name, shape):
    x = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).int().view(torch.float32)
    for view in (x, x.t()):
        expected = torch.empty_like(view, dtype=BF16)
        split_reference(view, expected, seed=7, stochastic=True)
        with backend(name):
            weight, _ = halves(view, None, seed=7, stochastic=True)
        assert torch.equal(weight.isnan(), expected.isnan())
        number = ~expected.isnan()
        assert torch.equal(weight.view(torch.int16)[number], expected.view(torch.int16)[number])


def test_stochastic_rounding_is_unbiased_and_repeats():
    low, step = 1.0, 2.0**-7  # neighbours of bfloat16
    n = 2**16
    for share in (0.01, 0.3, 0.5, 0.9):
        x = torch.full((n,), low + share * step)
        weight, _ = halves(x, None, seed=3, stochastic=True)
        assert set(weight.tolist()) == {low, low + step}
        up = ((weight.double() - low) / step).mean().item()
        exact = (x[0].double().item() - low) / step
        # five standard deviations of n independent choices
        assert abs(up - exact) < 5 * (exact * (1 - exact) / n) ** 0.5
        again, _ = halves(x, None, seed=3, stochastic=True)
        other, _ = halves(x, None, seed=4, stochastic=True)
        assert torch.equal(again, weight)
        assert not torch.equal(other, weight)
    exact = torch.randn(1000).to(BF16)
    assert torch.equal(halves(exact.float(), None, stochastic=True)[0], exact)


def test_float16_corrections():
    words = torch.randint(0, 2**31, (20000,), dtype=torch.int64).int()
    x = words.view(torch.float32)
    x = x[(x >= 2.0**-14) & (x <= 65504)]
    x = torch.cat([x, -x, torch.randn(2000)])
    x = x[x.abs() >= 2.0**-14]
    assert torch.equal(merge(*halves(x, torch.int16, torch.float16)), x)
    weight, correction = halves(x, torch.int8, torch.float16)
    assert torch.equal(weight, x.half())
    _, exponent = torch.frexp(weight.double())
    ulp = torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - 11)
    assert ((merge(weight, correction).double() - x.double()).abs() <= ulp * 2**-8).all()
    odd = torch.tensor([torch.inf, torch.nan, 1e6, -0.0, 2.0**-30])
    back = merge(*halves(odd, torch.int16, torch.float16))
    assert back[0] == torch.inf
    assert back[1].isnan()
    assert back[2] == torch.inf
    assert back[3:].tolist() == [0.0, 2.0**-30]


def test_wrong_arguments_are_refused():
    x, weight = torch.zeros(3), torch.zeros(3, dtype=BF16)
    with pytest.raises(TypeError, match=r"master is torch\.float64"):
        split(x.double(), weight)
    with pytest.raises(TypeError, match=r"weight is torch\.float32"):
        split(x, x)
    with pytest.raises(TypeError, match=r"correction is torch\.uint8"):
        split(x, weight, torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"correction has shape \(2,\)"):
        merge(weight, torch.zeros(2, dtype=torch.int8))
    with pytest.raises(ValueError, match="stochastic=True needs"):
        split(x, weight, torch.zeros(3, dtype=torch.int8), stochastic=True)
