"""Normalizations: torch's values, gradients through payloads, what is recognised."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memtrain.activations.ops import norm_calls
from memtrain.activations.ops.batch_norm import batch_norm, group_norm, instance_norm
from memtrain.activations.ops.layer_norm import layer_norm, rms_norm
from memtrain.compressors import Compressor, DerivativeCode, Group, Identity, Key, Packed
from memtrain.kernels.norm import norm as norm_kernel


class Run:
    """Ours on a module's input; `plain` is the module itself."""

    def __init__(self, module, shape, ours):
        self.module, self.shape, self.ours = module, shape, ours

    def copies(self, dtype):
        return (copy.deepcopy(self.module).to(dtype) for _ in range(2))


def _layer(m, x, **kw):
    return layer_norm(x, m.normalized_shape, m.weight, m.bias, m.eps, **kw)


def _group(m, x, **kw):
    return group_norm(x, m.num_groups, m.weight, m.bias, m.eps, **kw)


def _rms(m, x, **kw):
    return rms_norm(x, m.normalized_shape, m.weight, m.eps, **kw)


def _batch(m, x, **kw):
    running = (m.running_mean, m.running_var)
    return batch_norm(x, running, m.weight, m.bias, m.momentum, m.eps, **kw)


def _instance(m, x, **kw):
    running = (m.running_mean, m.running_var)
    return instance_norm(x, running, m.weight, m.bias, m.momentum, m.eps, **kw)


RUNS = {
    "layer_norm": Run(nn.LayerNorm(48), (6, 5, 48), _layer),
    "layer_norm, 2 dimensions": Run(nn.LayerNorm((5, 8)), (6, 5, 8), _layer),
    "layer_norm, one row": Run(nn.LayerNorm(48), (48,), _layer),
    "layer_norm, plain": Run(nn.LayerNorm(48, elementwise_affine=False), (6, 48), _layer),
    "layer_norm, no bias": Run(nn.LayerNorm(48, bias=False), (6, 48), _layer),
    "rms_norm": Run(nn.RMSNorm(48), (6, 5, 48), _rms),
    "rms_norm, 2 dimensions": Run(nn.RMSNorm((5, 8), eps=1e-3), (6, 5, 8), _rms),
    "rms_norm, plain": Run(nn.RMSNorm(48, elementwise_affine=False), (6, 48), _rms),
    "group_norm": Run(nn.GroupNorm(3, 12), (4, 12, 5, 6), _group),
    "group_norm, no space": Run(nn.GroupNorm(3, 60, affine=False), (4, 60), _group),
    "batch_norm 1d": Run(nn.BatchNorm1d(7), (9, 7), _batch),
    "batch_norm 2d": Run(nn.BatchNorm2d(7), (4, 7, 5, 6), _batch),
    "batch_norm 3d": Run(nn.BatchNorm3d(7, momentum=0.3), (2, 7, 3, 5, 6), _batch),
    "batch_norm, plain": Run(
        nn.BatchNorm2d(7, affine=False, track_running_stats=False), (4, 7, 5, 6), _batch
    ),
    "instance_norm 1d": Run(nn.InstanceNorm1d(7), (4, 7, 30), _instance),
    "instance_norm 2d": Run(
        nn.InstanceNorm2d(7, affine=True, track_running_stats=True), (4, 7, 5, 6), _instance
    ),
    "instance_norm 3d": Run(nn.InstanceNorm3d(7, affine=True), (2, 7, 3, 5, 6), _instance),
}


with torch.no_grad():
    for _run in RUNS.values():
        for _p in _run.module.parameters():
            _p.copy_(torch.randn(_p.shape))


every_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


def gradients(y, grad, x, module):
    y.backward(grad)
    return [x.grad, *(p.grad for p in module.parameters())]


