"""Cross-entropy with a compressed log-softmax: torch's value, torch's gradient, fewer bytes."""

import gc
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import memtrain
from memtrain.activations.ops import cross_entropy as ours
from memtrain.activations.ops.cross_entropy import cross_entropy, recognise
from memtrain.audit.live_storages import LiveStorages
from memtrain.compressors import Group, Identity
from memtrain.compressors.base import Compressor, Key, Packed


@dataclass(frozen=True)
class Exact(Compressor):
    """Loses nothing, and gives back a tensor of its own."""

    def compress(self, x, *, key=Key()):  # noqa: B008
        return Packed({"x": x.clone()}, x.shape, x.dtype)

    def decompress(self, packed):
        return packed.tensors["x"].clone()


CASES = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored": {"ignore_index": 2},
    "ignored sum": {"ignore_index": 0, "reduction": "sum"},
    "ignored none": {"ignore_index": 70000, "reduction": "none"},
}


def made(shape, dtype):
    return (4 * torch.randn(shape)).to(dtype), torch.randint(shape[1], shape[:1])


def gradient(function, x):
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view_as(y))
    return y.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (1000, 17), (37, 300), (3, 5000)], ids=str)
def test_value_is_torchs_and_the_gradient_as_good(shape, options, dtype, monkeypatch):
    monkeypatch.setattr(ours, "_PIECE", 4096)
    x, target = made(shape, dtype)
    target[1::5] = options.get("ignore_index", -100)
    mine, dx = gradient(lambda t: cross_entropy(t, target, **options, compressor=Exact()), x)
    plain, expected = gradient(lambda t: F.cross_entropy(t, target, **options), x)
    assert torch.equal(mine, plain)
    _, true = gradient(lambda t: F.cross_entropy(t, target, **options), x.double())
    unit = 2 * torch.finfo(dtype).eps * true.abs().max()  # four roundings, by half a unit each
    error = (dx.double() - true).abs().max()
    assert error <= 2 * (expected.double() - true).abs().max() + unit


def test_pieces_are_seams_that_nobody_sees(monkeypatch):
    x, target = made((64, 9), torch.float32)
    _, whole = gradient(lambda t: cross_entropy(t, target, compressor=Exact()), x)
    monkeypatch.setattr(ours, "_PIECE", 30)
    _, pieces = gradient(lambda t: cross_entropy(t, target, compressor=Exact()), x)
    assert torch.equal(whole, pieces)


def test_nothing_to_learn_from_gives_zeros_as_in_torch():
    x, target = torch.randn(4, 6), torch.full((4,), -100)
    value, dx = gradient(lambda t: cross_entropy(t, target, compressor=Exact()), x)
    assert value.isnan()
    assert torch.equal(dx, torch.zeros(4, 6))


def test_backward_allocates_the_gradient_and_a_piece(monkeypatch):
    monkeypatch.setattr(ours, "_PIECE", 2**18)
    rows, classes = 512, 16384
    x = torch.randn(rows, classes, requires_grad=True)
    target = torch.randint(classes, (rows,))
    loss = cross_entropy(x, target, compressor=Group(bits=8))
    loss.backward(retain_graph=True)  # the sizes of payloads are known then, from meta tensors
    gc.collect()
    with LiveStorages() as live:
        loss.backward()
    assert live.peak_nbytes < 1.05 * x.nbytes


def test_forward_allocates_the_payload_and_a_piece(monkeypatch):
    monkeypatch.setattr(ours, "_PIECE", 2**18)
    x, target = torch.randn(512, 16384, requires_grad=True), torch.randint(16384, (512,))
    with LiveStorages() as live:
        loss = cross_entropy(x, target, compressor=Group(bits=8))
    payload = x.numel() + x.numel() // 256 * 4
    assert loss.grad_fn is not None
    assert live.peak_nbytes < payload + 1.1 * 4 * 2**18


def test_autocast_casts_pieces_not_the_logits(monkeypatch):
    """float32 logits would take 4 bytes an element, and so would their gradient."""
    monkeypatch.setattr(ours, "_PIECE", 2**16)
    x = torch.randn(512, 2048).bfloat16().requires_grad_()
    target = torch.randint(2048, (512,))
    with torch.autocast("cpu", torch.bfloat16):
        with LiveStorages() as live:
            loss = cross_entropy(x, target, compressor=Group(bits=8))
        expected = F.cross_entropy(x.detach(), target)
    payload = x.numel() + x.numel() // 256 * 4
    assert torch.equal(loss, expected)
    assert live.peak_nbytes < payload + 2.2 * 4 * 2**16
    loss.backward(retain_graph=True)
    with LiveStorages() as live:
        loss.backward()
    assert live.peak_nbytes < x.nbytes + 2.2 * 4 * 2**16


