import pytest
import torch
import torch.nn.functional as F

from memtrain.activations.ops import shape_only
from memtrain.compressors import Group, Identity, Key

CASES = {
    "avg_pool1d": (F.avg_pool1d, (3, 4, 31), (3,), {}),
    "avg_pool1d, options": (F.avg_pool1d, (4, 31), (4, 3, 2), {"ceil_mode": True}),
    "avg_pool2d": (F.avg_pool2d, (2, 5, 14, 12), (2,), {}),
    "avg_pool2d, options": (
        F.avg_pool2d,
        (2, 5, 14, 13),
        ((3, 2), (2, 1), 1),
        {"ceil_mode": True, "count_include_pad": False, "divisor_override": 5},
    ),
    "avg_pool2d, no batch": (F.avg_pool2d, (5, 14, 12), (), {"kernel_size": 3}),
    "avg_pool3d": (F.avg_pool3d, (2, 3, 8, 7, 6), (2, 1, 1), {}),
    "adaptive 1d": (F.adaptive_avg_pool1d, (2, 3, 20), (6,), {}),
    "adaptive 2d": (F.adaptive_avg_pool2d, (2, 3, 13, 11), ((4, None),), {}),
    "adaptive 3d": (F.adaptive_avg_pool3d, (2, 3, 6, 7, 5), (3,), {}),
    "area": (F.interpolate, (2, 3, 12, 10), ((5, 4),), {"mode": "area"}),
    "reflect 1d": (F.pad, (2, 3, 12), ((2, 1),), {"mode": "reflect"}),
    "reflect 2d": (F.pad, (2, 3, 12, 9), ((2, 1, 0, 3), "reflect"), {}),
    "replicate 3d": (F.pad, (2, 3, 5, 4, 6), ((1, 1, 2, 0, 1, 1),), {"mode": "replicate"}),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def kept(function):
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (found.append(t), t)[1], lambda t: t):
        return function(), found


class _Calls(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in shape_only.NAMES:
            call = shape_only.recognise(name, args, kwargs or {})
            assert call is not None
            return call.run(Group(), Key())
        return func(*args, **(kwargs or {}))


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_value_and_gradient_are_torchs_own_and_nothing_is_kept(case, dtype, order):
    function, shape, args, options = case
    if function is F.avg_pool3d and dtype == torch.bfloat16:
        pytest.skip("torch has no such kernel on a CPU")
    base = torch.randn(shape).to(dtype)
    if order == torch.channels_last and len(shape) != 4:
        pytest.skip("channels_last has four dimensions")
    x, twin = (base.contiguous(memory_format=order).clone().requires_grad_() for _ in range(2))
    with _Calls():
        y, ours = kept(lambda: function(x, *args, **options))
    expected, theirs = kept(lambda: function(twin, *args, **options))
    grad = torch.randn_like(expected)
    y.backward(grad)
    expected.backward(grad)
    assert ours == []
    assert any(t.data_ptr() == twin.data_ptr() for t in theirs)  # or it need not be replaced
    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()
    assert torch.equal(x.grad, twin.grad)


def test_what_keeps_nothing_in_torch_is_left_alone():
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    for name, function, args, options in [
        ("interpolate", F.interpolate, (x,), {"scale_factor": 2}),
        ("interpolate", F.interpolate, (x,), {"scale_factor": 2, "mode": "bilinear"}),
        ("pad", F.pad, (x, (1, 1)), {}),
        ("pad", F.pad, (x, (1, 1, 1, 1)), {"mode": "circular"}),
        ("adaptive_avg_pool2d", F.adaptive_avg_pool2d, (x, 1), {}),
    ]:
        assert shape_only.recognise(name, args, options) is None
        assert kept(lambda f=function, a=args, o=options: f(*a, **o))[1] == []


def test_identity_is_left_to_torch_and_double_backward_is_a_clear_error():
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    call = shape_only.recognise("avg_pool2d", (x, 2), {})
    assert not call.accepts(Identity())
    y = call.run(Group(), Key())
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
