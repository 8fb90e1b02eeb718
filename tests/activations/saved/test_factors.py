import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memtrain
from tests.activations.saved.test_reads import WEIGHT, Model, with_and_without

TWO = nn.Parameter(torch.tensor([1.0, 0.5]))
STATISTICS = torch.zeros(64), torch.ones(64)
TEMPERATURE = nn.Parameter(torch.zeros(64))
ELEMENTWISE = {
    **{"**": lambda h: h**2, "square": torch.square, "*": lambda h: h * h},
    "two differences": lambda h: (h - 0.1) * (h - 0.1),
    "two distances": lambda h: (h - 0.1).abs() * (h - 0.1).abs(),
    "a tensor and its view": lambda h: h * h.view(64, 64),
    "a tensor and its copy": lambda h: h.clone() * h.double().float(),
    "two tensors": lambda h: h.abs() * h.abs().roll(1, 1),
    "a tensor and itself without a gradient": lambda h: h * h.detach(),
    "a gate": lambda h: F.silu(h) * h,
}
MATRIX = {
    "a matrix product": lambda h: (
        h.abs().view(64, 16, 4) @ h.abs().roll(1, 0).view(64, 4, 16)
    ).reshape(64, 256)[:, ::4]
}
SMALL = {
    "a root": lambda s: (s + 1e-6).sqrt(),
    "a root without a sum": torch.rsqrt,
    "a logarithm of a view": lambda s: s.view(-1).log(),
    "a logarithm of two": lambda s: s.view(64, 32, 2).sum(-1).log(),
    "a root of a scaled mean of four": lambda s: (3 * s.view(64, 16, 4).mean(-1)).sqrt(),
    "a quotient": lambda s: 1 / s,
    "a logarithm of chosen elements": lambda s: torch.log(s @ torch.eye(64)),
    "a logarithm of pools of two": lambda s: F.avg_pool1d(s.unsqueeze(1), 2).log(),
    "a logarithm of means of four": lambda s: F.adaptive_avg_pool1d(s.unsqueeze(1), 16).log(),
    "a logarithm of a product with two": lambda s: (s.view(-1, 2) @ TWO[:, None]).log(),
    "a logarithm of a sum and a product": lambda s: torch.addmm(s, WEIGHT, WEIGHT.T).log(),
    "a logarithm of a convolution": lambda s: F.conv1d(s.unsqueeze(1), TWO.view(1, 1, 2)).log(),
    "a logarithm of a transposed convolution": lambda s: F.conv_transpose1d(
        s.unsqueeze(1), TWO.view(1, 1, 2), stride=2
    ).log(),
    "a logarithm of chosen channels": lambda s: F.conv1d(s[None], torch.eye(64)[:, :, None]).log(),
    "a logarithm behind running statistics": lambda s: F.batch_norm(s, *STATISTICS).log(),
}
NEAREST = {
    "a softmax": lambda s: (-s).softmax(-1).view(-1)[::7],
    "a log-sum-exp": lambda s: torch.logsumexp(-s, -1),
    "an exponential": lambda s: torch.exp(-s).cumsum(-1),
    "a hinge": lambda s: F.relu(0.5 - s) @ WEIGHT,
    "indices": lambda s: s[torch.arange(64), s.argmin(1)],
    "a condition": lambda s: torch.where(s < 0.1, s, 0.0) @ WEIGHT,
    "a mask": lambda s: (s * (s < 0.1)) @ WEIGHT,
    "a pool of the largest": lambda s: F.max_pool1d(-s.unsqueeze(1), 4)[:, 0] @ WEIGHT[:16],
}
LARGE = {
    "a pool of sixteen": lambda s: F.avg_pool2d(s.view(1, 64, 8, 8), 4).log(),
    "a convolution with eight": lambda s: F.conv1d(s.view(64, 1, 64), WEIGHT[63].view(8, 1, 8)),
    "a mean": lambda s: s.mean(-1).rsqrt(),
    "a sum of eight": lambda s: s.view(64, 8, 8).sum(-1).log(),
    "a product": lambda s: s @ WEIGHT,
}
ALL = {**SMALL, **NEAREST, **LARGE}


@pytest.mark.each_value
@pytest.mark.parametrize("product", [*ELEMENTWISE, *MATRIX])
@pytest.mark.parametrize("reader", [*SMALL, *LARGE])
def test_a_product_that_a_root_or_a_logarithm_reads_keeps_its_factors(product, reader):
    torch.manual_seed(0)
    model = Model(lambda h: ALL[reader]({**ELEMENTWISE, **MATRIX}[product](h)))
    exact, mine, _ = with_and_without(model, torch.randn(64, 64))
    assert torch.equal(mine, exact) is (reader in SMALL)
    assert torch.cosine_similarity(mine, exact, 0) > 0.98


