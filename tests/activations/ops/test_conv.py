import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memtrain.activations.intercept.hooks import Interception
from memtrain.activations.intercept.options import Options
from memtrain.activations.ops import conv
from memtrain.audit.live_storages import LiveStorages
from memtrain.compressors import DerivativeCode, Group, Identity, Key

CASES = {
    "conv1d": (nn.Conv1d(4, 6, 5, padding=2, dilation=1), (7, 4, 20)),
    "conv1d, same": (nn.Conv1d(4, 6, 5, padding="same", dilation=2), (7, 4, 20)),
    "conv2d": (nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), (7, 4, 11, 12)),
    "conv2d, groups": (nn.Conv2d(4, 8, (3, 1), groups=4), (7, 4, 11, 12)),
    "conv2d, reflect": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (7, 4, 11, 12)),
    "conv3d": (nn.Conv3d(2, 3, 2, padding="valid"), (5, 2, 6, 5, 4)),
    "transpose 1d": (nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (7, 4, 9)),
    "transpose 2d": (nn.ConvTranspose2d(4, 6, 3, groups=2, dilation=2), (7, 4, 9, 8)),
    "transpose 3d": (nn.ConvTranspose3d(2, 3, 2), (5, 2, 4, 5, 4)),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


class _Calls(torch.overrides.TorchFunctionMode):
    def __init__(self, compressor, threshold):
        super().__init__()
        self.compressor, self.nbytes, self.count = compressor, threshold, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name not in conv.NAMES:
            return func(*args, **(kwargs or {}))
        self.count += 1
        return conv.recognise(name, args, kwargs or {}, self.nbytes).run(self.compressor, Key())


def run(module, x, grad, compressor=None, threshold=None):
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    if compressor is None:
        y = module(x)
    else:
        with _Calls(compressor, threshold) as calls:
            y = module(x)
        assert calls.count == 1
    y.backward(grad)
    return y.detach(), [x.grad, *(p.grad for p in module.parameters())]


@every_case
@pytest.mark.parametrize("samples", [1, 3, 100])
def test_micro_batches_give_torchs_value_and_gradient(case, samples):
    module, shape = case
    x = torch.randn(shape)
    grad = torch.randn_like(module(x))
    y, ours = run(module, x, grad, Identity(), samples * x[0].nbytes * 2)
    expected, theirs = run(module, x, grad)
    _, exact = run(module.double(), x.double(), grad.double())
    module.float()
    assert torch.equal(y, expected)
    for a, b, t in zip(ours, theirs, exact, strict=True):
        # Twice torch's own error against float64, and a rounding for each micro-batch's sum.
        own = (b - t).abs().max().item()
        eps = torch.finfo(torch.float32).eps
        assert (a - t).abs().max().item() <= 2 * own + shape[0] * eps * t.abs().max().item()


@every_case
def test_the_error_of_a_quantiser_is_that_of_its_input(case):
    """dw is linear in x: what micro-batches of nearest 8-bit codes give is dw of those codes."""
    module, shape = case
    if module.padding_mode != "zeros":
        pytest.skip("what is compressed there is the padded input")
    x = torch.randn(shape)
    grad = torch.randn_like(module(x))
    compressor = Group(bits=8, group_size=8, rounding="nearest")
    _, ours = run(module, x, grad, compressor, x[0].nbytes)
    coarse = torch.cat([_coarse(part, compressor) for part in x.split(1)])
    _, theirs = run(module, coarse, grad)
    for a, b in zip(ours, theirs, strict=True):
        # Sums in another order: the terms' magnitudes times the rounding unit.
        terms = grad.abs().sum().item() * max(1.0, x.abs().max().item())
        assert (a - b).abs().max() <= torch.finfo(torch.float32).eps * terms
    _, exact = run(module, x, grad)
    assert not torch.equal(ours[1], exact[1])


def _coarse(x, compressor):
    return compressor.decompress(compressor.compress(x.flatten(), key=Key())).view(x.shape)


def test_micro_batches_draw_their_own_random_bits():
    x = torch.rand(1, 4, 256).expand(2, -1, -1).contiguous()
    module = nn.Conv1d(4, 4, 1)
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t),
        _Calls(Group(bits=2), x[0].nbytes),
    ):
        module(x.requires_grad_())
    codes = [t for t in kept if t.dtype == torch.uint8]
    assert len(codes) == 2
    assert not torch.equal(codes[0], codes[1])


def test_peak_of_backward_is_lower():
    module = nn.Conv2d(8, 2, 3, padding=1)
    x = torch.randn(16, 8, 32, 32)
    module(x).sum().backward()  # whatever is allocated once

    def peak(threshold):
        with _Calls(Group(bits=4), threshold):
            y = module(x)  # no gradient of x: the decompressed input is the largest buffer
        y = y.sum()
        with LiveStorages() as meter:
            y.backward()
        return meter.peak_nbytes

    whole, parts = peak(x.nbytes), peak(2 * x[0].nbytes)
    assert parts <= whole - x.nbytes * 13 // 16  # 2 of 16 samples at a time, and one of slack


def test_off_by_default_and_where_the_batch_is_small_enough():
    x, weight = torch.randn(4, 3, 8, 8), torch.randn(2, 3, 3, 3)
    assert conv.recognise("conv2d", (x, weight), {}) is None
    small = conv.recognise("conv2d", (x, weight), {}, x.nbytes)
    assert not small.accepts(Group())
    large = conv.recognise("conv2d", (x, weight), {}, x.nbytes - 1)
    assert large.accepts(Group())
    assert not large.accepts(Identity())
    even = torch.randn(2, 3, 4, 4)
    assert conv.recognise("conv2d", (x, even), {"padding": "same"}, 1) is None
    with pytest.raises(ValueError, match=r"backward_bytes=0; allowed: 1 byte or more"):
        conv.recognise("conv2d", (x, weight), {}, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_and_fake_tensors(dtype):
    module, x = nn.Conv2d(3, 4, 3, dtype=dtype), torch.randn(4, 3, 8, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x)
        with _Calls(Identity(), x[0].nbytes):
            y = module(x)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _Calls(Group(), x[0].nbytes):
        assert module(mode.from_tensor(x)).shape == y.shape


def test_a_config_lets_convolutions_work_in_pieces():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    x = torch.randn(8, 8, 16, 16)

    def gradient():
        model.zero_grad()
        model(x).square().sum().backward()
        return model[2].weight.grad.clone()

    def compressed(backward_bytes):
        options, records = Options(min_elements=64, backward_bytes=backward_bytes), []
        interception = Interception(
            model,
            lambda site: DerivativeCode(bits=1) if site.op == "relu" else Group(bits=8),
            options=options,
            seed=0,
            on_saved=records.extend,
        )
        interception.attach()
        found = gradient()
        interception.detach()
        return records, found

    exact = gradient()
    whole, usual = compressed(None)
    pieces, found = compressed(2 * 8 * 16 * 16 * 4)
    # The last convolution's input: eight bits an element, in both.
    payload = [record.planned for record in whole if record.site.name == "2 / conv2d / input"]
    assert payload == [8 * 8 * 16 * 16 + 8 * 8 * 16 * 16 // 256 * 4]
    assert sum(r.planned for r in pieces if r.site.name == "2 / conv2d / input") == payload[0]
    # Other random bits of the same quantiser.
    assert not torch.equal(found, usual)
    assert (found - exact).norm() <= 2 * (usual - exact).norm()
