"""Recurrent layers of torch: what is compressed of them, and what the plan says of the rest."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity
from torch.overrides import handle_torch_function, has_torch_function

import memtrain


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.head = kind(32, 64, batch_first=True), nn.Linear(64, 8)

    def forward(self, x):
        return self.head(self.layer(x)[0])


def gradients(model, x):
    model(x).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def share(model, path):
    """Planned over plain bytes of a module's saved tensors, and what the plan says of them."""
    entries = [e for e in memtrain.plan_of(model).entries("activation") if e.site.startswith(path)]
    planned, plain = sum(e.planned for e in entries), sum(e.nbytes for e in entries)
    return planned / plain, " ".join(e.reason for e in entries)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_the_tensors_of_each_step_are_compressed(kind):
    torch.manual_seed(0)
    model, x = Recurrent(kind), torch.randn(32, 40, 32)
    exact = gradients(copy.deepcopy(model), x)
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), "balanced")
    assert cosine_similarity(gradients(model, x), exact, dim=0) > 0.98  # 4 bits, 40 steps
    assert share(model, "layer")[0] < 0.2


def test_an_lstms_reserve_is_listed_with_the_way_to_spare_it():
    torch.manual_seed(0)
    plain, x = Recurrent(nn.LSTM), torch.randn(32, 40, 32)
    exact = gradients(copy.deepcopy(plain), x)
    model = copy.deepcopy(plain)
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), "balanced")
    assert cosine_similarity(gradients(model, x), exact, dim=0) > 0.98
    kept, reasons = share(model, "layer")
    spared = {"preset": "balanced", "activations": {"recompute": ["layer"]}}
    model = copy.deepcopy(plain)
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), spared)
    gradients(model, x)
    if "reserve, opaque bytes: activations.recompute" in reasons:  # this torch has oneDNN
        assert kept > 0.5
    saved = memtrain.plan_of(model).entries("activation")
    assert not any(e.site.startswith("layer / lstm") for e in saved)


class _Cudnn(torch.autograd.Function):
    """Saves what `_cudnn_rnn` saves, and checks what its backward is given."""

    @staticmethod
    def forward(ctx, x, buffer, *weights):
        y = x.tanh()
        ctx.save_for_backward(x, *weights, y, buffer)
        ctx.exact = buffer.clone(), *[w.clone() for w in weights]
        return y

    @staticmethod
    def backward(ctx, grad):
        x, *weights, y, buffer = ctx.saved_tensors
        assert not torch.equal(y, x.tanh())  # the activations are compressed
        for found, exact in zip((buffer, *weights), ctx.exact, strict=True):
            assert torch.equal(found, exact)
        return grad, None, *map(torch.zeros_like, weights)


def lstm(x, states, weights):
    """torch.lstm on CUDA, of weights that lie apart; under autocast of half copies of them."""
    given = (x, *states, *weights)
    if has_torch_function(given):
        return handle_torch_function(lstm, given, x, states, weights)
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.half if autocast else torch.float32
    padded = sum(w.numel() for w in weights) + 64
    buffer, parts, start = torch.zeros(padded, dtype=dtype), [], 0
    for w in weights:
        shape = (w.numel(), 1)
        part = torch.empty(0, dtype=dtype).set_(buffer.untyped_storage(), start, shape)
        parts.append(part.copy_(w.view_as(part)))
        start += w.numel()
    return _Cudnn.apply(x.to(dtype), buffer, *(parts if autocast else weights)).float()


class Cudnn(nn.Module):
    def __init__(self, *shapes):
        super().__init__()
        self.first, self.head = nn.Linear(64, 64), nn.Linear(64, 8)
        self.weights = nn.ParameterList([torch.randn(shape) for shape in shapes])

    def forward(self, x):
        h = torch.zeros(1, 32, 64)
        return self.head(lstm(self.first(x), (h, h.clone()), [*self.weights]))


SHAPES = [[(256, 64)] * 2, [(4096, 1), (64, 64)], [(30, 20)] * 2]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_the_flat_copy_of_the_weights_is_exact(autocast, shapes):
    model = Cudnn(*shapes)
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), "balanced")
    for _ in range(3):  # the first forward records, the second settles
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            loss = model(torch.randn(16, 32, 64)).square().sum()
        loss.backward()
    reasons = [e.reason for e in memtrain.plan_of(model).entries("activation")]
    if shapes[0] == (256, 64):  # of smaller ones the plan says more of what is compressed
        assert any("weights, as cuDNN lays them out" in reason for reason in reasons)
