import pytest
import torch
from torch.autograd import Function

from memtrain.activations.ops.autograd import direct


class Scale(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * ctx.factor, None


scale = direct(Scale)


def test_value_and_gradient_are_the_functions():
    x = torch.randn(5, requires_grad=True)
    y = scale(x, 3.0)
    y.backward(torch.ones(5))
    assert torch.equal(y, 3 * x)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((5,), 3.0))
    assert type(y.grad_fn).__name__ == "ScaleBackward"


def test_a_transform_is_refused_as_torch_does():
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: scale(x, 3.0).sum())(torch.ones(3))


def test_what_is_left_of_a_transform_is_taken_off():
    left = []

    def leak(x):
        left.append(x)
        return x.sum()

    torch.func.grad(leak)(torch.ones(3))
    assert torch.equal(scale(left[0], 3.0), torch.full((3,), 3.0))
