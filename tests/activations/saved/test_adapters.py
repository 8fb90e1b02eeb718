"""Frozen weights and adapters beside them: what nobody's gradient needs takes no bytes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memtrain
from memtrain.activations.intercept.options import Options
from memtrain.activations.trace.fake_forward import trace
from memtrain.audit.live_storages import saved_nbytes
from memtrain.compressors import Group, Identity
from memtrain.compressors.base import Key

EXACT = {"preset": "exact", "activations": {"min_elements": 0}}
CONVOLUTIONS = {
    "conv1d": (nn.Conv1d(4, 6, 3, padding=1), (2, 4, 40)),
    "conv2d": (nn.Conv2d(4, 6, 3, stride=2, bias=False), (2, 4, 12, 12)),
    "grouped": (nn.Conv2d(4, 8, 3, groups=4, padding="same"), (2, 4, 12, 12)),
    "reflected": (nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"), (2, 4, 12, 12)),
    "conv3d": (nn.Conv3d(2, 3, 3, dilation=2), (1, 2, 8, 8, 8)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 9, 9)),
}
FORMS = {
    "plain": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x,
    "double": lambda x: x.double(),
}


class Frozen(nn.Module):
    """A scale that is trained, before a convolution whose weight is not."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.layer(x * self.scale).square().sum()


@pytest.mark.each_value
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_frozen_convolution_keeps_no_input_and_gives_the_same_gradient(
    name, form, autocast, bias
):
    layer, shape = CONVOLUTIONS[name]
    x = FORMS[form](torch.randn(shape))
    model = Frozen(layer.requires_grad_(False)).to(x.dtype)
    if layer.bias is not None:
        layer.bias.requires_grad_(bias)
    optimizer = torch.optim.SGD(model.parameters())

    def gradients(*, create_graph=False):
        own = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(own)
        trained = [own, *(p for p in model.parameters() if p.requires_grad)]
        return torch.autograd.grad(loss, trained, create_graph=create_graph)

    plain = gradients()
    _, optimizer = memtrain.wrap(model, optimizer, EXACT)
    ours = gradients()
    assert all(map(torch.equal, ours, plain))
    dropped = [e for e in memtrain.plan_of(model).entries("activation") if "frozen" in e.reason]
    assert [entry.planned for entry in dropped] == [0]
    assert all(map(torch.equal, gradients(create_graph=True), plain))
    memtrain.unwrap(model, optimizer)
    layer.float()


def test_weights_that_are_computed_are_dropped_where_only_they_have_a_gradient():
    x, scale = torch.randn(2, 4, 12, 12), nn.Parameter(torch.ones(8, 1, 1, 1))
    base = torch.randn(8, 4, 3, 3)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = scale

        def forward(self, x):
            return F.conv2d(x, base * self.scale).square().sum()

    model = Scaled()
    for given in (x, x.clone().requires_grad_()):
        plain = torch.autograd.grad(model(given), scale)[0]
        optimizer = torch.optim.SGD(model.parameters())
        _, optimizer = memtrain.wrap(model, optimizer, EXACT)
        assert torch.equal(torch.autograd.grad(model(given), scale)[0], plain)
        dropped = [e for e in memtrain.plan_of(model).entries("activation") if "frozen" in e.reason]
        assert len(dropped) == (not given.requires_grad)
        memtrain.unwrap(model, optimizer)


def test_a_trained_convolution_keeps_its_input():
    layer, shape = CONVOLUTIONS["conv2d"]
    layer.requires_grad_(True)
    rows = trace(layer, torch.randn(shape).requires_grad_(), lambda site: Identity(), Options())
    assert not any("frozen" in row.reason for row in rows)
    layer.requires_grad_(False)


class Lora(nn.Module):
    """As PEFT's, with a dropout of its own."""

    def __init__(self, base, p, rank=4):
        super().__init__()
        self.base, self.dropout = base.requires_grad_(False), nn.Dropout(p)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(self.dropout(x)))


class Gated(nn.Module):
    def __init__(self, p=0.25):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.gate, self.raised = (Lora(nn.Linear(64, 96), p) for _ in range(2))
        self.out = Lora(nn.Linear(96, 64), p)

    def forward(self, x):
        x = self.first(x)
        return self.out(F.silu(self.gate(x)) * self.raised(x))


