"""verify: exact is exact, noise is noise, bias is bias, faults are named, nothing is touched."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memtrain
from memtrain.activations.intercept import replaced_ops
from memtrain.activations.ops import nonlinear
from memtrain.activations.saved import attention
from memtrain.activations.saved.store import Entry
from memtrain.compressors import Group, Identity, Keep
from memtrain.verification import Verification, measure


def make():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8)
    )


def batch():
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def closure(model):
    x = batch()
    return lambda: model(x).square().mean().backward()


def test_the_identity_is_perfect():
    model = make()
    found = memtrain.verify(model, closure(model), "exact", per_site=True)
    for row in (found.whole, *found.sites):
        assert row.cosine == pytest.approx(1.0, abs=1e-12)
        assert row.variance == row.bias == 0.0
    assert len(found.sites) >= 3


def test_fewer_bits_are_worse_in_every_number():
    model = make()
    run = closure(model)
    rows = [measure(model, run, lambda site, b=b: Group(bits=b)).whole for b in (8, 4, 2)]
    assert rows[0].cosine > rows[1].cosine > rows[2].cosine
    assert rows[0].variance < rows[1].variance < rows[2].variance


def test_nearest_rounding_is_bias_and_no_variance():
    model = make()
    nearest = Group(bits=3, rounding="nearest")
    row = measure(model, closure(model), lambda site: nearest).whole
    assert row.variance == 0.0
    # with no variance, cosine and bias measure one error: |error| >= the sine of the angle
    assert row.bias >= math.sqrt(1 - row.cosine**2) > 0.01


def test_a_linear_site_alone_has_no_bias():
    model = make()
    draws = 40
    choose = lambda site: Group(bits=2) if site.op == "linear" else Keep("kept")  # noqa: E731
    found = measure(model, closure(model), choose, draws=draws, per_site=True)
    for row in found.sites:
        assert "linear" in row.name
        assert row.variance > 1e-4
        # what is left of |mean error|**2 once the variance is taken off is noise of its own size
        assert row.bias**2 < 4 * row.variance / draws


def test_sites_alone_add_up_to_the_whole():
    model = make()
    found = measure(model, closure(model), lambda site: Group(bits=4), draws=16, per_site=True)
    total = sum(row.variance for row in found.sites)
    assert 0.5 * total < found.whole.variance < 2 * total


def test_nothing_is_changed_and_a_wrapped_model_is_its_plan():
    model = make()
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), "activations_only")
    run = closure(model)
    run()
    step = memtrain.state_dict(model)
    gradients = [(p.grad, p.grad.clone()) for p in model.parameters()]
    state = torch.get_rng_state()
    own = memtrain.verify(model, run)
    assert own == memtrain.verify(model, run, "activations_only")
    assert memtrain.state_dict(model) == step
    assert torch.equal(torch.get_rng_state(), state)
    for p, (grad, content) in zip(model.parameters(), gradients, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, content)


def test_a_batch_stands_for_a_closure():
    model = make()
    rows = [
        memtrain.verify(model, x, "smallest", warn=False, per_site=True).sites
        for x in (batch(), (batch(),))
    ]
    assert rows[0] == rows[1]
    assert all(0.5 < row.cosine < 1 for row in rows[0])


def test_it_prints_the_noisiest_first():
    model = make()
    found = memtrain.verify(model, closure(model), "smallest", per_site=True)
    text = str(found)
    order = sorted(found.sites, key=lambda row: -row.variance)
    places = [text.index(row.name) for row in (found.whole, *order)]
    assert places == sorted(places)


def test_no_gradient_gives_nan_not_an_error():
    model = make()
    found = memtrain.verify(model, lambda: (model(batch()) * 0).sum().backward(), "smallest")
    assert math.isnan(found.whole.cosine)
    assert isinstance(found, Verification)


def test_wrong_arguments_are_named():
    model = make()
    with pytest.raises(ValueError, match="two or more"):
        memtrain.verify(model, closure(model), "exact", draws=1)
    with pytest.raises(ValueError, match="left no gradient"):
        measure(model, lambda: None, lambda site: Identity())
    with pytest.raises(ValueError, match="unknown preset"):
        memtrain.verify(model, closure(model), "exactt")


def small_transformer():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)


def small_cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.GroupNorm(4, 32),
        nn.SiLU(inplace=True),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(32 * 14 * 14, 10),
    )


CASES = {
    "transformer": (small_transformer, lambda: torch.randn(8, 32, 64)),
    "cnn": (small_cnn, lambda: torch.randn(4, 3, 32, 32)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sound_models_are_ok(case, dtype):
    make_model, make_batch = CASES[case]
    model, x = make_model().to(dtype), make_batch().to(dtype)
    found = memtrain.verify(model, x, "balanced", warn=False)
    assert found.ok, found.verdict
    assert found.faults == []
    assert found.ops > 0
    assert found.tensors > 0
    assert found.verdict.startswith("OK")


def test_a_wrong_replaced_op_is_named(monkeypatch):
    model = make()
    run = closure(model)
    real = nonlinear.recognise

    def wrong(name, args, kwargs):
        call = real(name, args, kwargs)
        if call is None or name != "gelu":
            return call
        return call._replace(waits=lambda *args: call.waits(*args) * 1.001)

    for function, (recognise, name) in replaced_ops.REPLACED.items():
        if recognise is real:
            monkeypatch.setitem(replaced_ops.REPLACED, function, (wrong, name))
    found = memtrain.verify(model, run, "balanced", warn=False)
    assert len(found.faults) == 1
    assert found.faults[0].startswith("1 / gelu / input: the replaced op errs by ")
    assert not found.ok
    assert found.verdict.startswith("WRONG: 1 / gelu / input")
    with pytest.warns(UserWarning, match="WRONG: 1 / gelu"):
        memtrain.verify(model, run, "balanced")


def test_a_payload_of_another_tensor_is_named(monkeypatch):
    model = make()
    read = Entry.read
    monkeypatch.setattr(Entry, "read", lambda *args: read(*args).flip(0))
    found = memtrain.verify(model, closure(model), "balanced", warn=False)
    assert found.faults
    assert found.faults[0].startswith("4 / linear / input: a saved tensor came back with an error")


def test_one_wrong_element_is_found(monkeypatch):
    model = make()
    read = Entry.read

    def spoil(*args):
        x = read(*args).clone()
        x.view(-1)[7] += 3
        return x

    monkeypatch.setattr(Entry, "read", spoil)
    assert memtrain.verify(model, closure(model), "balanced", warn=False).faults


def test_a_biased_gradient_is_named():
    model = make()
    nearest = Group(bits=1, rounding="nearest")
    choose = lambda site: nearest if site.module == "2" else Keep("kept")  # noqa: E731
    found = measure(model, closure(model), choose)
    assert [row.name for row in found.biased] == ["2.weight"]
    assert found.verdict.startswith("BIASED: ")
    assert "2.weight" in found.verdict
    assert found.faults == []


def test_noise_alone_is_no_bias():
    model = make()
    for first in range(5):
        torch.manual_seed(first)
        choose = lambda site: Group(bits=1) if site.op == "linear" else Keep("kept")  # noqa: E731
        found = measure(model, closure(model), choose)
        assert found.ok, found.verdict
        assert found.whole.variance > 0.05


def wrapped(**activations):
    model = make()
    cfg = {"preset": "balanced", "activations": {"verify": True, **activations}}
    return memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), cfg)


def test_the_first_steps_of_a_run_are_verified(monkeypatch):
    model, optimizer = wrapped()
    for _ in range(3):
        closure(model)()
        optimizer.step()
    read = Entry.read
    monkeypatch.setattr(Entry, "read", lambda *args: read(*args) * 2)
    closure(model)()  # the fourth is not
    model, _ = wrapped()
    with pytest.raises(RuntimeError, match=r"activations\.verify: 4 / linear / input: a saved"):
        closure(model)()


def test_the_inputs_of_recomputed_modules_are_verified(monkeypatch):
    inputs = {"recompute": ["4"], "recompute_inputs": {"name": "group", "bits": 8}}
    model, _ = wrapped(**inputs)
    closure(model)()
    read = Entry.read
    monkeypatch.setattr(Entry, "read", lambda *args: read(*args) * 2)
    model, _ = wrapped(**inputs)
    with pytest.raises(RuntimeError, match=r"activations\.verify: 4 / recompute / input: a saved"):
        closure(model)()


def test_verified_steps_are_the_same_steps():
    losses = []
    for verify in (True, False):
        torch.manual_seed(3)
        model, optimizer = wrapped(verify=verify)
        for _ in range(5):
            loss = model(batch()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = self.qkv(x).view(4, 64, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, scale=0.3, is_causal=True)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_result_of_attention_that_is_recomputed_otherwise_is_a_fault(wrong, monkeypatch):
    forward = attention.FusedAttention.results
    if wrong:
        monkeypatch.setattr(
            attention.FusedAttention,
            "results",
            lambda self: {name: x * 1.001 for name, x in forward(self).items()},
        )
    x = torch.randn(256, 64)
    found = memtrain.verify(Attention(), x, "activations_only", warn=False)
    assert bool(found.faults) is wrong
    assert not wrong or "attention" in found.faults[0]
