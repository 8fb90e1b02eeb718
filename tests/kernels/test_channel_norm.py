"""Norms over channels whose normalised input is only ever codes."""

import pytest
import torch
import torch.nn.functional as F

from memtrain.kernels import cpu
from memtrain.kernels.dispatch import backend
from memtrain.kernels.group import group
from memtrain.kernels.norm import channel_norm
from memtrain.kernels.norm.channel_norm import (
    Channels,
    backward_reference,
    channel_norm_backward,
    channel_norm_quantize,
)
from memtrain.kernels.norm.norm import Codes

PLACES = {
    "images": Channels(1, 4, 7, 50),
    "one channel": Channels(1, 4, 1, 50),
    "channels last": Channels(1, 120, 7, 1),
    "few elements": Channels(1, 40, 5, 4),
    "one row": Channels(1, 1, 9, 40),
    "groups": Channels(4, 1, 12, 30, 4),
    "groups, channels last": Channels(4, 30, 12, 1, 4),
    "groups, few elements": Channels(3, 9, 6, 5, 2),
}
every_place = pytest.mark.parametrize("place", PLACES)
OPTIONS = (Codes(4, 256, 5), Codes(3, 8, -9, False, True), Codes(8, 104, 3))


def example(where, dtype=torch.float32):
    """An input, its statistics, a weight and a gradient."""
    n = where.outer * where.middle * where.channels * where.inner
    statistics = where.outer * where.channels // where.together
    x = (torch.randn(n) * 2 + 3).to(dtype)
    mean, rstd = torch.randn(statistics) + 3, torch.rand(statistics) + 0.3
    return x, mean, rstd, torch.randn(where.channels), torch.randn(n).to(dtype)


def on(name, where, codes, x, mean, rstd, weight, dy):
    with backend(name):
        payload = channel_norm_quantize(x, mean, rstd, where, codes)
        options = (where, codes.bits, codes.group_size)
        return payload, channel_norm_backward(dy, *payload, rstd, weight, *options)


def check(found, expected, where, codes, arguments):
    """Codes are equal. A sum's parts of up to 140 terms are added in float32 (`kTile / kLanes`
    and the halves; 64 rows and a tile's), so that it is off by 140 roundings of its terms'
    magnitudes; dx by what the sums are, four roundings of its terms, and that of its dtype. The
    mean of x_hat is such a sum, too: it meets dy's."""
    (payload, gradients), (expected_payload, expected_gradients) = found, expected
    assert all(torch.equal(a, b) for a, b in zip(payload, expected_payload, strict=True))
    _, _, rstd, weight, dy = arguments
    x_hat = group.group_dequantize(*payload, codes.bits, codes.group_size, dy.numel())
    shape = where[:4]
    size, hat = dy.float().abs(), x_hat.abs()
    terms = torch.stack([size, size * hat, hat]).view(3, *shape).sum((2, 4))
    count = where.middle * where.inner * where.together
    mean = terms[2].unflatten(1, (-1, where.together)).sum(2) / count
    terms = terms[:2] + torch.stack(
        [0 * terms[0], 2 * mean.repeat_interleave(where.together, 1) * terms[0]]
    )
    error = 140 * 2.0**-24 * terms
    for ours, theirs, e in zip(gradients[:0:-1], expected_gradients[:0:-1], error, strict=True):
        assert ((ours - theirs).abs() <= e.sum(0) + 2.0**-22 * theirs.abs()).all()
    each = rstd.view(where.outer, -1)
    shared = (weight.abs() * torch.stack([error, terms])).unflatten(3, (-1, where.together)).sum(4)
    shared = (each * shared / count).repeat_interleave(where.together, 3)[..., None, :, None]
    scale = (each.repeat_interleave(where.together, 1) * weight).abs()[:, None, :, None]
    size, hat = size.view(shape) * scale, hat.view(shape)
    slack = shared[0, 0] + shared[0, 1] * hat
    slack = slack + 2.0**-22 * (size + shared[1, 0] + shared[1, 1] * hat)
    ours, theirs = (g[0].float().view(shape) for g in (gradients, expected_gradients))
    rounding = 0 if dy.dtype == torch.float32 else torch.finfo(dy.dtype).eps
    assert ((ours - theirs).abs() <= slack + rounding * theirs.abs() + 2.0**-24).all()


def test_reference_matches_a_worked_case():
    """Two channels of four, x_hat 1 or -1: sums 2 and 1; g = dy - 0.5 - x_hat * 0.25."""
    where = Channels(1, 2, 2, 2)
    x = torch.tensor([3.0, 1, 14, 6, 3, 1, 14, 6])
    mean, rstd = torch.tensor([2.0, 10.0]), torch.tensor([1.0, 0.25])
    codes = Codes(1, 8, stochastic=False)
    dy = torch.tensor([1.5, 0.5, 0, 0, 0, 0, 0, 0])
    weight = torch.tensor([2.0, 3.0])
    payload, (dx, dweight, dbias) = on("reference", where, codes, x, mean, rstd, weight, dy)
    assert payload[0].tolist() == [[0b01010101]]
    assert payload[1].tolist() == [[-1.0, 1.0]]
    assert dbias.tolist() == [2.0, 0.0]
    assert dweight.tolist() == [1.0, 0.0]
    assert dx.tolist() == [1.5, 0.5, 0, 0, -1.5, -0.5, 0, 0]
    where = Channels(1, 2, 2, 2, 2)  # both channels share their statistics: eighths
    payload, (dx, *_) = on("reference", where, codes, x, mean[:1], rstd[:1], weight, dy)
    lo, hi = payload[1][0].tolist()
    x_hat = torch.tensor([lo, lo, hi, lo, lo, lo, hi, lo])
    g = dy * weight[0]
    h = x_hat - x_hat.mean()
    torch.testing.assert_close(dx, g - g.mean() - h * (g * h).mean())


