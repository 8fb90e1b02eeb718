"""Wrong gradients without a word that were once reported: each as its whole kind.

The setting is `h = Linear(128, 128)(X)` with X of 64 x 128, and something that reads h. A gradient
is compared over draws of the stochastic rounding: it is the exact one to the bit, or the exact one
on average, or, of ops for which memtrain has a backward of its own, within what the guide promises.
"""

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.activations.proof.comparison import all_same, flat, parameter_gradients, quality
from tests.activations.proof.faults import (
    DRAWS,
    After,
    assert_promised,
    assert_sound,
    draws_of,
    found,
    inputs,
    no_noisier,
    of_parts,
)

# 1. composites run as the ops that they consist of


HEADS, TOKENS = 4, 16


class WrittenOut(nn.Module):
    """Self-attention as linear, scaled_dot_product_attention, linear."""

    def __init__(self, own):
        super().__init__()
        self.own = own

    def forward(self, h):
        own = self.own
        q, k, v = (
            part.view(-1, TOKENS, HEADS, 128 // HEADS).transpose(1, 2)
            for part in F.linear(h, own.in_proj_weight, own.in_proj_bias).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return F.linear(y.reshape(h.shape), own.out_proj.weight, own.out_proj.bias)


class Attends(nn.Module):
    """`h = Linear(x)`, then `nn.MultiheadAttention` whose scores have a standard deviation."""

    def __init__(self, deviation, *, written_out):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(128, 128)
        own = nn.MultiheadAttention(128, HEADS, batch_first=True)
        with torch.no_grad():
            h = self.first(inputs())
            q, k, _ = F.linear(h, own.in_proj_weight).view(-1, TOKENS, 3, HEADS, 32).unbind(2)
            scores = torch.einsum("bthd,bshd->bhts", q, k) / 32**0.5
            own.in_proj_weight[:256] *= (deviation / scores.std()) ** 0.5
        self.attention = WrittenOut(own) if written_out else own

    def forward(self, x):
        h = self.first(x).view(-1, TOKENS, 128)
        if isinstance(self.attention, WrittenOut):
            return self.attention(h)
        return self.attention(h, h, h, need_weights=False)[0]


@pytest.mark.parametrize("deviation", [1.5, 3.4, 6.0])
def test_multi_head_attention_is_as_good_as_its_ops(deviation):
    mine, counterpart = (Attends(deviation, written_out=how) for how in (False, True))
    no_noisier(mine, counterpart, inputs())


class Encoder(nn.Module):
    """The same mathematics as `nn.TransformerEncoderLayer`, in ops."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.attention = layer, WrittenOut(layer.self_attn)

    def forward(self, h):
        own = self.layer
        h = own.norm1(h + self.attention(h))
        return own.norm2(h + own.linear2(own.activation(own.linear1(h))))


def test_an_encoder_layer_is_as_good_as_its_ops():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, HEADS, 256, dropout=0.0, batch_first=True)
    with torch.no_grad():
        layer.self_attn.in_proj_weight[:256] *= 3
    x = inputs().view(-1, TOKENS, 128)
    first = nn.Linear(128, 128)
    no_noisier(nn.Sequential(first, layer), nn.Sequential(first, Encoder(layer)), x)


def image(h):
    return h.view(4, 8, 16, 16)


def halves(h):
    return h.chunk(2)


COMPOSITES = {
    "lp_pool1d": lambda h: F.lp_pool1d(h, 2.0, 4),
    "lp_pool1d-3": lambda h: F.lp_pool1d(h, 3.0, 4, 2),
    "lp_pool2d": lambda h: F.lp_pool2d(image(h), 2.0, 2),
    "lp_pool3d": lambda h: F.lp_pool3d(h.view(1, 8, 4, 16, 16), 2.0, 2),
    "cosine_similarity": lambda h: F.cosine_similarity(*halves(h)),
    "normalize": lambda h: F.normalize(h, dim=1),
    "triplet": lambda h: F.triplet_margin_loss(h[:20], h[20:40], h[40:60]),
    "triplet_with_distance": lambda h: F.triplet_margin_with_distance_loss(
        h[:20], h[20:40], h[40:60], distance_function=lambda a, b: (a - b).norm(dim=1)
    ),
    "gaussian_nll": lambda h: F.gaussian_nll_loss(
        h[:32], torch.zeros(32, 128), h[32:].square() + 0.01
    ),
    "local_response_norm": lambda h: F.local_response_norm(image(h), 3),
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "poisson_nll": lambda h: F.poisson_nll_loss(h, torch.ones(64, 128)),
    "multilabel_soft_margin": lambda h: F.multilabel_soft_margin_loss(h, (h > 0).float().detach()),
    "pairwise_distance": lambda h: F.pairwise_distance(*halves(h)),
    "cdist": lambda h: torch.cdist(*halves(h)),
    "einsum": lambda h: torch.einsum("ij,kj->ik", h, h),
    "tensordot": lambda h: torch.tensordot(h, h, ([1], [1])),
    "norm": lambda h: torch.norm(h, dim=1),
    "norm-3": lambda h: torch.norm(h, p=3, dim=1),
    "stft": lambda h: torch.stft(h, 16, window=torch.hann_window(16), return_complex=True).abs(),
    "interpolate": lambda h: F.interpolate(image(h), scale_factor=2.0, mode="bicubic"),
    "bilinear": lambda h: F.bilinear(*halves(h), torch.ones(3, 128, 128) / 128),
    "huber": lambda h: F.huber_loss(h, torch.zeros(64, 128), delta=0.3),
    "kl_div": lambda h: F.kl_div(h, torch.full((64, 128), 0.1)),
    "glu": F.glu,
}  # fmt: skip


CODED = ("softsign", "tanhshrink", "multilabel_soft_margin")
"""With a code of the derivative, which is no draw."""


@pytest.mark.parametrize("name", COMPOSITES)
def test_a_composite_of_torchs_is_exact_or_right_on_average(name):
    torch.manual_seed(0)
    model = After(COMPOSITES[name])
    if name in CODED:
        assert_promised(found(model, inputs()))
    else:
        assert_sound(model, inputs())


# 2. a choice depends on all that it is made from


def contrastive(h, offset=0.0):
    """Two views of 32 samples, at a logit scale of 100."""
    first, second = F.normalize(h, dim=1).chunk(2)
    s = 100 * first @ second.mT + torch.linspace(0, offset, 32)
    return torch.logsumexp(s, 1) + torch.logsumexp(s, 0)


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_a_contrastive_loss_keeps_its_gradient_from_step_to_step(offset):
    torch.manual_seed(0)
    model, x = After(partial(contrastive, offset=offset)), inputs()
    mine, exact = of_parts(model), flat(parameter_gradients(model, x).grads)
    for _ in range(4):
        assert_promised(quality([flat(parameter_gradients(mine, x).grads)] * 2, exact))


def heads(h):
    return h.view(2, 4, 16, 64)


ARGUMENTS = {
    "logsumexp dim": (torch.logsumexp, {"dim": 1}, {"dim": 0}),
    "log_softmax dim": (F.log_softmax, {"dim": 1}, {"dim": 0}),
    "softmax dim": (lambda h, dim: F.softmax(30 * h, dim), {"dim": 1}, {"dim": 0}),
    "attention scale": (
        lambda h, scale: F.scaled_dot_product_attention(*[heads(3 * h)] * 3, scale=scale),
        {"scale": None}, {"scale": 1.0},
    ),
    "attention causal": (
        lambda h, causal: F.scaled_dot_product_attention(*[heads(2 * h)] * 3, is_causal=causal),
        {"causal": False}, {"causal": True},
    ),
    "clamp": (torch.clamp, {"min": -0.1}, {"min": -0.1, "max": 0.1}),
    "pow": (lambda h, p: (h.abs() + 0.1).pow(p), {"p": 2}, {"p": -1.5}),
    "gelu": (F.gelu, {"approximate": "none"}, {"approximate": "tanh"}),
    "leaky_relu": (F.leaky_relu, {"negative_slope": 0.01}, {"negative_slope": -2.0}),
    "elu": (F.elu, {"alpha": 1.0}, {"alpha": -3.0}),
    "softplus": (F.softplus, {"beta": 1}, {"beta": 20}),
    "hardtanh": (F.hardtanh, {"min_val": -1, "max_val": 1}, {"min_val": -0.1, "max_val": 0.3}),
    "layer_norm": (
        lambda h, eps: F.layer_norm(h, (128,), eps=eps), {"eps": 1e-5}, {"eps": 1.0},
    ),
    "layer_norm shape": (
        lambda h, shape: F.layer_norm(h.view(32, 2, 128), shape),
        {"shape": (128,)}, {"shape": (2, 128)},
    ),
    "group_norm": (
        lambda h, n: F.group_norm(image(h), n), {"n": 2}, {"n": 8},
    ),
    "max_pool2d": (lambda h, k: F.max_pool2d(image(h), k, 2), {"k": 2}, {"k": 3}),
    "avg_pool2d": (lambda h, k: F.avg_pool2d(image(h), k, 2), {"k": 2}, {"k": 3}),
    "conv2d": (
        lambda h, padding: F.conv2d(image(h), torch.ones(4, 8, 3, 3) / 9, padding=padding),
        {"padding": 0}, {"padding": 1},
    ),
    "norm p": (lambda h, p: torch.linalg.vector_norm(h, p, dim=1), {"p": 2}, {"p": 1.5}),
    "sum": (lambda h, dim: h.exp().sum(dim), {"dim": 0}, {"dim": 1}),
    "prod": (lambda h, dim: (1 + 0.1 * h).prod(dim), {"dim": 0}, {"dim": 1}),
    "std": (lambda h, dim: h.std(dim), {"dim": 0}, {"dim": 1}),
    "cross_entropy": (
        lambda h, smooth: F.cross_entropy(5 * h, torch.arange(64), label_smoothing=smooth),
        {"smooth": 0.0}, {"smooth": 0.3},
    ),
    "where": (lambda h, x: torch.where(h > 0, h * h, x), {"x": 0.0}, {"x": 3.0}),
    "transpose": (
        lambda h, t: (h.T if t else h).softmax(-1) @ (h if t else h.T), {"t": False}, {"t": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_other_arguments_in_earlier_forwards_change_nothing(name):
    """The error after forwards with other arguments is the error without them."""
    function, *both = ARGUMENTS[name]
    torch.manual_seed(0)
    x = inputs()

    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.kwargs = nn.Linear(128, 128), {}

        def forward(self, x):
            return function(self.first(x), **self.kwargs)

    model = Called()
    for first, then in (both, both[::-1]):
        with_history, without = of_parts(model), of_parts(model)
        errors = []
        model.kwargs = then
        exact = flat(parameter_gradients(model, x).grads)
        for mine, kwargs in ((with_history, first), (without, then)):
            mine.kwargs = kwargs
            for _ in range(3):
                parameter_gradients(mine, x)
            mine.kwargs = then
            noise = torch.stack([(d - exact).norm() for d in draws_of(mine, x)])
            assert noise.isfinite().all()
            errors.append((noise.mean(), noise.std() / DRAWS**0.5))
        (a, sa), (b, sb) = errors
        # another draw of the same distribution: 5 standard errors of the difference of two means
        assert abs(a - b) <= 5 * (sa**2 + sb**2) ** 0.5 + 1e-6 * exact.norm(), (a, b, exact.norm())


# 3. a name decides nothing


class Other(nn.Module):
    """Mathematics that no module of that name has."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(128))
        self.eps, self.variance_epsilon, self.hidden_size = 1e-6, 1e-6, 128
        self.p, self.alpha, self.approximate, self.inplace = 0.3, 1.0, "none", False

    def forward(self, h):
        return 0.5 * h + (h * self.weight).square()


NAMES = re.findall(
    r"\S+",
    """GELUActivation NewGELUActivation FastGELUActivation QuickGELUActivation PytorchGELUTanh
AccurateGELUActivation ClippedGELUActivation MishActivation LaplaceActivation LinearActivation
SiLUActivation ReLUSquaredActivation XIELUActivation LlamaRMSNorm T5LayerNorm MixtralRMSNorm RMSNorm
LayerNorm GroupNorm BatchNorm2d InstanceNorm1d Linear Conv1D Conv2d Embedding Dropout Softmax GELU
SiLU ReLU Mish Hardswish Softplus ELU LeakyReLU Sigmoid Tanh MaxPool2d CrossEntropyLoss
MultiheadAttention StochasticDepth DropPath FusedRMSNorm""",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("act", [False, True])
def test_a_users_module_of_any_name_runs_its_own_mathematics(name, act):
    torch.manual_seed(0)
    own = type(name, (Other,), {"__qualname__": name})()
    if act:
        own.act = F.gelu
    assert_sound(nn.Sequential(nn.Linear(128, 128), own), inputs())


OPS = re.findall(
    r"\S+",
    """gelu gelu_ relu relu6 silu mish sigmoid tanh softmax log_softmax rms_norm layer_norm
    group_norm batch_norm native_layer_norm
    fused_rms_norm dropout native_dropout conv convolution conv2d conv_mine
convnext linear matmul mm addmm bmm mul max_pool2d avg_pool2d embedding cross_entropy nll_loss where
exp clone to view transpose scaled_dot_product_attention flash_attention hardswish softplus
leaky_relu elu _to_copy add logsumexp grouped_mm""",
)


@pytest.fixture(scope="module")
def library():
    """Ops named after torch's, which are 0.5 h + h ** 3 and save h."""
    with torch.library._scoped_library("mylib", "DEF") as own:
        for name in OPS:
            define(own, name)
        yield torch.ops.mylib


def define(own, name):
    own.define(f"{name}(Tensor x) -> Tensor")
    own.impl(name, lambda x: 0.5 * x + x**3, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mylib::{name}", torch.empty_like, lib=own)

    def backward(context, grad):
        (x,) = context.saved_tensors
        return grad * (0.5 + 3 * x**2)

    def setup(ctx, inputs, output):  # called by keyword
        ctx.save_for_backward(*inputs)

    torch.library.register_autograd(f"mylib::{name}", backward, setup_context=setup, lib=own)


@pytest.mark.parametrize("preset", ["exact", "balanced"])
@pytest.mark.parametrize("name", OPS)
def test_an_op_of_a_users_library_is_kept(name, preset, library):
    torch.manual_seed(0)
    op = getattr(library, name)
    model, x = After(lambda h: op(h) * 2), inputs()
    baseline = parameter_gradients(model, x)
    mine = of_parts(model, preset)
    for _ in range(3):
        result = parameter_gradients(mine, x)
        assert result.error is None, result.message
        assert all_same(result.values, baseline.values)
        assert all_same(result.grads, baseline.grads)
