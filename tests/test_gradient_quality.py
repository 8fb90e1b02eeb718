"""Gradient quality: exact is exact, noise is noise, bias is bias, and nothing is touched."""

import math

import pytest
import torch
from torch import nn

import memtrain
from memtrain.compressors import Group, Identity, Keep
from memtrain.gradient_quality import GradientQuality, measure


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
    found = memtrain.gradient_quality(model, closure(model), "exact")
    for row in (found.whole, *found.sites):
        assert row.cosine == pytest.approx(1.0, abs=1e-12)
        assert row.variance == row.bias == 0.0
    assert len(found.sites) >= 3


def test_fewer_bits_are_worse_in_every_number():
    model = make()
    run = closure(model)
    rows = [
        measure(model, run, lambda site, b=b: Group(bits=b), per_site=False).whole
        for b in (8, 4, 2)
    ]
    assert rows[0].cosine > rows[1].cosine > rows[2].cosine
    assert rows[0].variance < rows[1].variance < rows[2].variance


def test_nearest_rounding_is_bias_and_no_variance():
    model = make()
    nearest = Group(bits=3, rounding="nearest")
    row = measure(model, closure(model), lambda site: nearest, per_site=False).whole
    assert row.variance == 0.0
    # with no variance, cosine and bias tell one error: |error| >= the sine of the angle
    assert row.bias >= math.sqrt(1 - row.cosine**2) > 0.01


def test_a_linear_site_alone_has_no_bias():
    model = make()
    seeds = range(40)
    choose = lambda site: Group(bits=2) if site.op == "linear" else Keep("kept")  # noqa: E731
    found = measure(model, closure(model), choose, seeds=seeds)
    for row in found.sites:
        assert "linear" in row.name
        assert row.variance > 1e-4
        # what is left of |mean error|**2 once the variance is taken off is noise of its own size
        assert row.bias**2 < 4 * row.variance / len(seeds)


def test_sites_alone_add_up_to_the_whole():
    model = make()
    found = measure(model, closure(model), lambda site: Group(bits=4), seeds=range(16))
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
    own = memtrain.gradient_quality(model, run, per_site=False)
    assert own == memtrain.gradient_quality(model, run, "activations_only", per_site=False)
    assert memtrain.state_dict(model) == step
    assert torch.equal(torch.get_rng_state(), state)
    for p, (grad, content) in zip(model.parameters(), gradients, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, content)


def test_a_batch_stands_for_a_closure():
    model = make()
    rows = [
        memtrain.gradient_quality(model, x, "smallest", warn=False).sites
        for x in (batch(), (batch(),))
    ]
    assert rows[0] == rows[1]
    assert all(0.5 < row.cosine < 1 for row in rows[0])


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = make()

    def forward(self, x):
        out = self.layers(x)
        return type("Output", (), {"loss": out.square().mean(), "logits": out})()


def test_an_outputs_own_loss_is_used():
    model = WithLoss()
    x = batch()
    found = memtrain.gradient_quality(model, {"x": x}, "smallest")
    assert found == memtrain.gradient_quality(model, lambda: model(x).loss.backward(), "smallest")


def test_it_prints_the_noisiest_first():
    model = make()
    found = memtrain.gradient_quality(model, closure(model), "smallest")
    text = str(found)
    order = sorted(found.sites, key=lambda row: -row.variance)
    places = [text.index(row.name) for row in (found.whole, *order)]
    assert places == sorted(places)


def test_no_gradient_gives_nan_not_an_error():
    model = make()
    found = memtrain.gradient_quality(
        model, lambda: (model(batch()) * 0).sum().backward(), "smallest", per_site=False
    )
    assert math.isnan(found.whole.cosine)
    assert isinstance(found, GradientQuality)


def test_wrong_arguments_are_named():
    model = make()
    with pytest.raises(ValueError, match="two or more"):
        memtrain.gradient_quality(model, closure(model), "exact", seeds=[1])
    with pytest.raises(ValueError, match="left no gradient"):
        measure(model, lambda: None, lambda site: Identity())
    with pytest.raises(ValueError, match="unknown preset"):
        memtrain.gradient_quality(model, closure(model), "exactt")