def test_the_gradient_under_autocast_is_the_casts(monkeypatch):
    monkeypatch.setattr(ours, "_PIECE", 512)
    x, target = torch.randn(40, 50).bfloat16(), torch.randint(50, (40,))
    _, expected = gradient(lambda t: cross_entropy(t.float(), target, compressor=Exact()), x)
    with torch.autocast("cpu", torch.bfloat16):
        _, dx = gradient(lambda t: cross_entropy(t, target, compressor=Exact()), x)
    assert dx.dtype == torch.bfloat16
    assert torch.equal(dx, expected)


def test_pieces_are_larger_where_launches_cost():
    context = SimpleNamespace(save_for_backward=lambda *tensors: None)
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(8192, 50257, device="cuda", dtype=torch.bfloat16)
        target = torch.zeros(8192, dtype=torch.long, device="cuda")
        inputs = x, target, -100, "mean", True
        ours._cross_entropy_forward(context, *inputs, Group(bits=8), Key())
    assert len(context.payloads) == 8


def test_pieces_have_random_bits_of_their_own(monkeypatch):
    monkeypatch.setattr(ours, "_PIECE", 512)
    x = torch.randn(1, 512).expand(8, 512).contiguous().requires_grad_()
    loss = cross_entropy(x, torch.zeros(8, dtype=torch.long), compressor=Group(bits=2))
    loss.backward()
    assert len({tuple(row.tolist()) for row in x.grad}) == 8


def test_a_class_out_of_range_is_torchs_error_in_any_piece(monkeypatch):
    monkeypatch.setattr(ours, "_PIECE", 64)
    x, target = torch.randn(16, 8, requires_grad=True), torch.zeros(16, dtype=torch.long)
    target[13] = 8
    with pytest.raises(IndexError, match="Target 8 is out of bounds"):
        cross_entropy(x, target, compressor=Exact())


def test_a_repeated_backward_gives_the_same_gradient():
    x, target = made((5, 7), torch.float32)
    loss = cross_entropy(x.requires_grad_(), target, compressor=Group(bits=8))
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, t: ((x, x.softmax(1)), {}),
        lambda x, t: ((x, t), {"size_average": True}),
        lambda x, t: ((x, t, torch.ones(7)), {}),
        lambda x, t: ((x, t), {"label_smoothing": 0.1}),
        lambda x, t: ((x.t().contiguous().t(), t), {}),
        lambda x, t: ((x[0], t[0]), {}),
        lambda x, t: ((x.view(5, 7, 1), t.view(5, 1)), {}),
        lambda x, t: ((x[:0], t[:0]), {}),
        lambda x, t: ((x, t[:3]), {}),
        lambda x, t: ((x, t), {"reduction": "median"}),
    ],
)
def test_other_calls_are_left_alone(call):
    args, kwargs = call(torch.randn(5, 7), torch.randint(7, (5,)))
    assert recognise("cross_entropy", args, kwargs) is None


def test_identity_and_second_derivatives():
    x, target = torch.randn(5, 7, requires_grad=True), torch.randint(7, (5,))
    call = recognise("cross_entropy", (x, target), {"ignore_index": -1})
    assert call is not None
    assert not call.accepts(Identity())
    with pytest.raises(RuntimeError, match="differentiate it twice"):
        torch.autograd.grad(call.run(Group(bits=8), Key()), x, create_graph=True)


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 0.1}, {"weight": torch.ones(512)}], ids=str
)
def test_the_log_softmax_of_other_calls_is_compressed_as_a_saved_tensor(options):
    model, labels = Scores(), torch.randint(512, (64,))
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters(), 0.1), "balanced")
    model(labels, **options).backward()
    (row,) = [e for e in memtrain.plan_of(model).entries("activation") if e.compressor]
    assert row.site == "(root) / log_softmax / saved"
    assert row.planned == 64 * 512 + 64 * 512 // 256 * 4


class Scores(nn.Module):
    """Gives its own loss, as transformers' models do."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Parameter(4 * torch.randn(64, 512))

    def forward(self, labels, **options):
        return F.cross_entropy(self.scores + 0, labels, **options)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_wrapped_models_loss_is_replaced(autocast):
    model, labels = Scores(), torch.randint(512, (64,))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gradients = []
    for preset in ("exact", "balanced"):
        _, wrapped = memtrain.wrap(model, optimizer, preset)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(labels)
        loss.backward()
        gradients.append((loss.detach(), model.scores.grad.clone()))
        memtrain.unwrap(model, wrapped)
        model.zero_grad()
    (plain, expected), (mine, found) = gradients
    assert torch.equal(plain, mine)
    # A code is off by less than a step of 8 bits, whose bounds are rounded outwards to bfloat16.
    saved = model.scores.detach().log_softmax(1)
    step = (saved.max() - saved.min() + 2 * 2**-8 * saved.abs().max()) / 255
    bound = saved.exp() / 64 * (step.exp() - 1)
    assert ((found - expected).abs() <= bound + torch.finfo(torch.float32).eps / 64).all()
    assert not torch.equal(found, expected)
