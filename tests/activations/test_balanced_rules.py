"""Where groups of 4 bits are not enough, the rules of `balanced` say so."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memtrain


def gradients(model, x, grad, exceptions=None):
    """Of the parameters: plain, or under `balanced` with these exceptions."""
    model = copy.deepcopy(model)
    if exceptions is not None:
        cfg = {"preset": "balanced", "gradients": "keep", "activations": {"exceptions": exceptions}}
        memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.0), cfg)
    model(x).backward(grad)
    return [p.grad for p in model.parameters()]


def groups(op, **options):
    compressor = {"name": "group", "bits": 4, "group_size": 128, **options}
    return [{"module": "*", "op": op, "tensor": "*", "compressor": compressor}]


class Padded(nn.Module):
    """Rows of zeros, as windows have at an image's edge, before the second layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(96, 96), nn.Linear(96, 4)

    def forward(self, x):
        return self.second(F.pad(self.first(x), (0, 0, 0, 3)))


@pytest.mark.parametrize("whole_rows", [True, False])
def test_a_row_of_zeros_stays_one_whatever_its_neighbours_hold(whole_rows):
    model, x = Padded(), torch.randn(61, 96)
    grad = torch.randn(64, 4)
    grad[61:] = 1e9  # what a quotient by a clamped norm sends to such rows
    exceptions = [] if whole_rows else groups("linear")
    exact, found = (gradients(model, x, grad, each)[2] for each in (None, exceptions))
    # Stochastic rounding is off by less than a step of its group; bounds are widened by 2**-7.
    h = model.first(x)
    step = (h.max() - h.min()) * (1 + 2**-6) / 15
    bound = grad[:61].abs().sum(0).unsqueeze(1) * step
    assert ((found - exact).abs() <= bound).all() == whole_rows


def norms_of_errors(model, x, grad, op):
    """Of the gradients under `balanced`, and with groups of 4 bits for an op."""
    exact, fine, coarse = (
        torch.cat([g.flatten() for g in gradients(model, x, grad, way)])
        for way in (None, [], groups(op))
    )
    return (fine - exact).norm(), (coarse - exact).norm()


class Attention(nn.Module):
    """Unscaled, written out."""

    def __init__(self, width):
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(32, width) for _ in range(3))

    def forward(self, x):
        q, k, v = (own(x) for own in self.own)
        return torch.matmul((q @ k.mT).softmax(-1), v)


def test_attention_written_out_has_finer_steps():
    """Six bits: a step is 15 / 63 of that of four, and so is the error."""
    model, x = Attention(64), 4 * torch.randn(4, 64, 32)
    fine, coarse = norms_of_errors(model, x, torch.randn(4, 64, 64), "softmax|matmul")
    assert 0 < fine <= 2 * 15 / 63 * coarse


@pytest.mark.parametrize("rows", [19, 20])
def test_a_norm_over_a_handful_of_values_has_finer_steps(rows):
    """As attention above; of more values the fallback serves."""
    model, x = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64)), torch.randn(rows, 32)
    fine, coarse = norms_of_errors(model, x, torch.randn(rows, 64), "*batch_norm")
    if rows == 20:
        assert fine == coarse
    else:
        assert 0 < fine <= 2 * 15 / 63 * coarse


def test_a_bias_before_a_batch_norm_has_no_gradient():
    """It is 0 by nature: what the codes of x_hat add up to is not sent there."""
    model, x = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64)), torch.randn(40, 32)
    grad = torch.randn(40, 64) + 5
    with torch.no_grad():
        rstd = (model[0](x).var(0, correction=0) + 1e-5).rsqrt()
    bias = gradients(model, x, grad, [])[1]
    # Four roundings of each of the terms of dx, among them x_hat (below 7) squared.
    assert (bias.abs() <= 4 * 2.0**-24 * 40 * rstd * grad.abs().amax(0) * (1 + 7**2)).all()


SCALES = {
    "relu": F.relu,
    "elu": lambda x: F.elu(x) + 1,
    "celu": lambda x: F.celu(x) + 1,
    "selu": lambda x: F.selu(x) + 1.0507009873554805 * 1.6732632423543772,
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,
    "hardsigmoid": F.hardsigmoid,
    "softsign": lambda x: F.softsign(x) + 1,
    "tanh": lambda x: torch.tanh(x) + 1,
    "logsigmoid": lambda x: F.logsigmoid(x).exp(),
}


@pytest.mark.parametrize("scale", SCALES)
def test_a_scale_that_a_logarithm_and_a_quotient_read_has_an_accurate_gradient(scale):
    """A derivative that is small where the scale is small needs a small relative error there."""

    class Normal(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Linear(64, 64)

        def forward(self, x):
            scaled = SCALES[scale](3 * self.scale(x)) + 1e-3
            return scaled.log() + 0.1 * x.abs() / scaled

    torch.manual_seed(0)
    model, x, grad = Normal(), torch.randn(64, 64), torch.ones(64, 64)
    both = gradients(model, x, grad), gradients(model, x, grad, [])
    for exact, found in zip(*both, strict=True):
        assert torch.cosine_similarity(exact.flatten(), found.flatten(), 0) > 0.99
        assert found.norm().item() == pytest.approx(exact.norm().item(), rel=0.03)