def errors(found, exact):
    """Largest difference, relative to the largest exact number."""
    return [
        ((a.double() - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()
        for a, b in zip(found, exact, strict=True)
    ]


@every_run
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_value_is_torchs_own_and_gradient_as_exact(run, dtype):
    """The error against float64 is at most twice that of torch's own, plus ours: dx has three
    terms, each rounded up to four times."""
    mine, plain = run.copies(dtype)
    wide = copy.deepcopy(plain).double()
    x = (torch.randn(run.shape) * 2 + 3).to(dtype).requires_grad_()
    twin, exact = (x.detach().clone().to(d).requires_grad_() for d in (dtype, torch.float64))
    y, expected = run.ours(mine, x, compressor=Identity()), plain(twin)
    grad = torch.randn(run.shape).to(dtype)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)
    for name, buffer in plain.named_buffers():
        if name != "num_batches_tracked":
            assert torch.equal(getattr(mine, name), buffer), name
    ours = gradients(y, grad, x, mine)
    torchs = gradients(expected, grad, twin, plain)
    truth = gradients(wide(exact), grad.double(), exact, wide)
    assert [g.dtype for g in ours] == [g.dtype for g in torchs]
    rounding = 12 * torch.finfo(dtype).eps
    for our_error, torch_error in zip(errors(ours, truth), errors(torchs, truth), strict=True):
        assert our_error <= 2 * torch_error + rounding


@every_run
def test_the_error_of_a_quantiser_is_what_its_step_predicts(run):
    """To first order d(dx) = -rstd (e mean(g x_hat) + x_hat mean(g e)) for an error e of x_hat:
    bounded by rstd * (max|e| * mean|g x_hat| + |x_hat| * mean|g| max|e|)."""
    mine, plain = run.copies(torch.float32)
    compressor = Group(bits=8, group_size=8, rounding="nearest")
    x = (torch.randn(run.shape) * 2 + 30).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    grad = torch.randn(run.shape)
    ours = gradients(run.ours(mine, x, compressor=compressor), grad, x, mine)
    expected = gradients(plain(twin), grad, twin, plain)
    x_hat_range = 8.0  # of standardised normal numbers, far beyond these few
    e = x_hat_range / 255 / 2
    g_max = (grad.abs().max() * max([1.0, *(p.abs().max() for p in plain.parameters())])).item()
    rstd = 1.0  # deviation 2 (or 30 for an RMS norm): less
    difference = (ours[0] - expected[0]).abs().max().item()
    assert 0 < difference <= rstd * e * g_max * (1 + x_hat_range / 2)
    for (name, p), mine_grad, plain_grad in zip(
        plain.named_parameters(), ours[1:], expected[1:], strict=True
    ):
        if name == "bias":
            torch.testing.assert_close(mine_grad, plain_grad)
        else:
            terms = grad.numel() // p.numel()
            assert (mine_grad - plain_grad).abs().max() <= e * terms * grad.abs().max()


ONE_PASS = {
    "layer_norm": (nn.LayerNorm(512), _layer),
    "layer_norm, plain": (nn.LayerNorm(512, elementwise_affine=False), _layer),
    "layer_norm, no bias": (nn.LayerNorm(512, bias=False), _layer),
    "rms_norm": (nn.RMSNorm(512, eps=1e-6), _rms),
    "rms_norm, plain": (nn.RMSNorm(512, elementwise_affine=False), _rms),
}


@pytest.mark.parametrize("name", ONE_PASS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_pass_is_the_composition(name, dtype, monkeypatch):
    """Rows of whole groups are normalised and quantised in one pass. Statistics differ by their
    rounding, and x_hat is not rounded to the dtype first: codes may differ by one."""
    plain, ours = ONE_PASS[name]
    compressor = Group(bits=8, rounding="nearest")
    module = copy.deepcopy(plain).to(dtype)
    for p in module.parameters():
        nn.init.normal_(p)
    x, grad = (torch.randn(2, 3, 512) + 1).to(dtype), torch.randn(2, 3, 512).to(dtype)
    results, torchs = [], module(x)
    for fits in (True, False):
        monkeypatch.setattr(norm_kernel, "fits", lambda *a, fits=fits: fits)  # so only on GPUs
        mine, t = copy.deepcopy(module), x.clone().requires_grad_()
        y = ours(mine, t, compressor=compressor)
        results.append([y.detach(), *gradients(y, grad, t, mine)])
    eps = torch.finfo(dtype).eps
    for one, two in zip(*results, strict=True):
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        # A step of x_hat is 8 / 255 (see the test above); sums over rows have 6 terms.
        scale = grad.abs().max().item() * 6 * max(1.0, two.abs().max().item())
        assert (one.float() - two.float()).abs().max() <= scale * (8 / 255 + 8 * eps)
    # The value is no payload's: twice torch's own error, and a rounding to the dtype.
    exact = module.double()(x.double())
    ours, torchs = ((y - exact).abs().max() for y in (results[0][0], torchs))
    assert ours <= 2 * torchs + eps / 2 * exact.abs().max()


OVER_CHANNELS = ["batch_norm 2d", "batch_norm 3d", "instance_norm 2d", "group_norm"]


@pytest.mark.parametrize("name", OVER_CHANNELS)
def test_torchs_backward_is_given_no_mean_of_codes_either(name):
    """A constant gradient leaves nothing."""
    run = RUNS[name]
    mine, x = copy.deepcopy(run.module).double(), torch.randn(run.shape, dtype=torch.float64) + 1
    nn.init.constant_(mine.weight, 2.0)
    x.requires_grad_()
    y = run.ours(mine, x, compressor=Group(bits=2, group_size=64))
    (dx,) = torch.autograd.grad(y, x, torch.full_like(y, 3.0))
    assert dx.abs().max() <= 1e-13


def test_one_pass_is_for_usual_calls_only():
    """Others go torch's way, and get torch's own errors."""
    x = torch.randn(4, 512, requires_grad=True)
    with pytest.raises(RuntimeError, match="Expected weight to be of same shape"):
        layer_norm(x, (512,), torch.ones(256), compressor=Group())
    with pytest.raises(RuntimeError, match="Given normalized_shape"):
        layer_norm(x, (2, 512), compressor=Group())
    with pytest.raises(RuntimeError, match="mixed dtype"):
        layer_norm(x, (512,), torch.ones(512).bfloat16(), compressor=Group())
    y = rms_norm(x.bfloat16(), (512,), torch.ones(512), variant="llama", compressor=Group())
    assert y.dtype == torch.float32


@every_run
def test_only_the_payload_statistics_and_parameters_are_kept(run):
    module, _ = run.copies(torch.float32)
    x = torch.randn(run.shape, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        run.ours(module, x, compressor=Group(bits=4, group_size=8))
    own = {p.data_ptr() for p in module.parameters()}
    n = (x.numel() + 7) // 8
    sizes = [t.nbytes for t in kept if t.data_ptr() not in own]
    assert sizes[:2] == [n * 4, n * 4]  # codes; two bounds of two bytes a group
    assert sum(sizes[2:]) <= 4 * 4 * x.shape[0] * max(x.shape[1] if x.dim() > 1 else 1, 7)
    assert not any(t.data_ptr() == x.data_ptr() for t in kept)


@pytest.mark.parametrize("name", ["group_norm", "batch_norm 2d", "instance_norm 2d"])
def test_channels_last(name):
    run = RUNS[name]
    mine, plain = run.copies(torch.float32)
    x, twin = (
        t.contiguous(memory_format=torch.channels_last).requires_grad_()
        for t in [torch.randn(run.shape)] * 2
    )
    twin = twin.detach().clone(memory_format=torch.channels_last).requires_grad_()
    y, expected = run.ours(mine, x, compressor=Identity()), plain(twin)
    grad = torch.randn(run.shape).contiguous(memory_format=torch.channels_last)
    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()
    for ours, theirs in zip(
        gradients(y, grad, x, mine), gradients(expected, grad, twin, plain), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_large_mean_costs_no_precision():
    """Bounds in bfloat16: of x (mean 3,000) they swallow the values, of x_hat they do not."""
    module = nn.LayerNorm(256)
    x = (torch.randn(16, 256) + 3000).requires_grad_()
    grad = torch.randn(16, 256)
    (exact,) = torch.autograd.grad(module(x), x, grad)
    compressor = Group(bits=4)
    (ours,) = torch.autograd.grad(_layer(module, x, compressor=compressor), x, grad)
    flat = x.detach().view(-1)
    coarse = compressor.decompress(compressor.compress(flat, key=Key())).view(x.shape)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: coarse if t.data_ptr() == x.data_ptr() else t, lambda t: t
    ):
        hooked = module(x)
    (theirs,) = torch.autograd.grad(hooked, x, grad)
    # Around 3,000 the spacing of bfloat16 is 16; the 256 values of a group span less than 8.
    assert 2 * (ours - exact).norm() < (theirs - exact).norm()


class _Calls(torch.overrides.TorchFunctionMode):
    """Runs what is recognised in its place, as the interception does."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        call = None
        if name in norm_calls.NAMES:
            call = norm_calls.recognise(name, args, kwargs or {})
        if call is None:
            return func(*args, **(kwargs or {}))
        self.found.append(call.op)
        return call.run(Identity(), Key())


@every_run
def test_modules_are_recognised_and_keep_their_running_statistics(run):
    mine, plain = run.copies(torch.float32)
    x = torch.randn(run.shape)
    with _Calls() as calls:
        y = mine(x)
    assert len(calls.found) == 1
    assert torch.equal(y, plain(x))
    for (name, ours), theirs in zip(mine.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def test_calls_that_are_left_alone():
    x = torch.randn(4, 3, 5)
    weight = torch.ones(3)
    evaluated = nn.BatchNorm1d(3).eval()
    with _Calls() as calls:
        evaluated(x)
        torch.batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5, True)
        torch.instance_norm(x, weight, weight, None, None, True, 0.1, 1e-5, True)
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            F.batch_norm(x[:1, :, 0], None, None, training=True)
    assert calls.found == []
    row = norm_calls.recognise("layer_norm", (torch.randn(4, 512), (512,)), {})
    assert row.accepts(Group(group_size=256))
    assert row.op == "layer_norm"
    assert not row.accepts(Identity())
    assert not row.accepts(DerivativeCode())
    for name, of_few in {"layer_norm": (19,), "rms_norm": (19,), "group_norm": 2}.items():
        assert norm_calls.recognise(name, (torch.randn(4, 38), of_few), {}) is None


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "group_norm", "batch_norm 2d"])
def test_autocast_gives_torchs_dtype_and_value(name):
    run = RUNS[name]
    mine, plain = run.copies(torch.bfloat16)
    x = torch.randn(run.shape).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = run.ours(mine, x, compressor=Identity()), plain(x)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)


@every_run
def test_under_fake_tensors(run):
    x, module = torch.randn(run.shape), copy.deepcopy(run.module)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x).requires_grad_()
        y = run.ours(module, fake, compressor=Group())
    assert y.shape == x.shape


def test_wrong_arguments_are_a_clear_error():
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(ValueError, match=r"variant='x'; allowed: torch, llama"):
        rms_norm(x, (8,), variant="x", compressor=Identity())
    with pytest.raises(ValueError, match=r"weight=None; allowed with variant='torch'"):
        rms_norm(x, (8,), variant="t5", compressor=Identity())


@pytest.mark.parametrize("name", ["layer_norm, one row", "group_norm", "batch_norm 2d"])
def test_compressors_that_want_the_shape_get_it(name):
    @dataclass(frozen=True)
    class Shaped(Compressor):
        shaped = True

        def compress(self, x, *, key):
            seen.append(x.shape)
            return Packed({"x": x}, x.shape, x.dtype)

        def decompress(self, packed):
            return packed.tensors["x"]

    seen = []
    run = RUNS[name]
    module, _ = run.copies(torch.float32)
    x = torch.randn(run.shape, requires_grad=True)
    run.ours(module, x, compressor=Shaped()).sum().backward()
    assert set(seen) == {x.shape}  # once more where the size of the payload is checked
