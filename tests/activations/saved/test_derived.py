"""Outputs that are recomputed from payloads that are kept anyway: norms, gates, dropouts."""

from functools import partial, reduce

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memtrain
from memtrain.audit.live_storages import saved_nbytes
from memtrain.compressors import Group
from tests.activations.intercept.intercepted import intercept
from tests.activations.proof.comparison import in_thread

GROUP = Group(bits=8)


class SwiGLU(nn.Module):
    """As Llama's MLP: the gate's nonlinearity, times another projection, projected back."""

    def __init__(self, function=F.silu):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.function = function

    def forward(self, x):
        return self.down(self.function(self.gate(x)) * self.up(x))


class GEGLU(SwiGLU):
    """As in diffusers: both halves of one projection, views of one storage."""

    def __init__(self):
        super().__init__(F.gelu)
        self.gate = nn.Linear(64, 192)

    def forward(self, x):
        hidden, gate = self.gate(x).chunk(2, dim=-1)
        return self.down(hidden * self.function(gate))


def attached(model, choose, *, derive=True, products=False, records=None):
    return intercept(model, choose, records, derives=derive and 2 + products)


def gradients(model, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    (model(x) * torch.linspace(-1, 1, 64)).sum().backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    return [grad.clone() for grad in grads if grad is not None]


def cosine(a, b):
    return float(F.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


@pytest.mark.parametrize("make", [SwiGLU, GEGLU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_keeps_two_or_three_payloads_and_not_four(make, dtype):
    """In 8-bit groups, about as close to the exact gradient as when every tensor has a payload."""
    torch.manual_seed(0)
    model, x = make().to(dtype), torch.randn(8, 32, 64).to(dtype)
    exact = gradients(model, x)
    errors, kept = [], []
    for derive, products in ((False, False), (True, False), (True, True)):
        interception = attached(model, lambda site: GROUP, derive=derive, products=products)
        found = gradients(model, x)
        kept.append(saved_nbytes(lambda: model(x), exclude=[x])[0])
        interception.detach()
        pairs = zip(found, exact, strict=True)
        errors.append([float((a - b).norm() / b.norm()) for a, b in pairs])
    assert kept == [4 * PAYLOAD, 3 * PAYLOAD, 2 * PAYLOAD]
    # |f'| < 1.13, and the input's range is at most twice the output's
    for derived in errors[1:]:
        for mine, every in zip(derived, errors[0], strict=True):
            assert mine <= 1.13 * 2 * every + 2 * torch.finfo(dtype).eps


def test_sums_that_cancel_are_exact_for_inputs_near_zero():
    """As a bias before a norm: every derivative is 0.5, and no code may be off by its sign."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU())
    nn.init.normal_(model[0].weight, std=1e-5)
    nn.init.zeros_(model[0].bias)
    grad = torch.randn(4096, 64)
    memtrain.wrap(model, None, "activations_only")
    (model(torch.randn(4096, 64)) * (grad - grad.mean(0))).sum().backward()
    assert model[0].bias.grad.norm() < 1e-3 * grad.norm() / 8


PAYLOAD = 8 * 32 * 96 + 8 * 32 * 96 // 256 * 4


@pytest.mark.parametrize("cast", [torch.float32, torch.bfloat16])
def test_a_dropped_norm_takes_its_mask(cast):
    """As adapters read it: cast, then dropped; a copy of the norm's weight takes its bytes."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.RMSNorm(64).bfloat16(), nn.Linear(64, 64).to(cast)]).train()
    x = torch.randn(8, 32, 64).bfloat16()
    model.forward = lambda x: model[1](F.dropout(model[0](x * 1.0).to(cast), 0.2)).float()
    torch.manual_seed(1)
    exact = gradients(model, x)
    records = []
    interception = attached(model, lambda site: GROUP, products=True, records=records)
    torch.manual_seed(1)
    found = gradients(model, x)
    interception.detach()
    assert [row.planned for row in records if row.site.op == "linear"] == [
        64 * 2
    ]  # the norm's weight
    for a, b in zip(found, exact, strict=True):
        assert cosine(a, b) > 0.999


class View(torch.autograd.Function):
    """Named as torch's own node of a view is; writes as a kernel that is given an address."""

    @staticmethod
    def forward(ctx, x):
        y = x.transpose(0, 1)
        y.detach().numpy()[...] *= -3
        return y.transpose(0, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad * -3


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("write", [lambda y: y.mul_(2), View.apply])
@pytest.mark.parametrize("make", [nn.SiLU, partial(nn.RMSNorm, 96)])
def test_what_is_written_to_is_not_derived(make, write, products):
    torch.manual_seed(0)
    model, x = SwiGLU(make()), torch.randn(8, 32, 64)
    model.forward = lambda x: model.down(write(model.function(model.gate(x))))
    exact = gradients(model, x)
    interception = attached(model, lambda site: GROUP, products=products)
    for _ in range(2):
        found = gradients(model, x)
    interception.detach()
    for a, b in zip(found, exact, strict=True):
        assert cosine(a, b) > 0.999


def test_the_result_of_attention_is_recomputed_for_what_saves_it():
    model, x = nn.Sequential(nn.Linear(64, 192), nn.Linear(64, 64)), torch.randn(8, 32, 64)
    model.write = nn.Identity()

    def forward(x):
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in model[0](x).chunk(3, -1))
        y = model.write(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return model[1](y.transpose(1, 2).flatten(2))

    model.forward = forward
    exact, records = gradients(model, x), []
    attached(model, lambda site: GROUP, products=True, records=records)
    for a, b in zip(gradients(model, x), exact, strict=True):
        assert cosine(a, b) > 0.999
    (row,) = [row for row in records if row.site.module == "1"]
    assert (row.planned, row.reason[:10]) == (0, "recomputed")
    model.write.forward = View.apply  # the backward of attention reads what was written, as torch's
    assert cosine(gradients(model, x)[3], exact[3]) < -0.999


@pytest.mark.parametrize("cast", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("rank", "rows", "derived"), [(4, 256, True), (4, 16, False), (65, 1024, False)]
)
def test_an_adapters_output_is_recomputed_for_what_saves_it(rank, rows, derived, cast):
    """As DoRA multiplies it by a vector; a copy of the adapter's weight takes its bytes."""
    model, x = nn.Sequential(nn.Linear(64, rank), nn.Linear(rank, 64, bias=False)), None
    model.scale, x = nn.Parameter(torch.rand(64).to(cast)), torch.randn(rows // 8, 8, 64)
    model.last = nn.Linear(64, 64, dtype=cast)
    model.forward = lambda x: model.last(model.scale * model[1](model[0](x)).to(cast))
    exact, records = gradients(model, x), []
    attached(model, lambda site: GROUP, products=True, records=records)
    for a, b in zip(gradients(model, x), exact, strict=True):
        assert cosine(a, b) > 0.999
    (row,) = [row for row in records if row.site.op == "mul" and row.site.tensor == "input1"]
    assert row.reason.startswith("recomputed") is derived
    assert row.planned == (64 * rank * 4 if derived else rows * 64 + rows * 64 // 256 * 4)
    y = model(x).sum()
    model[1].weight.data.zero_()  # without a version, as an update in place may be
    assert torch.autograd.grad(y, model.scale)[0].norm() > 0


@pytest.mark.parametrize("saves_too", [False, True])
def test_a_product_is_not_recomputed_from_a_payload_that_its_gradient_meets_again(saves_too):
    """The last layer's gradient reaches `first`, which saves a factor, with the product in it."""
    model, records = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)), []

    def forward(x):
        h, u = model[0](x), model[1](x)
        first = model[2](h if saves_too else u.detach() + x)
        return model[3](first * (h * u))

    model.forward = forward
    attached(model, lambda site: GROUP, products=True, records=records)
    model(torch.randn(64, 64))
    derived = [row.site.tensor for row in records if row.compressor == "derived"]
    assert ("input1" in derived) is not saves_too


NARROW, WIDE, EIGHT = torch.bfloat16, torch.float32, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("dtype", "casts", "derived"),
    [
        (WIDE, [NARROW, WIDE], False),
        (WIDE, [torch.float64, NARROW, WIDE], False),
        (NARROW, [torch.float16, WIDE, NARROW], False),
        (WIDE, [EIGHT, WIDE], False),
        (NARROW, [WIDE, NARROW], True),  # adapters cast to their weight, and autocast casts back
        (NARROW, [WIDE, NARROW, WIDE, NARROW], True),
    ],
)
def test_a_cast_of_a_cast_is_derived_if_it_was_rounded_once_at_most(dtype, casts, derived):
    model, records = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)), []
    model.to(dtype).forward = lambda x: model[2](reduce(torch.Tensor.to, casts, model[:2](x)))
    attached(model, lambda site: GROUP, records=records)
    model(torch.randn(256, 64, dtype=dtype))
    reasons = [row.reason for row in records if row.site.op == "linear"][1:]
    assert [reason.startswith("recomputed") for reason in reasons] == [derived]


class Block(nn.Module):
    """A norm whose output three products save, as of q, k and v."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        y = self.norm(x * 1.0)
        v = torch.bmm(y, self.v.weight.expand(len(y), -1, -1))  # reads y as if it wrote to it
        return torch.tanh(self.q(y)) * self.k(y) + v


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norms_output_is_computed_again_from_its_normalised_input(make, dtype):
    torch.manual_seed(0)
    norm = make(64)
    nn.init.normal_(norm.weight, 1, 0.5)
    model, x = Block(norm).to(dtype), torch.randn(8, 32, 64).to(dtype)
    exact = gradients(model, x)
    held = []
    for derive in (False, True):
        interception = attached(model, lambda site: GROUP, derive=derive)
        found = gradients(model, x)
        given = x.clone().requires_grad_()
        held.append(saved_nbytes(lambda: model(given), exclude=[given])[0])  # noqa: B023
        interception.detach()
        for a, b in zip(found, exact, strict=True):
            assert cosine(a, b) > 0.999
    copies = sum(p.nbytes for p in norm.parameters())
    assert held[0] - held[1] == 8 * 32 * 64 + 8 * 32 * 64 // 256 * 4 - copies


def test_a_weight_changed_before_the_backward_raises_as_plain_torch_does():
    model, x = Block(nn.LayerNorm(64)), torch.randn(8, 32, 64, requires_grad=True)
    interception = attached(model, lambda site: GROUP)
    y = model(x)
    with torch.no_grad():
        model.norm.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    interception.detach()


@pytest.mark.parametrize("make", [partial(nn.LayerNorm, 64), nn.SiLU])
def test_another_threads_tensor_is_not_taken_for_a_known_output(make):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.op = nn.Linear(64, 64), make()
            self.last = nn.Linear(64, 64, dtype=torch.float64)

        def forward(self, x):
            h = self.first(x)
            n = self.op(h)

            def double(h):
                """Of the same number as the op: each thread counts its own nodes."""
                one = torch.ones(1, requires_grad=True)
                while (one * 1).grad_fn._sequence_nr() < n.grad_fn._sequence_nr() - 1:
                    pass
                y = h * 2
                assert y.grad_fn._sequence_nr() == n.grad_fn._sequence_nr()
                return y

            return n + self.last(in_thread(double, h).double())

    torch.manual_seed(0)
    model, x = Model(), torch.randn(64, 64)
    exact = gradients(model, x)
    interception = attached(model, lambda site: GROUP)
    for mine, plain in zip(gradients(model, x), exact, strict=True):
        torch.testing.assert_close(mine, plain, rtol=0, atol=0.02 * float(plain.abs().max()))
    interception.detach()
