"""Float formats' kernels: equal backends, any strides, extreme numbers, unbiased rounding."""

import pytest
import torch

from memtrain.kernels.dispatch import backend
from memtrain.kernels.floats import rounding
from memtrain.precision import BF16, E4M3FN, E5M2, FP8_BACKWARD, FP8_FORWARD, FP16, FloatFormat

BACKENDS = ["reference", "triton"]
FORMATS = {
    "forward": FP8_FORWARD,
    "backward": FP8_BACKWARD,
    "fp16": FP16,
    "bf16": BF16,
    "e4m3fn": E4M3FN,
    "e5m2": E5M2,
    "forward-even-inf": FloatFormat(4, 3, 4, "inf", "even"),
    "no-mantissa": FloatFormat(3, 0, 0, "saturate", "even"),
    "three-bits": FloatFormat(1, 1, -3),
    "long-mantissa": FloatFormat(1, 14),
    "tiny": FloatFormat(4, 3, bias=117),
    "huge": FloatFormat(4, 3, bias=-119, overflow="inf"),
    "stochastic": FloatFormat(4, 3, 4, rounding="stochastic"),
    "stochastic-inf": FloatFormat(5, 10, 0, "inf", "stochastic", "ieee"),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bits(x):
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def same(a, b):
    """Equal bits, any NaN counting as another."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    nan = a.isnan() & b.isnan()
    return bool(((bits(a) == bits(b)) | nan).all())


def numbers(n, form, dtype=torch.float32):
    """Any float32 bits, numbers of the format's own range, ties and special numbers."""
    words = torch.randint(-(2**31), 2**31, (n,), dtype=torch.int64).int().view(torch.float32)
    low, high = torch.tensor([form.min_subnormal / 8, form.max * 4]).double().log2()
    spread = torch.exp2(low + (high - low) * torch.rand(n).double()).float()
    spread = spread * torch.randint(0, 2, (n,)).mul(2).sub(1)
    grid = form.decode(torch.randint(0, 2 ** (form.bits - 1) - 2, (n,)).to(codes(form)))
    grid = grid + form.min_subnormal / 2
    ends = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 2.0**-149, form.max])
    return torch.cat([words, spread, grid, ends]).to(dtype)


def codes(form):
    return torch.uint8 if form.bits <= 8 else torch.int16


def all_three(x, form, seed=5):
    return *form.round_count(x, seed=seed), form.encode(x, seed=seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_triton_equals_the_reference(dtype, form):
    x = numbers(700, form, dtype)
    with backend("reference"):
        expected = all_three(x, form)
    with backend("triton"):
        got = all_three(x, form)
    assert same(got[0], expected[0])
    assert torch.equal(got[2], expected[2])
    assert got[1].item() == expected[1].item()
    assert got[1].dtype == expected[1].dtype == torch.int64
    assert got[1].item() > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_codes_are_those_of_rounded_numbers(dtype, form):
    every = torch.arange(2**form.bits)
    code = (every if form.bits <= 8 else every - 2 ** (form.bits - 1)).to(codes(form))
    assert same(form.decode(code, dtype), rounding.decode_reference(code, form.layout, dtype))
    numbers = form.decode(code)
    back = form.encode(numbers)
    assert same(form.decode(back), numbers)
    assert torch.equal(back[~numbers.isnan()], code[~numbers.isnan()])


@pytest.mark.parametrize("name", BACKENDS)
def test_any_strides(name):
    x = torch.randn(6, 8, 10) * 20
    for view in (x.permute(2, 0, 1), x[:, ::2], x[:1].expand(3, 8, 10), x[1:, 3]):
        whole = view.contiguous()
        with backend(name):
            y, count = FP8_FORWARD.round_count(view)
            code = FP8_FORWARD.encode(view)
            back = FP8_FORWARD.decode(code)
        assert torch.equal(y, FP8_FORWARD.round(whole))
        assert torch.equal(code, FP8_FORWARD.encode(whole))
        assert torch.equal(back, y)
        assert count == (whole.abs() >= 31).sum()
    assert FP8_FORWARD.round(x.permute(2, 0, 1)).stride() == x.permute(2, 0, 1).stride()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [FP8_FORWARD, E5M2, FORMATS["stochastic"]])
