import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from memtrain.activations.ops.dropout import _factor, _scaled, dropout, recognise
from memtrain.kernels.cpu import library
from memtrain.kernels.dispatch import backend, simulating
from memtrain.kernels.packing.pack import pack_codes

FORMS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(30, -1),
    "empty": lambda x: x[:0],
    "one": lambda x: x[0, 0],
}
BACKENDS = [
    "reference",
    pytest.param("cpu", marks=pytest.mark.skipif(library() is None, reason="no C++ library")),
]


def both(f, base, form, p):
    torch.manual_seed(3)
    leaf = base.clone().requires_grad_()
    x = FORMS[form](leaf)
    y = f(x, p)
    (dx,) = torch.autograd.grad(y, leaf, torch.randn(y.shape).to(y.dtype))
    return y, dx, torch.rand(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BACKENDS)
def test_it_is_torchs_dropout_of_the_same_seed(name, form, dtype):
    base = torch.randn(40, 50).to(dtype)
    base[0, 0], base[2, 2] = float("inf"), float("nan")
    for p in (0.1, 0.37, 0.5, 0.9):
        with backend(name):
            ours = both(dropout, base, form, p)
        theirs = both(F.dropout, base, form, p)
        assert ours[0].stride() == theirs[0].stride()
        for mine, its in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=0, equal_nan=True)


def test_it_can_be_differentiated_twice():
    x = torch.randn(30, dtype=torch.float64, requires_grad=True)

    def f(x):
        torch.manual_seed(0)
        return dropout(x, 0.3) ** 2

    assert torch.autograd.gradcheck(f, x)
    assert torch.autograd.gradgradcheck(f, x)


def test_fake_tensors_give_shapes_without_data():
    with FakeTensorMode():
        x = torch.empty(3, 1000, requires_grad=True)
        y = dropout(x, 0.3)
        y.sum().backward()
    assert x.grad is not None
    assert y.shape == x.grad.shape == (3, 1000)


def test_dtypes_that_it_does_not_know_are_left_alone():
    assert recognise("dropout", (torch.ones(3),), {}) is not None
    assert recognise("dropout", (torch.ones(3, dtype=torch.complex64),), {}) is None


@pytest.mark.parametrize("name", [*BACKENDS, "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cudas_gradient_is_scaled_in_float32(name, dtype):
    """CUDA's dropout never rounds 1 / (1 - p) to 16 bits; its formula runs on a CPU too."""
    if name == "triton":
        pytest.importorskip("triton")
    grad, mask = torch.randn(3000).to(dtype), torch.rand(3000) < 0.9
    for p in (0.1, 0.37):
        factor = _factor(p, dtype, True)
        with backend(name):
            ours = _scaled(grad, pack_codes(mask.view(torch.uint8), 1), factor)
        assert torch.equal(ours, torch.ops.aten.native_dropout_backward(grad, mask, 1 / (1 - p)))
    if dtype == torch.bfloat16:
        with simulating("cuda"):
            y = dropout(grad.requires_grad_(), 0.1)
        assert y.grad_fn.scaling[0] == 1 / 0.9
        assert (_factor(0.1, dtype, True), _factor(0.1, dtype, False)) == (1 / 0.9, 1.109375)