def wrapped(model, *, derive, bits=8):
    rules = [{"compressor": {"name": "group", "bits": bits, "rounding": "nearest"}}]
    activations = {"min_elements": 0, "rules": rules, "derive_products": derive}
    cfg = {"preset": "balanced", "activations": activations, "optim": {"rules": []}}
    trained = [p for p in model.parameters() if p.requires_grad]
    return memtrain.wrap(model, torch.optim.SGD(trained), cfg)


def test_dropouts_and_products_take_no_bytes_of_their_own():
    x, held = torch.randn(32, 64), []
    for derive in (False, True):
        model, _ = wrapped(Gated(), derive=derive)
        nbytes, loss = saved_nbytes(lambda: model(x).sum(), exclude=[x])  # noqa: B023
        loss.backward()
        held.append(nbytes)

    def payload(numel):
        return numel + -(-numel // 256) * 4

    # One payload of the first layer's result in place of two dropped copies, none of the product
    # (its dropped copy is made of it). Masks stay.
    assert held[0] - held[1] == payload(32 * 64) + payload(32 * 96)


def test_a_dropped_copys_gradient_is_that_of_the_quantised_input():
    torch.manual_seed(0)
    model = Gated()
    model, _ = wrapped(model, derive=True)
    x = torch.randn(32, 64)
    seen = {}

    def note(name, value):
        seen[name] = value.detach().clone()

    for name in ("gate", "raised"):
        module = getattr(model, name)
        module.register_forward_pre_hook(lambda _, args, name=name: note(name, args[0]))
        module.dropout.register_forward_hook(
            lambda _, args, y, name=name: note(f"{name} kept", y != 0)
        )
        module.down.register_full_backward_hook(
            lambda _, __, grads, name=name: note(f"{name} grad", grads[0])
        )
    model(x).square().sum().backward()
    group = Group(bits=8, rounding="nearest")
    quantised = group.decompress(group.compress(seen["gate"].flatten(), key=Key())).view(32, 64)
    for name in ("gate", "raised"):
        given = torch.where(seen[f"{name} kept"], quantised / 0.75, 0.0)
        expected = seen[f"{name} grad"].t() @ given
        torch.testing.assert_close(getattr(model, name).down.weight.grad, expected)


@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_derived_products_err_no_more_than_payloads_of_their_own(dtype, p):
    """Against float32 gradients of the same masks, within twice the errors of three payloads."""
    torch.manual_seed(0)
    model, x = Gated(p).to(dtype), torch.randn(64, 64).to(dtype)

    def gradients():
        model.zero_grad()
        torch.manual_seed(1)
        (model(x).float() * torch.linspace(-1, 1, 64)).sum().backward()
        return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.requires_grad])

    exact, errors = gradients(), []
    for derive in (False, True):
        _, optimizer = wrapped(model, derive=derive, bits=4)
        errors.append(float((gradients() - exact).norm() / exact.norm()))
        memtrain.unwrap(model, optimizer)
    assert 0 < errors[1] <= 2 * errors[0]


def test_factors_that_no_payload_gives_are_left_alone():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            y = self.first(x)
            product = y * torch.ones(64, 64)  # the factor is no activation
            return self.last(product * y.mean(-1, keepdim=True))  # of another shape

    model, x = Model(), torch.randn(64, 64)
    plain = torch.autograd.grad(model(x).sum(), model.last.weight)[0]
    activations = {"derive_products": True, "min_elements": 0}
    optimizer = torch.optim.SGD(model.parameters())
    memtrain.wrap(model, optimizer, {"preset": "exact", "activations": activations})
    assert torch.equal(torch.autograd.grad(model(x).sum(), model.last.weight)[0], plain)


def test_the_preset_holds_fewer_bytes_than_balanced():
    x, held = torch.randn(64, 64), {}
    for preset in ("balanced", "lora"):
        model = Gated()
        trained = [p for p in model.parameters() if p.requires_grad]
        memtrain.wrap(model, torch.optim.AdamW(trained), preset)
        held[preset] = saved_nbytes(lambda: model(x).sum(), exclude=[x])[0]  # noqa: B023
    assert held["lora"] < held["balanced"]