@pytest.mark.parametrize("groups", [0, 2])
@pytest.mark.parametrize("last", [False, True])
def test_reference_is_the_derivative(groups, last):
    """Of torch's norm in float64, from an x_hat that nobody has quantised; and it is rounded to
    float32 at each of four steps."""
    x = torch.randn(3, 6, 4, 5, dtype=torch.float64)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = (torch.randn(6, dtype=torch.float64).requires_grad_() for _ in range(2))
    dy = torch.randn_like(x)
    x.requires_grad_()
    if groups:
        y = F.group_norm(x, groups, weight, bias)
        rows = x.detach().reshape(3 * groups, -1)
        where = Channels(3, 20, 6, 1, 3) if last else Channels(3, 1, 6, 20, 3)
    else:
        y = F.batch_norm(x, None, None, weight, bias, training=True)
        rows = x.detach().transpose(0, 1).reshape(6, -1)
        where = Channels(1, 60, 6, 1) if last else Channels(1, 3, 6, 20)
    y.backward(dy)
    rstd = (rows.var(1, correction=0) + 1e-5).rsqrt()
    with torch.no_grad():
        x_hat = (y - bias.view(-1, 1, 1)) / weight.view(-1, 1, 1)
    order = (0, 2, 3, 1) if last else (0, 1, 2, 3)
    flat = [t.float().permute(order).reshape(-1) for t in (dy, x_hat)]
    numbers = (rstd.float(), weight.detach().float())
    found = backward_reference(*flat, *numbers, where)
    exact = (x.grad.permute(order).reshape(-1), weight.grad, bias.grad)
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours - theirs).abs().max() <= 8 * 2.0**-24 * theirs.abs().max() * len(order)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@every_place
def test_the_mean_of_a_gradient_goes_nowhere_whatever_codes_add_up_to(name, place):
    """dx adds up to 0, and is 0 where g is a constant: neither is so of an x_hat with a mean."""
    where, codes = PLACES[place], Codes(2, 32, 5)
    x, mean, rstd, weight, dy = example(where)
    payload, (dx, *_) = on(name, where, codes, x, mean, rstd, weight, dy)
    hat = group.group_dequantize(*payload, 2, 32, dy.numel())
    # Each element of dx has four roundings of terms of at most this size.
    size = rstd.max() * weight.abs().max() * dy.abs().max() * (1 + hat.abs().max() ** 2)
    terms = where.middle * where.inner * where.together
    sums = dx.view(where[:4]).double().sum((1, 3)).unflatten(1, (-1, where.together)).sum(2)
    assert (sums.abs() <= 4 * 2.0**-24 * size * terms).all()
    _, (dx, *_) = on(name, where, codes, x, mean, rstd, 0 * weight + 2, 0 * dy + 3)
    assert (dx.abs() <= 4 * 2.0**-24 * 6 * rstd.max() * (1 + hat.abs().max() ** 2)).all()


@every_place
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_c_library_equals_the_reference(place, dtype):
    where = PLACES[place]
    arguments = example(where, dtype)
    for codes in OPTIONS:
        found, expected = (on(name, where, codes, *arguments) for name in ("cpu", "reference"))
        assert found[1][0].dtype == dtype
        check(found, expected, where, codes, arguments)


@pytest.mark.parametrize(
    "where",
    [
        Channels(1, 3, 2, 20000),  # parts of a channel
        Channels(1, 9000, 10, 1),
        Channels(2, 9000, 6, 1, 2),  # parts of each of two outer parts
        Channels(3, 1, 30, 1000, 3),  # channels of a thread each
    ],
    ids=str,
)
def test_many_elements_and_threads_do_not_change_the_result(where):
    arguments, before = example(where), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(on("cpu", where, Codes(4, 256, 5), *arguments))
    finally:
        torch.set_num_threads(before)
    for ours, theirs in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    expected = on("reference", where, Codes(4, 256, 5), *arguments)
    check(results[0], expected, where, Codes(4, 256, 5), arguments)


@pytest.mark.parametrize("place", ["images", "channels last"])
def test_every_instruction_set_equals_the_reference(place):
    where, codes = PLACES[place], OPTIONS[0]
    arguments = example(where)
    expected = on("reference", where, codes, *arguments)
    try:
        for level in (0, 1, 2):
            cpu.call("mt_limit_isa", level)
            check(on("cpu", where, codes, *arguments), expected, where, codes, arguments)
    finally:
        cpu.call("mt_limit_isa", 2)


