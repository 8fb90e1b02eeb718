import itertools
import math

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import memtrain
from memtrain.compressors import Key, Packed, projection
from memtrain.compressors.projection import KINDS, Projection
from memtrain.config.sources import load
from memtrain.kernels.random import draws
from memtrain.plan.build import build

every_kind = pytest.mark.parametrize("kind", KINDS)
REPLAYED = [kind for kind in KINDS if kind != "norm_rows"]  # S does not depend on x
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def make(kind, p, n):
    compressor = Projection(kind=kind, ratio=p / n, min_rows=1)
    assert compressor.rows(n) == p
    return compressor


def twice(compressor, x, key=None):
    key = key or Key()
    return compressor.decompress(compressor.compress(x, key=key))


def uneven(n, features):
    """Rows of very different lengths, so that their probabilities differ."""
    return torch.randn(n, features, dtype=torch.float64) * torch.rand(n, 1).double() * 3


def outcomes(kind, n, p, monkeypatch):
    """S^T S for every outcome of the random bits, all of them equally likely."""
    compressor, eye = make(kind, p, n), torch.eye(n, dtype=torch.float64)
    number = p * n if kind == "rademacher" else n
    signs = [(1.0,)] if kind == "rows" else itertools.product((-1.0, 1.0), repeat=number)
    subsets = [()] if kind == "rademacher" else itertools.combinations(range(n), p)
    for some, subset in itertools.product(signs, list(subsets)):
        monkeypatch.setattr(draws, "signs", lambda *_, some=some: torch.tensor(some))
        monkeypatch.setattr(draws, "choose", lambda *_, subset=subset: torch.tensor(subset))
        yield twice(compressor, eye)


def variance(x, grad, kind, p):
    """The variance of `grad.T @ S^T S x`, by kind (docs/guides/compressors.md)."""
    n, length, other = len(x), x.norm(dim=1), grad.norm(dim=1)
    x2, y2, product = length.square(), other.square(), (x.t() @ grad).square().sum()
    squares = x2 @ y2
    if kind == "norm_rows":
        return (length.sum() * (length * y2).sum() - product) / p
    if kind in ("gaussian", "rademacher"):
        fourth = 2 * squares if kind == "rademacher" else 0  # a sign's fourth moment is 1, not 3
        return (x2.sum() * y2.sum() + product - fourth) / p
    if kind == "dct":
        # For coefficients c_ki of the transform, n^2 sum_k c_ki^2 c_kj^2 is n - 1, plus n / 2 where
        # i = j and n / 2 where i + j = n - 1; signs leave the products in which they cancel.
        mirrored = (x * x.flip(0)).sum(1) @ (grad * grad.flip(0)).sum(1)
        middle = (x2 * y2)[n // 2] if n % 2 else 0.0
        pairs = (n - 1) * x2.sum() * y2.sum() + n / 2 * (squares + x2 @ y2.flip(0))
        crossed = (n - 1) * (product - squares) + n / 2 * (mirrored - middle)
        squares = (pairs + 2 * crossed) / n**2
    # without replacement: the textbook variance of a sample from a finite population
    return (n / p) * (n - p) / (n - 1) * (squares - product / n)


@pytest.mark.parametrize(
    ("kind", "n", "p"), [("rows", 5, 2), ("rademacher", 4, 2), ("dct", 4, 2), ("dct", 5, 3)]
)
def test_unbiased_over_every_outcome(kind, n, p, monkeypatch):
    mean = torch.stack(list(outcomes(kind, n, p, monkeypatch))).mean(0)
    torch.testing.assert_close(mean, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "n", "p"), [("rows", 5, 2), ("rademacher", 4, 2), ("dct", 4, 2), ("dct", 5, 3)]
)
def test_variance_is_that_over_every_outcome(kind, n, p, monkeypatch):
    x, grad = uneven(n, 3), uneven(n, 2)
    exact = grad.t() @ x
    squares = [
        (grad.t() @ (gram @ x) - exact).square().sum() for gram in outcomes(kind, n, p, monkeypatch)
    ]
    told = variance(x, grad, kind, p)
    torch.testing.assert_close(told, torch.stack(squares).mean(), rtol=1e-12, atol=0)


@every_kind
def test_mean_and_variance_over_many_keys(kind):
    n, p, keys = 7, 3, 400
    x, grad = uneven(n, 3), uneven(n, 2)
    compressor, exact = make(kind, p, n), grad.t() @ x
    found = torch.stack([grad.t() @ twice(compressor, x, Key(seed=seed)) for seed in range(keys)])
    bias, error = found.mean(0) - exact, found.std(0) / math.sqrt(keys)
    assert (bias.abs() < 5 * error).all()
    squares = (found - exact).square().sum((1, 2))
    told = variance(x, grad, kind, p)
    assert abs(squares.mean() - told) < 5 * squares.std() / math.sqrt(keys)


@pytest.mark.parametrize("kind", REPLAYED)
@pytest.mark.parametrize("chunk", [1 << 22, 64])
def test_weight_gradient_is_that_of_the_projected_tensors(kind, chunk, monkeypatch):
    monkeypatch.setattr(projection, "_CHUNK", chunk)
    n, p = 37, 9
    x, grad = uneven(n, 6), uneven(n, 4)
    compressor, key = make(kind, p, n), Key(seed=7)
    scale = math.sqrt(n / p) if kind == "rows" else 1  # its rows are kept as they are
    s = compressor.compress(torch.eye(n, dtype=torch.float64), key=key).tensors["rows"] * scale
    packed = compressor.compress(x, key=key)
    torch.testing.assert_close(packed.tensors["rows"] * scale, s @ x)
    torch.testing.assert_close(grad.t() @ compressor.decompress(packed), (s @ grad).t() @ (s @ x))
    if kind == "dct":
        torch.testing.assert_close(s @ s.t(), torch.eye(p, dtype=torch.float64) * (n / p))


