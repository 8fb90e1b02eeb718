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
    After,
    assert_promised,
    assert_sound,
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
