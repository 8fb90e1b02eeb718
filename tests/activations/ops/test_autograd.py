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


def test_a_compiled_function_is_the_same():
    x, twin = (torch.ones(5, requires_grad=True) for _ in range(2))
    compiled = torch.compile(lambda x: scale(x, 3.0), backend="aot_eager", fullgraph=True)
    y = compiled(x)
    y.sum().backward()
    scale(twin, 3.0).sum().backward()
    assert torch.equal(y, 3 * x)
    assert torch.equal(x.grad, twin.grad)


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
    assert torch.equal(product(torch.ones(3), left[0], 2), torch.ones(3))