def test_norm_rows_weighs_its_rows():
    n, p = 37, 9
    x = uneven(n, 6)
    packed = make("norm_rows", p, n).compress(x, key=Key(seed=7))
    rows, index, weight = (packed.tensors[name] for name in ("rows", "index", "weight"))
    assert torch.equal(rows, x[index])
    share = x.norm(dim=1) / x.norm(dim=1).sum()
    times = index.bincount(minlength=n)
    torch.testing.assert_close(weight, times[index] / (p * share[index]))
    expected = (times / (p * share))[:, None] * x
    torch.testing.assert_close(make("norm_rows", p, n).decompress(packed), expected)
    assert times.max() > 1  # the key was chosen so that a token is drawn twice


@every_kind
def test_random_matrices_are_never_whole(kind, monkeypatch):
    monkeypatch.setattr(projection, "_CHUNK", 1000)
    largest = []
    for name in ("normals", "signs"):
        original = getattr(draws, name)
        monkeypatch.setattr(
            draws,
            name,
            lambda n, *rest, original=original: largest.append(n) or original(n, *rest),
        )
    twice(make(kind, 100, 500), torch.randn(500, 3))
    assert max(largest, default=0) <= 1000


@every_kind
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_payload_is_the_rows_and_the_key(kind, dtype):
    x = torch.randn(10, 50, 12).to(dtype)
    packed = Projection(kind=kind).compress(x, key=Key(seed=3))
    rows = packed.tensors["rows"]
    assert (rows.shape, rows.dtype) == ((100, 12), dtype)
    extra = 8
    if kind == "norm_rows":
        extra = 100 * (16 if dtype == torch.float64 else 12)
    assert packed.nbytes == x.nbytes // 5 + extra


@every_kind
def test_autocast_changes_nothing(kind):
    compressor, x = make(kind, 6, 30), torch.randn(30, 5)
    plain = twice(compressor, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(twice(compressor, x), plain)


def compressed_linear(layer, x, compressor, key):
    """A linear layer whose saved input goes through `compressor`, and its backward of ones."""

    def pack(t):
        return (
            compressor.compress(t, key=key)
            if t.shape[-1] == x.shape[-1] and t.numel() == x.numel()
            else t
        )

    def unpack(t):
        return compressor.decompress(t) if isinstance(t, Packed) else t

    with saved_tensors_hooks(pack, unpack):
        return layer(x)


@every_kind
def test_input_and_bias_gradients_stay_exact(kind):
    layer, compressor = nn.Linear(12, 7).double(), make(kind, 10, 50)
    x = torch.randn(5, 10, 12, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(5, 10, 7, dtype=torch.float64)
    inputs = [x, layer.bias, layer.weight]
    exact = torch.autograd.grad(layer(x), inputs, grad)
    ours = torch.autograd.grad(compressed_linear(layer, x, compressor, Key(seed=5)), inputs, grad)
    assert torch.equal(ours[0], exact[0])
    assert torch.equal(ours[1], exact[1])
    approximate = twice(compressor, x.detach(), Key(seed=5)).flatten(0, 1)
    torch.testing.assert_close(ours[2], grad.flatten(0, 1).t() @ approximate)
    assert not torch.allclose(ours[2], exact[2])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "fft"}, "kind='fft'; allowed: 'rows', "),
        ({"ratio": 0.0}, "ratio=0.0"),
        ({"ratio": 1.5}, "ratio=1.5"),
        ({"ratio": float("nan")}, "ratio=nan"),
        ({"min_rows": 0}, "min_rows=0"),
        ({"max_rows": 8}, "max_rows=8; allowed: None, integers from min_rows=16"),
    ],
)
def test_wrong_fields_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        Projection(**wrong)


def test_integers_are_refused():
    with pytest.raises(TypeError, match=r"torch\.int64; allowed: torch\.float32"):
        Projection().compress(torch.ones(40, 4, dtype=torch.int64), key=Key())


def test_rows_are_bounded():
    bounded = Projection(ratio=0.5, min_rows=4, max_rows=10)
    assert [bounded.rows(n) for n in (0, 1, 4, 10, 18, 1000)] == [0, 1, 4, 5, 9, 10]


def test_configs_build_it():
    spec = {"name": "projection", "kind": "dct", "ratio": 0.1, "max_rows": 64}
    assert build(spec) == Projection(kind="dct", ratio=0.1, max_rows=64)
    assert build({"name": "projection"}) == Projection()
    rules = load(["activations=randomised_linear"]).activations.rules
    assert build(rules[0].compressor) == Projection(kind="gaussian", ratio=0.2)


def test_a_rule_keeps_a_fifth_of_a_linear_layers_input():
    # A norm does not save its output: the second linear layer's input is kept for it alone.
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh())
    rule = {"op": "linear", "compressor": {"name": "projection", "kind": "rows"}}
    cfg = {"activations": {"rules": [rule]}, "optim": {"rules": []}}
    weights, x = list(model.parameters()), torch.randn(4, 50, 32)
    exact = torch.autograd.grad(model(x).sum(), weights)
    model, _ = memtrain.wrap(model, torch.optim.SGD(weights), cfg)
    ours = torch.autograd.grad(model(x).sum(), weights)
    equal = [torch.equal(a, b) for a, b in zip(ours, exact, strict=True)]
    # The first layer reads the model's own input, which stays alive anyway.
    assert equal == [True, True, True, True, False, True]
    (entry,) = (e for e in memtrain.plan_of(model).entries("activation") if e.compressor)
    assert entry.planned == 40 * 64 * 4 + 8
