import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memtrain
from memtrain.activations.ops import pool
from memtrain.compressors import Group, Identity, Key

# function, shape of the input, its options, elements of a window
CASES = {
    "max_pool1d": (F.max_pool1d, (3, 4, 31), {"kernel_size": 3}, 3),
    "max_pool1d, one": (F.max_pool1d, (3, 4, 31), {"kernel_size": 1}, 1),
    "max_pool1d, options": (
        F.max_pool1d,
        (3, 4, 31),
        {"kernel_size": 4, "stride": 3, "padding": 2, "dilation": 2, "ceil_mode": True},
        4,
    ),
    "max_pool1d, no batch": (F.max_pool1d, (4, 31), {"kernel_size": 5, "stride": 1}, 5),
    "max_pool2d": (F.max_pool2d, (2, 5, 14, 12), {"kernel_size": 2}, 4),
    "max_pool2d, no batch": (F.max_pool2d, (5, 14, 12), {"kernel_size": (2, 3)}, 6),
    "max_pool2d, resnet": (
        F.max_pool2d,
        (2, 3, 17, 16),
        {"kernel_size": 3, "stride": 2, "padding": 1},
        9,
    ),
    "max_pool2d, options": (
        F.max_pool2d,
        (2, 3, 17, 16),
        {
            "kernel_size": (3, 5),
            "stride": [1, 2],
            "padding": (1, 2),
            "dilation": (3, 2),
            "ceil_mode": True,
        },
        15,
    ),
    "max_pool2d, wider than the input": (
        F.max_pool2d,
        (2, 3, 9, 2),
        {"kernel_size": (2, 5), "stride": 1, "padding": (1, 2)},
        10,
    ),
    "max_pool2d, 256": (F.max_pool2d, (1, 2, 33, 33), {"kernel_size": 16, "stride": 4}, 256),
    "max_pool3d": (F.max_pool3d, (2, 3, 8, 7, 6), {"kernel_size": 2}, 8),
    "max_pool3d, options": (
        F.max_pool3d,
        (2, 3, 8, 9, 10),
        {
            "kernel_size": (2, 3, 2),
            "stride": (1, 2, 2),
            "padding": (1, 1, 0),
            "dilation": (2, 1, 2),
            "ceil_mode": True,
        },
        12,
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def call(function, x, **options):
    """As the interception calls it: by the name that torch hands to a mode."""
    name = function.__name__ + "_with_indices" * options.get("return_indices", False)
    options.setdefault("return_indices", False)
    found = pool.recognise(name, (x,), options)
    return found.run(Group(), Key())


def ties(shape, dtype=torch.float32):
    """Few distinct values, a NaN and infinities: what is taken depends on the order."""
    x = torch.randint(-1, 2, shape).to(dtype)
    x.view(-1)[5::17] = torch.nan
    x.view(-1)[3::19] = -torch.inf
    return x


@every_case
@pytest.mark.parametrize("make", [torch.randn, ties], ids=["normal", "ties"])
def test_value_indices_and_gradient_are_torchs_own(case, make):
    function, shape, options, _ = case
    x = make(shape).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    expected, indices = function(twin, **options, return_indices=True)
    y, ours = call(function, x, **options, return_indices=True)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    y.backward(grad)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours, indices)
    assert not ours.requires_grad
    assert torch.equal(x.grad, twin.grad)


@every_case
def test_only_packed_choices_are_kept(case):
    function, shape, options, area = case
    x = torch.randn(shape, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        y = call(function, x, **options)
    bits = max(1, math.ceil(math.log2(area)))
    assert [(t.dtype, t.numel()) for t in kept] == [
        (torch.uint8, math.ceil(y.numel() / 256) * 32 * bits)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype(dtype):
    x = ties((2, 5, 14, 12), dtype).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    grad = torch.randn(2, 5, 7, 6).to(dtype)
    F.max_pool2d(twin, 2).backward(grad)
    call(F.max_pool2d, x, kernel_size=2).backward(grad)
    assert torch.equal(x.grad, twin.grad)


LAYOUTS = {
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3),
    "strided": lambda x: x[:, ::2, 1:],
    "expanded": lambda x: x[:1].expand(3, -1, -1, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout):
    base = torch.randn(2, 6, 9, 9)
    x, twin = (LAYOUTS[layout](base.clone()).detach().requires_grad_() for _ in range(2))
    y, expected = call(F.max_pool2d, x, kernel_size=2), F.max_pool2d(twin, 2)
    grad = torch.randn_like(expected)
    y.backward(grad)
    expected.backward(grad)
    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()
    assert torch.equal(x.grad, twin.grad)


def test_channels_last_3d():
    base = torch.randn(2, 3, 6, 6, 6).contiguous(memory_format=torch.channels_last_3d)
    x, twin = (base.clone().requires_grad_() for _ in range(2))
    grad = torch.randn(2, 3, 3, 3, 3)
    call(F.max_pool3d, x, kernel_size=2).backward(grad)
    F.max_pool3d(twin, 2).backward(grad)
    assert torch.equal(x.grad, twin.grad)


def test_calls_that_are_left_alone():
    x = torch.randn(1, 1, 40, 40)
    assert pool.recognise("max_pool2d", (x, 17), {}) is None
    assert pool.recognise("max_pool2d", (x, 16), {}).op == "max_pool2d"
    assert not pool.recognise("max_pool2d", (x, 2), {}).accepts(Identity())


def test_graph_can_be_used_twice_and_under_fake_tensors():
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    y = call(F.max_pool2d, x, kernel_size=2)
    first, second = (
        torch.autograd.grad(y.sum(), x, retain_graph=again)[0] for again in (True, False)
    )
    assert torch.equal(first, second)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        y = call(F.max_pool2d, fake, kernel_size=2)
        y.sum().backward()
    assert y.shape == (2, 3, 4, 4)
    assert fake.grad.shape == x.shape


def test_no_list_is_copied_to_the_device(monkeypatch):
    """A list that becomes a tensor waits for the device, and a graph cannot hold it."""
    x = torch.randn(2, 3, 9, 9, requires_grad=True)
    found = pool.recognise("max_pool2d", (x, 3), {})
    assert found is not None
    monkeypatch.setattr(torch, "tensor", None)
    found.run(Identity(), Key()).sum().backward()
    monkeypatch.undo()
    (expected,) = torch.autograd.grad(F.max_pool2d(x, 3).sum(), x)
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_indices_of_adaptive_pools_are_narrowed_and_exact(dims):
    """Torch's own form runs, and its indices take the bytes that a plane's size asks for."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, *(9,) * dims)
    found = []
    for preset in ("exact", "balanced"):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(4 * 9**dims, 4 * 9**dims), nn.Unflatten(1, x.shape[1:])
        )
        model.append(getattr(nn, f"AdaptiveMaxPool{dims}d")(5))
        cfg = {"preset": preset, "activations": {"min_elements": 0}}
        model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), cfg)
        model(x).square().sum().backward()
        found.append((model[1].bias.grad, memtrain.plan_of(model).entries("activation")))
    (exact, _), (ours, entries) = found
    assert torch.equal(ours, exact)
    (saved,) = [e for e in entries if "adaptive_max_pool" in e.site and e.site.endswith("saved")]
    assert saved.planned == 2 * 4 * 5**dims * (1 if 9**dims <= 256 else 2)
