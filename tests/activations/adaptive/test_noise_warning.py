"""Quantisation noise beside the gradient's variance: measured, compared, warned of by site."""

import pytest
import torch
from torch import nn

import memtrain
from memtrain.verification import Quality, Verification


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
    with pytest.warns(
        UserWarning, match="of the gradient's variance from batch to batch"
    ) as reported:
        found = memtrain.verify(model, batch, cfg, per_site=True)
    worst = max(found.sites, key=lambda site: site.variance)
    assert f"most of it from {worst.name} (" in str(reported[0].message)
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


def test_a_warning_needs_a_reference_and_a_tenth_of_it():
    def warning(variance, batches):
        whole = Quality("all", 1.0, variance, 0.0, certain=False)
        return Verification(whole, [], [], [], 0, 0, batches).warning

    assert warning(1.0, float("nan")) == warning(float("nan"), 1.0) == warning(0.1, None) == ""
    assert "is 25% of the gradient's variance from batch to batch, most" in warning(4.0, 16.0)
    assert "more than 100%" in warning(1.0, 0.0)
