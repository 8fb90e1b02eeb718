"""Cross-entropy's gradient from codes: the kernel is its reference, up to exp()'s last places."""

import pytest
import torch

from memtrain.kernels.dispatch import backend
from memtrain.kernels.group.group import group_quantize
from memtrain.kernels.group.softmax_gradient import softmax_gradient


def example(rows, size, bits, group_size, wide, dtype):
    log_softmax = (3 * torch.randn(rows, size)).log_softmax(1)
    codes, bounds = group_quantize(log_softmax, bits, group_size, 5, wide=wide)
    scale, classes = torch.rand(rows), torch.randint(size, (rows,))
    scale[::3] = 0.0  # as of a class that is ignored
    dx = torch.full((rows, size), torch.nan, dtype=dtype)
    return dx, codes, bounds, scale, classes, bits, group_size


@pytest.mark.parametrize(
    ("rows", "size", "bits", "group_size", "wide", "dtype", "smoothing"),
    [
        (5, 300, 8, 256, False, torch.float32, 0.0),  # a group lies in two rows
        (4, 256, 8, 256, False, torch.bfloat16, 0.1),
        (33, 17, 4, 64, True, torch.float16, 0.0),  # a group lies in several
        (9, 64, 3, 72, False, torch.float32, 0.3),
        (2, 1000, 2, 8, False, torch.bfloat16, 0.0),
        (40, 1, 8, 16, False, torch.float32, 0.0),
        (0, 7, 8, 16, False, torch.float32, 0.0),
    ],
)
def test_triton_is_the_reference_but_for_exp(rows, size, bits, group_size, wide, dtype, smoothing):
    """exp() is off by two last places at most, and subtractions by half of one of their terms."""
    pytest.importorskip("triton")
    arguments = example(rows, size, bits, group_size, wide, dtype)
    with backend("reference"):
        softmax_gradient(*arguments, smoothing)
        expected = arguments[0].clone()
    arguments[0].fill_(torch.nan)
    with backend("triton"):
        softmax_gradient(*arguments, smoothing)
    error = 8 * 2.0**-24  # of terms up to 1; 16-bit results may then be rounded to a neighbour
    torch.testing.assert_close(
        arguments[0], expected, rtol=0 if dtype == torch.float32 else torch.finfo(dtype).eps,
        atol=error,
    )  # fmt: skip


def test_the_reference_is_autograds():
    x = torch.randn(6, 40, dtype=torch.float64, requires_grad=True)
    target = torch.randint(40, (6,))
    torch.nn.functional.cross_entropy(x, target, label_smoothing=0.2).backward()
    saved = x.detach().log_softmax(1).float()
    payload = group_quantize(saved, 8, 8, wide=True, stochastic=False)
    dx, scale = torch.empty(6, 40), torch.full((6,), 1 / 6)
    with backend("reference"):
        softmax_gradient(dx, *payload, scale, target, 8, 8, 0.2)
    step = (payload[1][:, 1] - payload[1][:, 0]).max() / 255
    bound = saved.exp() / 6 * ((step / 2).exp() - 1) + 4 * 2.0**-24
    assert ((dx - x.grad).abs() <= bound).all()


def test_what_does_not_fit_is_named():
    dx, *rest = example(4, 16, 8, 16, False, torch.float32)
    with pytest.raises(TypeError, match=r"float64; allowed: float32, bfloat16, float16"):
        softmax_gradient(dx.double(), *rest)
    with pytest.raises(ValueError, match="contiguous rows"):
        softmax_gradient(dx.t(), *rest)
    rest[2] = rest[2][:3]
    with pytest.raises(ValueError, match=r"scale has shape \(3,\); allowed: \(4,\)"):
        softmax_gradient(dx, *rest)
