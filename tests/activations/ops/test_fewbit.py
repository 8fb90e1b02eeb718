import pytest
import torch
import torch.nn.functional as F

from memtrain.activations.ops.fewbit import fewbit
from memtrain.compressors import DerivativeCode

PLAIN = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "mish": F.mish,
    "tanh": torch.tanh,
}


def level(x: torch.Tensor, code: DerivativeCode) -> torch.Tensor:
    """f'(x) from the table, in float64 arithmetic rounded to float32 (not for float64)."""
    flat = x.detach().double().cpu().contiguous().view(-1).numpy()
    exact = torch.from_numpy(code.table()(flat)).view(x.shape)
    return exact if x.dtype == torch.float64 else exact.float()


def saved(y: torch.Tensor) -> list[torch.Tensor]:
    return list(y.grad_fn.saved_tensors)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_only_packed_codes_are_kept(bits):
    x = torch.randn(8, 512, requires_grad=True)
    kept = saved(fewbit(x, DerivativeCode(bits=bits)))
    assert [(t.dtype, t.numel()) for t in kept] == [(torch.uint8, 8 * 512 * bits // 8)]


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "offset": lambda x: x[1:],
    "strided": lambda x: x[:, :, ::2],
    "expanded": lambda x: x[:1].expand(3, 4, 6, 5),
    "one_wide": lambda x: x[:, :1],
}


@pytest.mark.parametrize("inplace", [False, True], ids=["out", "inplace"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad_layout", ["contiguous", "channels_last", "expanded"])
def test_every_layout_gets_the_right_gradient(layout, grad_layout, inplace):
    if inplace and layout == "expanded":
        pytest.skip("torch writes in place to no expanded tensor")
    base = torch.randn(3, 4, 6, 5, requires_grad=True)
    code = DerivativeCode(bits=2, function="silu")
    x = LAYOUTS[layout](base.clone())
    # torch's own last bit depends on the strides, so the expected value has them too
    value, expected = F.silu(x.detach()), level(x, code)
    y = fewbit(x, code, inplace=inplace)
    grad = torch.randn(y.shape)
    if grad_layout == "channels_last":
        grad = grad.contiguous(memory_format=torch.channels_last)
    if grad_layout == "expanded":
        grad = grad[..., :1].expand(y.shape)
    seen = []
    if not inplace:
        x.register_hook(seen.append)
    y.backward(grad)
    assert torch.equal(y, value)
    if inplace:
        assert y is x
    else:
        assert torch.equal(seen[0], grad * expected)
    assert base.grad is not None
    if layout in ("contiguous", "channels_last"):
        assert torch.equal(base.grad, grad * expected)


def test_a_transposed_input_is_not_copied():
    x = torch.randn(30, 40, requires_grad=True)
    y = fewbit(x.t(), DerivativeCode())
    assert y.stride() == x.t().stride()


@pytest.mark.parametrize("inplace", [False, True], ids=["out", "inplace"])
@pytest.mark.parametrize("function", ["gelu", "silu", "relu"])
def test_nothing_is_kept_where_no_gradient_is_wanted(function, inplace):
    code = DerivativeCode(bits=1, function=function)
    x = torch.randn(10)
    expected = PLAIN[function](x)
    y = fewbit(x.clone(), code, inplace=inplace)
    assert y.grad_fn is None
    assert torch.equal(y, expected)
    with torch.no_grad():
        z = fewbit(x.clone().requires_grad_(), code, inplace=inplace)
    assert z.grad_fn is None
    assert torch.equal(z, expected)


def test_runs_in_the_inputs_dtype_under_autocast():
    x = torch.randn(4, 64, requires_grad=True)
    weight = torch.randn(64, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = x @ weight
        y = fewbit(hidden, DerivativeCode())
    assert y.dtype == hidden.dtype == torch.bfloat16
    y.sum().backward()
    assert weight.grad.dtype == torch.float32
