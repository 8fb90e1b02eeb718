"""Norms that quantise their normalised input in the same pass."""

import pytest
import torch
import torch.nn.functional as F

from memtrain.kernels.dispatch import backend
from memtrain.kernels.group import group
from memtrain.kernels.norm import norm
from memtrain.kernels.norm.norm import norm_quantize

FORMS = {
    "layer": {"centred": True, "narrow": False},
    "rms": {"centred": False, "narrow": False},
    "llama": {"centred": False, "narrow": True},
}
every_form = pytest.mark.parametrize("form", FORMS)


def example(rows, size, dtype, offset=3.0):
    torch.manual_seed(rows + size)
    x = (torch.randn(rows, size) * 2 + offset).to(dtype)
    return x, size, torch.randn(size), torch.randn(size)


def options(bits, group_size, seed=0, stochastic=True):
    return bits, group_size, seed, stochastic


def on(name, *arguments, **more):
    with backend(name):
        return norm_quantize(*arguments, **more)


def test_reference_matches_a_worked_case():
    """Mean 2, deviation 1; the root mean square of the same row is sqrt(5)."""
    x = torch.tensor([[1.0, 3.0] * 4])
    weight, bias = torch.full((8,), 2.0), torch.full((8,), 0.5)
    codes = options(1, 8, stochastic=False)
    y, rstd, packed, bounds = on("reference", x, 8, weight, bias, 0.0, codes=codes)
    assert y.tolist() == [[-1.5, 2.5] * 4]
    assert rstd.tolist() == [1.0]
    assert packed.tolist() == [[0b10101010]]
    assert bounds.tolist() == [[-1.0, 1.0]]
    y, rstd, *_ = on("reference", x, 8, None, None, 0.0, centred=False, codes=codes)
    torch.testing.assert_close(rstd, torch.tensor([5**-0.5]))
    torch.testing.assert_close(y, x * 5**-0.5)


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_triton_is_the_reference_but_for_the_order_of_sums(dtype, form):
    """Sums of n terms in two orders differ by less than n / 32 + 6 roundings of their magnitude;
    so the statistics, and a code by at most one step."""
    pytest.importorskip("triton")
    arguments = example(2, 768, dtype)
    x, _, weight, _ = arguments
    codes = options(4, 256, 5)
    y, rstd, packed, bounds = on("triton", *arguments, codes=codes, **FORMS[form])
    expected = on("reference", *arguments, codes=codes, **FORMS[form])
    error = 2 * (768 / 32 + 6) * 2.0**-24
    torch.testing.assert_close(rstd, expected[1], rtol=error, atol=0)
    # x_hat is off by that share of |x| * rstd; then y is rounded to its dtype.
    reach = (x.float().abs().amax() * rstd.amax()).item()
    slack = 2 * error * reach * weight.abs().amax().item()
    rounding = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 2.0**-22
    torch.testing.assert_close(y.float(), expected[0].float(), rtol=rounding, atol=slack + rounding)
    ours, theirs = (
        group.group_dequantize(c, b, 4, 256, x.numel()) for c, b in ((packed, bounds), expected[2:])
    )
    step = (expected[3][:, 1] - expected[3][:, 0]).float().amax().item() / 15
    assert (ours - theirs).abs().amax() <= 1.01 * step + 2.0**-7 * expected[3].abs().amax()


def test_triton_writes_each_deviation_once():
    """A row of more than 4,096 elements has a program for each part."""
    pytest.importorskip("triton")
    x, size, *parameters = example(2, 8192 + 256, torch.float32, 0.0)
    codes = options(4, 256, 5)
    y, rstd, _, bounds = on("triton", x, size, *parameters, codes=codes)
    expected = on("reference", x, size, *parameters, codes=codes)
    error = 2 * (size / 32 + 6) * 2.0**-24
    torch.testing.assert_close(rstd, expected[1], rtol=error, atol=0)
    torch.testing.assert_close(y, expected[0], rtol=error, atol=error * y.abs().max().item())
    torch.testing.assert_close(bounds.float(), expected[3].float(), rtol=2.0**-7, atol=error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_the_value_is_as_near_to_float64_as_torchs(dtype, offset):
    x, size, weight, bias = example(40, 768, dtype, offset)
    weight, bias = weight.to(dtype), bias.to(dtype)
    wide = [t.double() for t in (x, weight, bias)]
    for ours, theirs, truth in (
        (
            on("reference", x, size, weight, bias)[0],
            F.layer_norm(x, (size,), weight, bias),
            F.layer_norm(wide[0], (size,), *wide[1:]),
        ),
        (
            on("reference", x, size, weight, None, centred=False)[0],
            F.rms_norm(x, (size,), weight, 1e-5),
            F.rms_norm(wide[0], (size,), wide[1], 1e-5),
        ),
    ):
        mine, torchs = ((y.double() - truth).abs().amax() for y in (ours, theirs))
        assert mine <= 2 * torchs


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("reference", torch.nan),
        ("reference", torch.inf),
        ("reference", -torch.inf),
        ("triton", torch.inf),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of the interpreter
def test_bad_numbers_stay_in_their_row(name, bad):
    if name == "triton":
        pytest.importorskip("triton")
    x, size, *parameters = example(4, 64, torch.float32)
    codes = options(4, 32)
    clean = on(name, x, size, *parameters, codes=codes)
    x = x.clone()
    x[2, 5] = bad
    y, _, packed, bounds = on(name, x, size, *parameters, codes=codes)
    rows, groups = [0, 1, 3], [0, 1, 2, 3, 6, 7]
    assert torch.equal(y[rows], clean[0][rows])
    assert torch.equal(packed[groups], clean[2][groups])
    assert y[2].isnan().all()
    assert bounds[4:6].isnan().all()
    assert not packed[4:6].any()


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_a_constant_row_is_zero(name):
    if name == "triton":
        pytest.importorskip("triton")
    x = torch.full((2, 64), 7.0)
    y, rstd, packed, bounds = on(name, x, 64, codes=options(4, 64))
    assert not y.any()
    assert not packed.any()
    assert not bounds.any()
    torch.testing.assert_close(rstd, torch.full((2,), 1e-5**-0.5))


def test_what_does_not_fit_is_named():
    x = torch.ones(4, 64)
    for size in (48, 0, 2 * norm.MAX_ROW):
        with pytest.raises(ValueError, match=f"size={size}; allowed: multiples of group_size=32"):
            norm_quantize(x, size, codes=options(4, 32))
    with pytest.raises(ValueError, match="contiguous rows of 64 elements"):
        norm_quantize(x.t(), 64, codes=options(4, 32))
    with pytest.raises(ValueError, match="weight of 32 elements; allowed: 64"):
        norm_quantize(x, 64, torch.ones(32), codes=options(4, 32))
    with pytest.raises(TypeError, match=r"float64; allowed: float32"):
        norm_quantize(x.double(), 64, codes=options(4, 32))
    assert not norm.fits(x.double(), 64, 32)
    assert not norm.fits(x.t(), 4, 4)
    assert not norm.fits(x[:0], 64, 32)