@pytest.mark.each_value
@pytest.mark.parametrize("product", ELEMENTWISE)
@pytest.mark.parametrize("reader", NEAREST)
@pytest.mark.parametrize("rules", ["fewbit3_group4", "lora"])
def test_a_product_whose_smallest_elements_count_most_keeps_its_factors(product, reader, rules):
    torch.manual_seed(0)
    model = Model(lambda h: NEAREST[reader](ELEMENTWISE[product](h)))
    cfg = ["preset=activations_only", f"activations={rules}"]
    exact, mine, _ = with_and_without(model, torch.randn(64, 64), cfg)
    assert torch.equal(mine, exact)


SMOOTH = {
    **{"gelu": F.gelu, "silu": F.silu, "mish": F.mish, "tanhshrink": F.tanhshrink},
    **{"silu in place": lambda h: F.silu(h * 1, inplace=True), "hardswish": F.hardswish},
    **{"gelu_tanh": lambda h: F.gelu(h, approximate="tanh"), "elu": F.elu},
}


def logarithm(y):
    return (y.abs() + 1e-6).log()


@pytest.mark.each_value
@pytest.mark.parametrize("function", SMOOTH)
@pytest.mark.parametrize("read", ["inside", "outside", "compiled"])
@pytest.mark.parametrize("bits", [1, 3])
def test_a_nonlinearity_that_a_logarithm_reads_keeps_its_input(function, read, bits):
    def gradient(model):
        y = torch.compile(model, backend="aot_eager", disable=read != "compiled")(x)
        loss = y.sum() if read == "inside" else logarithm(y).sum()
        return torch.autograd.grad(loss, model[0].weight)[0].flatten()

    torch.manual_seed(0)
    torch.compiler.reset()
    after = logarithm if read == "inside" else torch.positive
    x, model = torch.randn(64, 64), nn.Sequential(nn.Linear(64, 64), nn.Identity())
    model[1].forward = lambda h: after(SMOOTH[function](4 * h))
    exact = gradient(model)
    rules = f"activations.rules=[{{compressor: {{name: derivative, bits: {bits}}}}}]"
    model, _ = memtrain.wrap(model, None, ["preset=activations_only", rules])
    torch.testing.assert_close(gradient(model), exact, rtol=1e-4, atol=1e-4)


PATHS = {
    "a sum, a dropout": lambda h, y: F.dropout(h + y * 2, 0.1),
    "an interpolation": lambda h, y: F.interpolate(y.view(4, 4, 16, 16), scale_factor=2),
    "a smooth interpolation": lambda h, y: F.interpolate(
        y.view(4, 4, 16, 16), size=12, mode="bilinear", antialias=True
    ),
    "a padding": lambda h, y: F.pad(y.view(4, 4, 16, 16), (1, 1, 1, 1), mode="reflect"),
    "patches": lambda h, y: F.unfold(y.view(4, 4, 16, 16), 2, stride=2),
    "a shuffle": lambda h, y: F.pixel_shuffle(y.view(4, 4, 16, 16), 2),
    "a norm of a map": lambda h, y: (
        y.view(4, 4, 16, 16) / y.view(4, 4, 256).norm(dim=2)[..., None, None]
    ),
}


@pytest.mark.each_value
@pytest.mark.parametrize("function", SMOOTH)
@pytest.mark.parametrize("path", PATHS)
def test_a_nonlinearity_is_compressed_where_products_read_what_is_made_of_it(function, path):
    model = Model(lambda h: PATHS[path](h, SMOOTH[function](h)).reshape(-1, 16) @ WEIGHT[:16])
    _, _, entries = with_and_without(model, torch.randn(64, 64))
    assert [e for e in entries if f" / {function.split()[0]} / " in e.site and e.compressor]


@pytest.mark.parametrize("linear", ["keep", "{name: group, bits: 4}"])
@pytest.mark.parametrize("first", ["linear", "logarithm"])
def test_what_reads_a_nonlinearity_first_decides_nothing(linear, first):
    def both(h):
        y = F.gelu(4 * h)
        if first == "linear":
            z = y @ WEIGHT
        return logarithm(y).sum() + (z if first == "linear" else y @ WEIGHT)

    torch.manual_seed(0)
    rules = f"[{{op: linear|matmul, compressor: {linear}}}, {{compressor: {{name: derivative}}}}]"
    cfg = ["preset=activations_only", f"activations.rules={rules}"]
    exact, mine, _ = with_and_without(Model(both), torch.randn(64, 64), cfg)
    torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-3)


def test_an_input_is_gone_two_layers_later_though_a_layer_keeps_the_result():
    cfg = [
        "preset=activations_only",
        "activations.rules=[{op: gelu, compressor: {name: derivative}}]",
    ]
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model, _ = memtrain.wrap(nn.Sequential(*layers, nn.Linear(64, 1)), None, cfg)
    inputs = []
    for layer in layers:
        layer[0].register_forward_hook(lambda *args: inputs.append(weakref.ref(args[-1])))
    alive = []
    for layer in (*layers[1:], model[-1]):
        layer.register_forward_pre_hook(
            lambda *_: alive.append(sum(x() is not None for x in inputs))
        )
    model(torch.randn(64, 64)).sum().backward()
    assert alive == [1, 2, 2, 2]  # the caller of a layer holds its input until it returns


