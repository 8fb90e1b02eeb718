"""Weights of two bytes in models that make float32 tensors, or run ops that know no bfloat16."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memtrain
from memtrain.activations.intercept.mixed_dtypes import run_mixed

pytestmark = pytest.mark.filterwarnings("ignore:the plan compresses saved activations")


class TimeStep(nn.Module):
    """As diffusion models embed a time step: sines in float32, before linear layers."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
        self.norm, self.conv = nn.GroupNorm(4, 64), nn.Conv2d(3, 64, 3, padding=1)

    def forward(self, x):
        angles = torch.arange(32) * math.log(2)
        embedding = self.mlp(torch.cat([angles.sin(), angles.cos()]).expand(len(x), 64))
        return self.norm(self.conv(x) + embedding.float()[:, :, None, None])


class Transform(nn.Module):
    """As PointNet: points are multiplied by a learned matrix plus the identity in float32."""

    def __init__(self):
        super().__init__()
        self.points, self.matrix = nn.Conv1d(3, 64, 1), nn.Linear(64, 64 * 64)

    def forward(self, x):
        x = self.points(x.flatten(2))
        matrix = self.matrix(x.amax(2)).view(-1, 64, 64) + torch.eye(64)
        return torch.bmm(matrix, x)


class Volume(nn.Module):
    """A pooling that torch does not have in bfloat16 on a CPU."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv3d(1, 8, 3, padding=1), nn.Conv3d(8, 8, 1)

    def forward(self, x):
        return self.last(F.avg_pool3d(self.conv(x[:, None]), (1, 2, 2)))


class Fourier(nn.Module):
    """A spectral convolution: a complex weight, and transforms that want float32."""

    def __init__(self):
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(8, 3, 16, 9, dtype=torch.complex64) / 8)
        self.conv = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        found = torch.einsum("bixy,oixy->boxy", torch.fft.rfft2(x), self.spectrum)
        return self.conv(torch.fft.irfft2(found))


MODELS = [TimeStep, Transform, Volume, Fourier]


@pytest.mark.each_value
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("cfg", ["all_four", {"preset": "optimizer_only", "weights": "bf16+8"}])
def test_what_torch_cannot_mix_runs_as_autocast_would(kind, cfg):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 3, 16, 16)
    exact = model(x).detach()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = memtrain.wrap(model, optimizer, cfg, batch=x)
    y = model(x)
    # Each of at most four layers rounds its weights and its result to 8 bits.
    assert (y.float() - exact).abs().max() < 4 * 2 * 2**-8 * exact.abs().max()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    y.float().square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(p, start[name]) for name, p in model.named_parameters())
    with torch.no_grad():
        assert model.eval()(x).isfinite().all()


@pytest.mark.parametrize("kind", MODELS)
def test_they_are_predicted_as_they_run(kind):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 3, 16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = memtrain.make_plan(model, optimizer, "all_four", batch=x)
    model, optimizer = memtrain.wrap(model, optimizer, "all_four")
    model(x).float().square().mean().backward()
    seen = {e.site for e in memtrain.plan_of(model).entries("activation")}
    assert {e.site for e in plan.entries("activation")} == seen


def test_an_error_names_the_module_and_the_remedy():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32, 64))

        def forward(self, x):
            return nn.functional.linear(torch.ones(4, 63), self.weight)

    model = nn.Sequential(Wrong())
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), "all_four")
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(4, 64))
    assert "module '0' is given float32 beside weights" in "".join(caught.value.__notes__)
    assert "weights=keep" in "".join(caught.value.__notes__)


def test_what_is_changed_in_place_keeps_its_dtype():
    class Scatter(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x):
            y = self.inner(x)
            return y.index_add(0, torch.tensor([0]), y[:1] * 0).index_add_(
                0, torch.tensor([1]), torch.ones(1, 64)
            )

    model = Scatter()
    cfg = ["preset=all_four", "float32_outputs=false"]
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), cfg)
    assert model(torch.ones(4, 64)).dtype == torch.bfloat16


WRITES = {
    Tensor.index_add_: lambda x, y: x.index_add_(0, torch.tensor([0]), y),
    Tensor.__setitem__: lambda x, y: x.__setitem__(torch.tensor([0]), y),
    torch.mm: lambda x, y: torch.mm(y.new_ones(1, 1), y, out=x),
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("function", WRITES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("low", [0, 1], ids=["low", "wide"])
def test_what_an_op_writes_to_a_cast_argument_is_in_the_argument(function, low, inference):
    dtypes = [torch.float32, torch.float32]
    dtypes[low] = torch.bfloat16
    with torch.inference_mode(inference):
        x, y = torch.zeros(1, 8, dtype=dtypes[0]), torch.ones(1, 8, dtype=dtypes[1])
        run = lambda args, kwargs: WRITES[function](*args)  # noqa: E731
        result = run_mixed(run, torch.bfloat16, function, "", (x, y), {})
        assert x.dtype == dtypes[0]
        assert x.eq(1).all()
        assert y.eq(1).all()
        assert result is x or function is Tensor.__setitem__


def test_running_statistics_of_two_bytes_are_updated():
    torch.manual_seed(0)
    x, halves = torch.randn(8, 4), {"dtype": torch.bfloat16}
    mean, var, weight = torch.zeros(4, **halves), torch.ones(4, **halves), torch.ones(4, **halves)
    run = lambda args, kwargs: F.batch_norm(*args)  # noqa: E731
    run_mixed(run, torch.bfloat16, F.batch_norm, "", (x, mean, var, weight, None, True), {})
    assert mean.equal((0.1 * x.mean(0)).bfloat16())
