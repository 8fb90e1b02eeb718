"""Quantisation noise beside the gradient's variance: measured, compared, warned of by site."""

import copy
import warnings

import pytest
import torch
from torch import nn

import memtrain
from memtrain.activations.adaptive.noise_warning import (
    GradientVariance,
    expected_noise,
    noise_warning,
)
from memtrain.wrapped import wrapped_of


def dense():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8)
    )


def config(**compressor):
    """Linear layers' inputs by a compressor; tanh's output is not kept beside them."""
    rules = [
        {"op": "tanh", "compressor": {"name": "derivative", "bits": 8}},
        {"op": "linear", "compressor": compressor},
    ]
    return {"preset": "optimizer_only", "optim": {"rules": []}, "activations": {"rules": rules}}


def batches(seed, n=64):
    return torch.randn(n, 64, generator=torch.Generator().manual_seed(seed))


def train(average, seeds):
    """Warnings of a run with ActNN's statistics, and its watch; weights stay where they are."""
    model = dense()
    cfg = config(name="samples", bits="auto")
    cfg["activations"] |= {"average_bits": average, "adapt_interval": 1000}
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.0), cfg)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for seed in seeds:
            model.zero_grad()
            model(batches(seed)).square().mean().backward()
    return [str(w.message) for w in told], wrapped_of(model).interception.saved.watch


def test_the_variance_of_small_gradients_is_their_variance():
    weight, variance = nn.Parameter(torch.zeros(3, 50)), GradientVariance(passes=4)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    variance.begin([weight, frozen])
    given = torch.randn(4, 3, 50)
    for grad in given:
        assert variance.running
        (weight * grad).sum().backward()
        variance.next()
    assert not variance.running
    assert variance.estimate() == pytest.approx(float(given.double().var(0).sum()))
    (weight * 100).sum().backward()  # no hook is left
    assert not variance.next() or variance.estimate() < 300


def test_the_variance_of_large_gradients_is_estimated_from_some_elements():
    weight = nn.Parameter(torch.zeros(400, 500))
    variance = GradientVariance(passes=8, elements=2000)
    variance.begin([weight])
    given = torch.randn(8, 400, 500)
    for grad in given:
        (weight * grad).sum().backward()
        variance.next()
    # a chi-square with 7 degrees of freedom each: 2000 of them are off by sqrt(2 / 7 / 2000) = 1.2%
    assert variance.estimate() == pytest.approx(float(given.double().var(0).sum()), rel=0.05)


def test_an_estimate_that_is_copied_starts_anew():
    weight, variance = nn.Parameter(torch.zeros(4)), GradientVariance(passes=2)
    variance.begin([weight])
    assert not copy.deepcopy(variance).running
    variance.stop()


def test_statistics_warn_where_batches_differ_less_than_the_noise():
    told, watch = train(1.0, [0] * 12)  # one batch again and again: the bits are all that varies
    (text,) = told
    assert "variance from batch to batch" in text
    assert "more average_bits would lower it" in text
    assert "2 / linear / input" in text
    # Rounding brings u (1 - u) of a step squared: 1/6 for uniform values, which is predicted, more
    # for those that are dense in the middle, as these are, and at most 1/4. 8 passes of 256
    # elements are off by a few per cent.
    assert 0.9 < watch.gradient_variance.estimate() / sum(watch.noise.values()) < 1.1 * 6 / 4


def test_statistics_are_silent_where_batches_differ_more():
    told, watch = train(8.0, range(12))
    assert told == []
    assert 0 < sum(watch.noise.values()) < 0.01 * watch.gradient_variance.estimate()


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = dense()

    def forward(self, x, labels):
        y = self.layers(x)
        return type("Output", (), {"loss": (y - labels).square().mean(), "logits": y})()


@pytest.mark.parametrize(("bits", "noisy"), [(1, True), (8, False)])
def test_the_warning_names_the_worst_sites(bits, noisy):
    model, batch = Regression(), {"x": batches(0), "labels": torch.zeros(64, 8)}
    cfg = config(name="group", bits=bits)
    if not noisy:
        assert memtrain.verify(model, batch, cfg).warning == ""
        return
    with pytest.warns(UserWarning, match="of the gradient's variance from batch to batch") as told:
        found = memtrain.verify(model, batch, cfg, per_site=True)
    worst = max(found.sites, key=lambda site: site.variance)
    assert f"most of it from {worst.name} (" in str(told[0].message)
    # halves of a batch estimate the variance of its gradient: against 200 batches
    gradients = []
    for seed in range(1, 201):
        model.zero_grad()
        model(batches(seed), torch.zeros(64, 8)).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
    stacked = torch.stack(gradients)
    share = stacked.var(0).sum() / stacked.square().sum(1).mean()
    assert found.batches == pytest.approx(float(share), rel=0.25)


def test_a_closure_is_compared_to_the_squared_norm():
    model = dense()
    signs = batches(1).sign()[:, :8]
    closure = lambda: (model(batches(0)) * signs).sum().backward()  # noqa: E731
    cfg = config(name="group", bits=1)
    with pytest.warns(UserWarning, match="of the gradient's squared norm"):
        assert memtrain.verify(model, closure, cfg).batches is None


def test_noise_that_widths_add():
    assert expected_noise([4.0], (1, 1)) == 4.0
    assert expected_noise([1.0, 9.0], (8, 1)) == 1.0 + 9.0 / 255**2
    assert noise_warning({"a": 1.0}, float("nan"), "", "") == ""
    assert noise_warning({"a": 0.1}, 1.0, "", "") == ""
    assert "more than 100%" in noise_warning({"a": 1.0}, 0.0, "squared norm", "8 bits")
