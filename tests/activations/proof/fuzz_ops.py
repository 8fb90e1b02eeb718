"""The ops of random models: each maps tensors of 16 x 32 to one of 16 x 32.

A function takes the model, which makes modules at an instruction's first run, the instruction, and
two tensors of the pool.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

ROWS, WIDTH = 16, 32


def _module(make):
    return lambda model, at, a, b: model.module(at, make)(a)


def _function(function):
    return lambda model, at, a, b: function(a)


def _pair(function):
    return lambda model, at, a, b: function(a, b)


def _shaped(shape, make):
    return lambda model, at, a, b: model.module(at, make)(a.reshape(shape)).reshape(a.shape)


def _computed_weight(model, at, a, b):
    own = model.module(at, partial(nn.Linear, WIDTH, WIDTH))
    return F.linear(a, own.weight * (1 + own.bias).square().mean())


def _addmm(model, at, a, b):
    return torch.addmm(b, a, model.module(at, partial(nn.Linear, WIDTH, WIDTH)).weight)


def _embedding(model, at, a, b):
    return model.module(at, partial(nn.Embedding, WIDTH, WIDTH))(a.argmax(-1)) * b


def _attention(model, at, a, b):
    q, k = (x.reshape(1, ROWS, 4, 8).transpose(1, 2) for x in (a, b))
    causal, scale = at.number % 2 == 0, (None, 0.25)[at.number % 3 == 0]
    y = F.scaled_dot_product_attention(q, k, q, is_causal=causal, scale=scale)
    return y.transpose(1, 2).reshape(a.shape)


def _composite_attention(model, at, a, b):
    own = model.module(at, partial(nn.MultiheadAttention, WIDTH, 4))
    return own(a.unsqueeze(1), b.unsqueeze(1), a.unsqueeze(1), need_weights=False)[0].squeeze(1)


def _pooled(pool):
    def op(model, at, a, b):
        return pool(a.unsqueeze(0), 2).repeat_interleave(2, -1).squeeze(0) * 0.7

    return op


def _pooled_image(pool):
    def op(model, at, a, b):
        return F.interpolate(pool(a.reshape(1, 2, 16, 16), 2), scale_factor=2.0).reshape(a.shape)

    return op


def _loss(model, at, a, b):
    target = (torch.arange(ROWS) * 7 + at.number) % WIDTH
    return b + F.cross_entropy(a, target)


def _dropout(model, at, a, b):
    return F.dropout(a, 0.1 + 0.1 * (at.number % 4))


def _half(model, at, a, b):
    return (a.bfloat16() * b.bfloat16()).float()


def _autocast(model, at, a, b):
    with torch.autocast("cpu", torch.bfloat16):
        y = F.gelu(model.module(at, partial(nn.Linear, WIDTH, WIDTH))(a))
        return (y @ b.bfloat16().T @ y / WIDTH).float()


def _divide(a, b):
    return a / (1 + b.square())


def _gather(model, at, a, b):
    return a.gather(1, (b.detach().abs() * 100).long() % WIDTH)


def _sorted(model, at, a, b):
    return a.sort(dim=at.number % 2).values


def _topk(model, at, a, b):
    return torch.cat([a.topk(WIDTH // 2).values, b[:, : WIDTH // 2]], 1)


def _logsumexp(model, at, a, b):
    dim = at.number % 2
    return a - a.logsumexp(dim, keepdim=True)


def _bmm(a, b):
    scores = torch.bmm(a.view(4, 4, WIDTH), b.view(4, 4, WIDTH).mT)
    return scores.repeat(1, 1, 8).reshape(a.shape) / 8


def _masked_softmax(a, b):
    return a.masked_fill(b > 0.5, -math.inf).softmax(-1).nan_to_num()


def _along(function):
    return lambda model, at, a, b: function(3 * a, at.number % 2)


ACTIVATIONS = {
    name: _function(function)
    for name, function in {
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "silu": F.silu,
        "relu": F.relu,
        "relu_": lambda a: F.relu(a * 1, inplace=True),
        "silu_": lambda a: F.silu(a + 0.1, inplace=True),
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "elu": F.elu,
        "leaky_relu": partial(F.leaky_relu, negative_slope=0.2),
        "softplus": F.softplus,
        "mish": F.mish,
        "hardswish": F.hardswish,
        "hardtanh": F.hardtanh,
        "relu6": F.relu6,
        "logsigmoid": F.logsigmoid,
        "clamp": partial(torch.clamp, min=-0.5, max=0.7),
        "aten.silu": torch.ops.aten.silu.default,
        "method relu": torch.Tensor.relu,
    }.items()
}

SAFE = {
    "linear": _module(partial(nn.Linear, WIDTH, WIDTH)),
    "computed weight": _computed_weight,
    "addmm": _addmm,
    "matmul": _pair(lambda a, b: a @ b.T @ a / WIDTH),
    "aten.mm": _pair(lambda a, b: torch.ops.aten.mm.default(a, b.T.contiguous()) @ b / WIDTH),
    "bmm": _pair(_bmm),
    "einsum": _pair(lambda a, b: torch.einsum("ij,kj,kl->il", a, b, b) / WIDTH),
    "mul": _pair(torch.mul),
    "aten.mul": _pair(torch.ops.aten.mul.Tensor),
    "square": _function(torch.square),
    "div": _pair(_divide),
    "add": _pair(torch.add),
    "layer_norm": _module(partial(nn.LayerNorm, WIDTH)),
    "F.layer_norm": _function(lambda a: F.layer_norm(a, (WIDTH,))),
    "rms_norm": _module(partial(nn.RMSNorm, WIDTH)),
    "group_norm": _module(partial(nn.GroupNorm, 4, WIDTH)),
    "batch_norm": _module(partial(nn.BatchNorm1d, WIDTH)),
    "attention": _attention,
    "MultiheadAttention": _composite_attention,
    "conv1d": _shaped((1, 16, 32), partial(nn.Conv1d, 16, 16, 3, padding=1)),
    "conv2d": _shaped((2, 4, 8, 8), partial(nn.Conv2d, 4, 4, 3, padding=1)),
    "depthwise": _shaped((2, 4, 8, 8), partial(nn.Conv2d, 4, 4, 3, padding=1, groups=4)),
    "conv_transpose2d": _shaped((2, 4, 8, 8), partial(nn.ConvTranspose2d, 4, 4, 3, padding=1)),
    "embedding": _embedding,
    "cross_entropy": _loss,
    "half": _half,
    "autocast": _autocast,
}  # fmt: skip
"""Ops whose backward reads no output: one that is written to at once keeps its gradient."""

OPS = {
    **SAFE,
    **ACTIVATIONS,
    "exp": _function(lambda a: torch.exp(a.clamp(max=1.0))),
    "softmax": _along(F.softmax),
    "log_softmax": _along(F.log_softmax),
    "logsumexp": _logsumexp,
    "max_pool1d": _pooled(F.max_pool1d),
    "avg_pool1d": _pooled(F.avg_pool1d),
    "max_pool2d": _pooled_image(F.max_pool2d),
    "avg_pool2d": _pooled_image(F.avg_pool2d),
    "dropout": _dropout,
    "where": _pair(lambda a, b: torch.where(a > b, a, b * a)),
    "masked_fill": _pair(lambda a, b: a.masked_fill(b > 0.3, 0.2)),
    "masked softmax": _pair(_masked_softmax),
    "gather": _gather,
    "sort": _sorted,
    "topk": _topk,
    "cat": _pair(lambda a, b: torch.cat([a, b], 1)[:, ::2]),
    "transpose": _pair(lambda a, b: (a.T.contiguous() * b.T).T),
    "view": _function(lambda a: a.reshape(8, 64)[:, :].view(ROWS, WIDTH) * 0.9),
    "mean": _pair(lambda a, b: a - b.mean(1, keepdim=True)),
    "expand": _pair(lambda a, b: a[:1].expand(ROWS, WIDTH) * b),
    "std": _function(lambda a: a / (1 + a.std(1, keepdim=True))),
    "log": _function(lambda a: torch.log(a.square() + 0.1)),
    "sin": _function(torch.sin),
    "prod": _pair(lambda a, b: a * (1 + 0.1 * b.tanh()).prod(1, keepdim=True)),
    "cumsum": _function(lambda a: a.cumsum(1) / WIDTH),
    "normalize": _function(lambda a: F.normalize(a, dim=1, eps=0.1)),
    "alias": _function(lambda a: a),
    "row view": _function(lambda a: a.view(-1).view(ROWS, WIDTH)),
}  # fmt: skip