@every_place
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codes", OPTIONS, ids=lambda codes: f"{codes.bits} bits")
def test_triton_equals_the_reference(place, dtype, codes):
    pytest.importorskip("triton")
    where = PLACES[place]
    arguments = example(where, dtype)
    found, expected = (on(name, where, codes, *arguments) for name in ("triton", "reference"))
    check(found, expected, where, codes, arguments)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 49, 64, 1000003, 2**20, 2**30 + 1, 2**31 - 1])
def test_a_product_divides_exactly(size):
    """At the multiples of a size, one below, and the greatest number: where a floor may be off."""
    pytest.importorskip("triton")
    from memtrain.kernels.norm.channel_norm_triton import _magic

    magic, shift = _magic(size)
    assert 2**31 < magic < 2**32 or size == 1
    if size == 1:  # never divided by
        return
    most = (2**31 - 1) // size
    for k in {0, 1, 2, most // 2, most - 1, most} - {-1}:
        for x in {k * size, k * size - 1, k * size + size - 1, 2**31 - 1}:
            if 0 <= x < 2**31:
                assert (x * magic >> 32) >> shift == x // size


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of the interpreter
def test_bad_numbers_stay_in_their_channels(name, bad):
    """One of dy spoils its channel."""
    if name == "triton":
        pytest.importorskip("triton")
    where, codes = Channels(1, 2, 4, 32), Codes(4, 32)
    x, *others = example(where)
    clean = on(name, where, codes, x, *others)
    channels = [0, 2, 3]
    dy = others[-1].clone()
    dy[40] = bad
    _, (dx, dweight, dbias) = on(name, where, codes, x, *others[:-1], dy)
    assert not dbias[1].isfinite()
    assert not dweight[1].isfinite()
    assert not dx.view(2, 4, 32)[:, 1].isfinite().any()
    assert torch.equal(dx.view(2, 4, 32)[:, channels], clean[1][0].view(2, 4, 32)[:, channels])


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_what_is_not_asked_for_is_not_made_and_nothing_is_nothing(name):
    if name == "triton":
        pytest.importorskip("triton")
    where = PLACES["images"]
    x, mean, rstd, weight, dy = example(where)
    with backend(name):
        payload = channel_norm_quantize(x, mean, rstd, where, Codes(4, 256))
        options = (where, 4, 256)
        whole = channel_norm_backward(dy, *payload, rstd, weight, *options)
        sums = channel_norm_backward(dy, *payload, rstd, weight, *options, needs_dx=False)
        ones = channel_norm_backward(dy, *payload, rstd, torch.ones(7), *options)
        none = channel_norm_backward(dy, *payload, rstd, None, *options)
        where = Channels(1, 0, 7, 50)
        empty = channel_norm_quantize(x[:0], mean, rstd, where, Codes(4, 256))
        nothing = channel_norm_backward(x[:0], *empty, rstd, weight, where, 4, 256)
    assert sums[0].numel() == 0
    assert all(torch.equal(a, b) for a, b in zip(sums[1:], whole[1:], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ones, none, strict=True))
    assert nothing[0].numel() == empty[0].numel() == 0
    assert nothing[1].tolist() == nothing[2].tolist() == [0.0] * 7


def test_what_does_not_fit_is_named():
    where = PLACES["images"]
    x, mean, rstd, weight, dy = example(where)
    with pytest.raises(TypeError, match=r"float64; allowed: float32, bfloat16, float16"):
        channel_norm_quantize(x.double(), mean, rstd, where)
    with pytest.raises(TypeError, match=r"mean of dtype torch.bfloat16; allowed: float32"):
        channel_norm_quantize(x, mean.bfloat16(), rstd, where)
    with pytest.raises(ValueError, match=r"rstd has shape \(6,\); allowed: 7 contiguous"):
        channel_norm_quantize(x, mean, rstd[:6], where)
    with pytest.raises(ValueError, match="contiguous, the 1400 elements"):
        channel_norm_quantize(x.view(4, -1).t(), mean, rstd, where)
    with pytest.raises(ValueError, match="7 channels; allowed: multiples of 2"):
        channel_norm_quantize(x, mean, rstd, where._replace(together=2))
    with pytest.raises(ValueError, match="group_size=12"):
        channel_norm_quantize(x, mean, rstd, where, Codes(4, 12))
    payload = channel_norm_quantize(x, mean, rstd, where)
    with pytest.raises(ValueError, match=r"weight has shape \(3,\); allowed: 7 contiguous"):
        channel_norm_backward(dy, *payload, rstd, weight[:3], where, 4, 256)
    with pytest.raises(ValueError, match="1400 elements of 3 bits need"):
        channel_norm_backward(dy, *payload, rstd, weight, where, 3, 256)
    assert channel_norm.fits(x, where, 256)
    assert not channel_norm.fits(x.double(), where, 256)
    assert not channel_norm.fits(x, where, 12)
    assert not channel_norm.fits(x, Channels(1, 1, 350, 4), 256)
    with backend("reference"):
        assert not channel_norm.fits(x, where, 256)