NORMS = {
    "layer_norm": lambda s, n: F.layer_norm(s.view(-1, n), (n,)),
    "rms_norm": lambda s, n: F.rms_norm(s.view(-1, n), (n,)),
    "group_norm": lambda s, n: F.group_norm(s.view(16, -1, n), s.numel() // 16 // n),
    "batch_norm": lambda s, n: F.batch_norm(s.view(n, -1), None, None, training=True),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("size", [4, 64])
def test_a_product_that_a_norm_of_few_elements_reads_keeps_its_factors(norm, size):
    model = Model(lambda h: NORMS[norm](h * h.roll(1, 0), size).view(64, 64) @ WEIGHT)
    _, _, entries = with_and_without(model, torch.randn(64, 64))
    kept = {e.compressor == "" for e in entries if " / mul / " in e.site and e.nbytes}
    assert kept == {size == 4}


def test_a_product_keeps_its_factors_if_a_logarithm_reads_its_rms_norm():
    model = Model(lambda h: F.rms_norm(h * h, (64,)).log())  # the norm's input is in 4 bits
    exact, mine, _ = with_and_without(model, torch.randn(64, 64))
    assert torch.cosine_similarity(mine, exact, 0) > 0.98


def scan(h):
    """A state-space model's states, with a decay that depends on the input."""
    decay, state, read = torch.exp(-h.abs() * 0.1), torch.zeros(64, 16), []
    for part in range(0, 64, 16):
        state = decay[:, part : part + 16] * state + h[:, part : part + 16]
        read.append(state @ WEIGHT[:16, :16])
    return torch.stack(read)


FOLLOWED = {
    "two experts": lambda h: (h.view(32, 2, 64) * h.sigmoid().view(32, 2, 64)).sum(1) @ WEIGHT,
    "index_add": lambda h: (
        torch.zeros(32, 64).index_add(0, torch.arange(64) % 32, h * h.abs()) @ WEIGHT
    ),
    "the largest": lambda h: (h @ h.T / 64).sub((h @ h.T / 64).amax(-1, True)).softmax(-1) @ WEIGHT,
    "a scan": scan,
    "a temperature": lambda h: (h * TEMPERATURE.exp()).softmax(-1) @ WEIGHT,
}


@pytest.mark.parametrize("op", FOLLOWED)
def test_factors_are_compressed_where_products_read_what_is_made_of_them(op):
    exact, mine, entries = with_and_without(Model(FOLLOWED[op]), torch.randn(64, 64))
    assert torch.cosine_similarity(mine, exact, 0) > 0.9
    factors = [e for e in entries if "/ mul /" in e.site or "/ matmul /" in e.site]
    assert sum(e.planned for e in factors) < 0.2 * sum(e.nbytes for e in factors)


def normal(h):
    """Minus the log-density of normal distributions, given a factor of each covariance."""
    factor = h.view(16, 16, 16).tril()
    covariance = factor @ factor.mT + 1e-2 * torch.eye(16)
    x = torch.linspace(-1, 1, 16).expand(16, 16).unsqueeze(-1)
    return torch.logdet(covariance) + (x.mT @ torch.linalg.solve(covariance, x)).flatten()


def discretized(h):
    """The log-likelihood of a mixture of logistic distributions in a bin of 1/128."""
    h = h.view(256, 16)
    mean, weights = h[:, :5], h[:, 5:10].softmax(-1)
    scale = torch.exp(-2 - h[:, 10:15])
    x = torch.linspace(-1, 1, 256)[:, None] - mean
    bins = torch.sigmoid((x + 1 / 256) / scale) - torch.sigmoid((x - 1 / 256) / scale)
    return torch.log((weights * bins).sum(-1) + 1e-12)


def mixture(h):
    """The log-likelihood of a mixture of normal distributions."""
    h, x = 2 * h.view(256, 16), torch.linspace(-1, 1, 256)[:, None]
    z = (x - h[:, :5]) * torch.exp(-h[:, 5:10])
    return torch.logsumexp(h[:, 10:15] - h[:, 5:10] - 0.5 * z**2, -1)


DENSITIES = {
    "mixture": mixture,
    "sum of kernels": lambda h: torch.log(torch.exp(-0.5 * (4 * h) ** 2).mean(-1) + 1e-9),
    "weighted kernels": lambda h: torch.log(
        (h[:, 32:].softmax(-1) * torch.exp(-0.5 * (9 * h[:, :32]) ** 2)).sum(-1) + 1e-12
    ),
    "normal": normal,
    "discretized": discretized,
    "mixture by bmm": lambda h: torch.log(
        torch.bmm(h[:, :4].softmax(-1)[:, None], h[:, 4:].view(64, 4, 15).softmax(-1))[:, 0, :3]
    ),
}


@pytest.mark.parametrize("name", DENSITIES)
def test_a_density_has_the_gradient_of_the_baseline(name):
    torch.manual_seed(0)
    exact, mine, _ = with_and_without(Model(DENSITIES[name]), torch.randn(64, 64))
    assert torch.cosine_similarity(mine, exact, 0) > 0.99
