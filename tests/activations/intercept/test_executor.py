"""What the interception keeps for each op: which sites, how many bytes, how exact the gradient."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memtrain.compressors import Group, Identity
from tests.activations.intercept.intercepted import intercept

EIGHT = Group(bits=8, group_size=8, rounding="nearest")


class Model(nn.Module):
    """An op on activations, so that what it saves is neither a parameter nor the input."""

    def __init__(self, op, shapes, parameters=()):
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(()) for _ in shapes])
        self.own = nn.ParameterList([torch.randn(shape) / 3 for shape in parameters])
        self.op = op

    def forward(self, *xs):
        # x + scale saves nothing
        xs = [x + scale for x, scale in zip(xs, self.scales, strict=True)]
        y = self.op(*xs, *self.own)
        return y + 0 if isinstance(y, torch.Tensor) else y  # what a model returns is kept


def attention(kind, scale=None):
    def run(q, k, v):
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(q, k, v, scale=scale)

    return run


def classes(n=96, count=32):
    return torch.arange(n) % count


@dataclass
class Row:
    """One op: its inputs and parameters, and the sites (`op / tensor`: elements) compressed."""

    op: object
    shapes: list
    sites: dict
    parameters: tuple = ()
    exact: bool = False  # nothing lossy is kept


HALF = nn.Parameter(torch.eye(32)[:, :16].contiguous(), requires_grad=False)
QKV = [(2, 4, 24, 16)] * 3
N = 2 * 4 * 24 * 16
ROWS = {
    "linear": Row(F.linear, [(96, 32)], {"linear / input": 96 * 32}, ((40, 32), (40,))),
    "matmul": Row(
        lambda a, b: torch.matmul(a, b).sum(-1),
        [(96, 32), (32, 48)],
        {"matmul / input": 96 * 32, "matmul / input1": 32 * 48},
    ),
    "bmm": Row(
        lambda a, b: torch.bmm(a, b).sum(-1),
        [(3, 24, 32), (3, 32, 16)],
        {"matmul / input": 3 * 24 * 32, "matmul / input1": 3 * 32 * 16},
    ),
    "einsum": Row(
        lambda a, b: torch.einsum("bij,bjk->bik", a, b).sum(-1),
        [(3, 24, 32), (3, 32, 16)],
        {"matmul / input": 3 * 24 * 32, "matmul / input1": 3 * 32 * 16},
    ),
    "conv1d": Row(F.conv1d, [(4, 8, 64)], {"conv1d / input": 4 * 8 * 64}, ((6, 8, 3),)),
    "conv2d": Row(F.conv2d, [(4, 8, 9, 10)], {"conv2d / input": 2880}, ((6, 8, 3, 3),)),
    "conv3d": Row(F.conv3d, [(2, 4, 6, 6, 6)], {"conv3d / input": 1728}, ((6, 4, 3, 3, 3),)),
    "conv_transpose1d": Row(
        F.conv_transpose1d, [(4, 8, 64)], {"conv_transpose1d / input": 2048}, ((8, 6, 3),)
    ),
    "conv_transpose2d": Row(
        F.conv_transpose2d, [(4, 8, 9, 10)], {"conv_transpose2d / input": 2880}, ((8, 6, 3, 3),)
    ),
    "conv_transpose3d": Row(
        F.conv_transpose3d,
        [(2, 4, 6, 6, 6)],
        {"conv_transpose3d / input": 1728},
        ((4, 6, 2, 2, 2),),
    ),
    "softmax": Row(lambda x: F.softmax(x, -1) @ HALF, [(96, 32)], {"softmax / saved": 96 * 32}),
    "attention, flash": Row(
        attention(SDPBackend.FLASH_ATTENTION),
        QKV,
        {f"scaled_dot_product_attention / {t}": N for t in ("input", "input1", "input2")},
    ),
    "cross_entropy": Row(
        lambda x: F.cross_entropy(x, classes(), reduction="none"),
        [(96, 32)],
        {"cross_entropy / saved": None},  # the classes besides
    ),
    "nll_loss": Row(
        lambda x: F.nll_loss(F.log_softmax(x, 1), classes(), reduction="none"),
        [(96, 32)],
        {"log_softmax / saved": 96 * 32},  # nll_loss reads its shape only
    ),
    "mul": Row(
        lambda a, b: torch.mul(a, b).sum(-1),
        [(96, 32)] * 2,
        {"mul / input": 96 * 32, "mul / input1": 96 * 32},
    ),
    "avg_pool2d": Row(lambda x: F.avg_pool2d(x, 2), [(4, 8, 10, 10)], {}, exact=True),
    "adaptive_avg_pool2d": Row(
        lambda x: F.adaptive_avg_pool2d(x, 3), [(4, 8, 10, 10)], {}, exact=True
    ),
    "interpolate": Row(
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [(4, 8, 8, 8)], {}, exact=True
    ),
    "mean": Row(lambda x: x.mean(1), [(96, 32)], {}, exact=True),
    "pad, reflect": Row(
        lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), [(4, 8, 9, 9)], {}, exact=True
    ),
    "max_pool2d": Row(
        lambda x: F.max_pool2d(x, 2), [(4, 8, 16, 16)], {"max_pool2d / saved": None}, exact=True
    ),
    "dropout": Row(lambda x: F.dropout(x, 0.5), [(96, 32)], {"dropout / saved": None}, exact=True),
    "group_norm": Row(lambda x: F.group_norm(x, 2), [(4, 8, 9, 10)], {"group_norm / input": None}),
    "layer_norm": Row(lambda x: F.layer_norm(x, (32,)), [(96, 32)], {"layer_norm / input": None}),
    "rms_norm": Row(lambda x: F.rms_norm(x, (32,)), [(96, 32)], {"rms_norm / input": None}),
    "instance_norm": Row(F.instance_norm, [(4, 8, 9, 10)], {"instance_norm / input": None}),
    "batch_norm": Row(
        lambda x: F.batch_norm(x, None, None, training=True),
        [(4, 8, 9, 10)],
        {"batch_norm / input": None},
    ),
}
every_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def step(model, inputs, grad=None, choose=None):
    """Gradients of one step, and what it kept."""
    records, interception = [], None
    if choose is not None:
        interception = intercept(model, choose, records, derives=0)
    torch.manual_seed(1)
    y = model(*inputs)
    if interception is not None:
        interception.detach()
    grad = torch.randn_like(y) if grad is None else grad
    inputs = [x for x in inputs if x.requires_grad]
    found = torch.autograd.grad(y, [*inputs, *model.own], grad)
    return found, records, grad


def made(row):
    model = Model(row.op, row.shapes, row.parameters)
    return model, [torch.randn(shape).requires_grad_() for shape in row.shapes]


@every_row
def test_identity_is_bit_equal(row):
    model, inputs = made(row)
    plain, _, grad = step(model, inputs)
    exact, _, _ = step(model, inputs, grad, lambda site: Identity())
    assert all(torch.equal(a, b) for a, b in zip(plain, exact, strict=True))


@every_row
def test_sites_and_bytes(row):
    model, inputs = made(row)
    _, records, _ = step(model, inputs, choose=lambda site: EIGHT)
    planned = {}
    for record in records:
        if record.compressor:
            name = f"{record.site.op} / {record.site.tensor}"
            planned[name] = planned.get(name, 0) + record.planned
    assert planned.keys() == row.sites.keys(), records
    for name, elements in row.sites.items():
        if elements is not None:  # 8 bits, and two float32 bounds a group
            assert planned[name] == math.ceil(elements / 8) * (8 + 4), name


@every_row
def test_gradients_at_eight_bits_are_as_close_as_the_step(row):
    """An element of standard normal numbers is off by half a step: below 10 / 255 / 2 = 0.02, and
    uniformly so: 0.0057 of a deviation in the mean square; three times that (products of two
    such tensors, a softmax's or norm's terms) bounds the relative error of the gradient."""
    model, inputs = made(row)
    plain, _, grad = step(model, inputs)
    coarse, _, _ = step(model, inputs, grad, lambda site: EIGHT)
    for a, b in zip(coarse, plain, strict=True):
        error = ((a - b).norm() / b.norm()).item()
        assert error <= (0.0 if row.exact else 3 * 10 / 255 / math.sqrt(12) / 2)
    if not row.exact:
        assert any(not torch.equal(a, b) for a, b in zip(coarse, plain, strict=True))


@pytest.mark.parametrize("scale", [None, 0.25, 1.0])
@pytest.mark.parametrize("kind", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], ids=str)
@pytest.mark.parametrize(("width", "wide"), [(16, ""), (256, "wide_")])
def test_attention_without_a_scale_is_an_op_of_its_own(kind, scale, width, wide):
    model, inputs = made(Row(attention(kind, scale), [(2, 4, 24, width)] * 3, {}))
    _, records, _ = step(model, inputs, choose=lambda site: EIGHT)
    op = f"{wide}dot_product_attention" if scale == 1 else "scaled_dot_product_attention"
    assert {record.site.op for record in records} == {op}


@pytest.mark.parametrize("kind", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], ids=str)
def test_attention_keeps_nothing_whole(kind):
    """Flash keeps q, k, v and the output, and a log-sum-exp; math its products and weights."""
    model, inputs = made(Row(lambda *qkv: attention(kind)(*qkv).sum(-1), QKV, {}))
    plain, _, grad = step(model, inputs)
    coarse, records, _ = step(model, inputs, grad, lambda site: EIGHT)
    whole = [r for r in records if not r.compressor and r.planned > N * 4 // 16]
    assert whole == []
    for a, b in zip(coarse, plain, strict=True):
        assert (a - b).norm() <= 3 * 10 / 255 / math.sqrt(12) * b.norm()


def test_embedding_keeps_narrow_indices_and_its_gradient_is_exact():
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(200, 8)

        def forward(self, index):
            return self.table(index * 1)  # not the model's own input, which stays alive anyway

    model, index, records = Embedded(), torch.arange(2000) % 200, []
    plain = torch.autograd.grad(model(index).square().sum(), model.table.weight)[0]
    intercept(model, lambda site: EIGHT, records, derives=0)
    ours = torch.autograd.grad(model(index).square().sum(), model.table.weight)[0]
    (kept,) = [r for r in records if r.site.op == "embedding" and r.compressor]
    assert (kept.nbytes, kept.planned) == (16000, 2000)
    assert torch.equal(ours, plain)
