import pytest
import torch

from memtrain.activations.ops.autograd import autograd_function


def scale_forward(ctx, x, factor):
    ctx.factor = factor
    return x * factor


def scale_backward(ctx, grad):
    return (grad * ctx.factor,)


def product_forward(ctx, x, weight, power):
    ctx.save_for_backward(x, weight)
    ctx.power = power
    return x * weight**power


def product_backward(ctx, grad):
    x, weight = ctx.saved_tensors
    return grad * weight**ctx.power, grad * x * ctx.power * weight ** (ctx.power - 1)


scale = autograd_function(scale_forward, scale_backward)
product = autograd_function(product_forward, product_backward, tensors=2, twice=True)


def test_value_and_gradient_are_the_functions():
    x = torch.randn(5, requires_grad=True)
    y = scale(x, 3.0)
    y.backward(torch.ones(5))
    assert torch.equal(y, 3 * x)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((5,), 3.0))
    assert type(y.grad_fn).__name__ == "ScaleBackward"


def test_several_tensors_and_a_second_derivative():
    x, weight = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, w: product(x, w, 2), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x, w: product(x, w, 2), (x, weight))
    y = scale(x, 3.0)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