def test_in_place_is_the_same(name, dtype, form):
    x = numbers(700, form, dtype)[:2100]
    for view in (x.clone(), x.clone().view(3, 700).t(), x.clone()[::2], x.clone()[:0]):
        with backend(name):
            expected, count = form.round_count(view, seed=3)
            assert form.round_count_(view, seed=3).item() == count.item()
        assert same(view, expected)


def test_in_place_is_seen_by_autograd():
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    with torch.no_grad():
        FP8_FORWARD.round_count_(y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", BACKENDS)
def test_stochastic_rounding_is_unbiased_and_repeats(name):
    form, n = FloatFormat(4, 3, 4, rounding="stochastic"), 4096 if name == "triton" else 16384
    low, step = 1.0, 2.0**-3
    shares = (0.01, 0.3, 0.5, 0.9)
    with backend(name):
        for share in shares:
            x = torch.full((n,), low + share * step)
            y = form.round(x, seed=3)
            assert set(y.tolist()) == {low, low + step}
            up = ((y.double() - low) / step).mean().item()
            exact = (x[0].double().item() - low) / step
            # five standard deviations of n independent choices, and the probability's resolution
            assert abs(up - exact) < 5 * (exact * (1 - exact) / n) ** 0.5 + 2**-17
        assert torch.equal(form.round(x, seed=3), y)
        assert not torch.equal(form.round(x, seed=4), y)


def test_stochastic_rounding_keeps_the_mean_below_the_least_number():
    form, n, least = FORMATS["stochastic"], 2**20, FORMATS["stochastic"].min_subnormal
    for share in (2.0**-3, 2.0**-9, 2.0**-13):  # rounded to nearest, all would be lost
        x = torch.full((n,), -share * least)  # of several pieces
        y = rounding.round_reference(x, form.layout, 11)[0]
        assert torch.equal(form.round(x, seed=11), y)
        assert set(y.tolist()) == {0.0, -least}
        mean = (y.double() / -least).mean().item()
        assert abs(mean - share) < 5 * (share / n) ** 0.5
    exact = form.decode(torch.arange(128, dtype=torch.uint8))
    assert torch.equal(form.round(exact, seed=1), exact)


def test_the_dtype_of_x_bounds_the_largest_number():
    # float16 ends at 65504 = 2**16 - 32; 1-5-2 holds 57344 and 65536 there.
    x = torch.tensor([57344.0, 61000.0, 61440.0, 65504.0], dtype=torch.float16)
    y, count = FP8_BACKWARD.round_count(x)
    assert y.tolist() == [57344.0, 57344.0, torch.inf, torch.inf]
    assert count.item() == 2
    y, count = FloatFormat(5, 2).round_count(x)
    assert y.tolist() == [57344.0] * 4
    assert count.item() == 2
    # The codes know no such bound.
    assert FP8_BACKWARD.decode(FP8_BACKWARD.encode(x)).tolist() == [57344.0] * 2 + [65536.0] * 2
    # 1-6-9 ends at 2**32 (2 - 2**-9): bfloat16 holds 2**32 (2 - 2**-7) below it.
    x = torch.tensor([2.0**33, -(2.0**40), 2.0**32 * 1.9921875], dtype=torch.bfloat16)
    y, count = FP16.round_count(x)
    assert y.tolist() == [2.0**32 * 1.9921875, -(2.0**32) * 1.9921875, 2.0**32 * 1.9921875]
    assert count.item() == 2


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match=r"torch\.float64 is not allowed"):
        FP8_FORWARD.round(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"torch\.int32 is not allowed"):
        FP8_FORWARD.encode(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"torch\.uint8 is not allowed; allowed: torch\.int16"):
        FP16.decode(torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"torch\.float64 is not allowed"):
        FP16.decode(torch.zeros(2, dtype=torch.int16), torch.float64)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nans_sign_is_lost(name, dtype):
    nan = torch.copysign(torch.tensor(torch.nan), torch.tensor(-1.0))
    for form in (FP8_FORWARD, BF16, E4M3FN):
        with backend(name):
            for n in (1, 37):  # alone and in a vector
                codes = form.encode(nan.expand(n).to(dtype))
                assert (codes == codes[0]).all()
                assert codes[0] == form.encode(torch.tensor([torch.nan]))[0]
