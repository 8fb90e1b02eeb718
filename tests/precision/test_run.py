"""Rounding under the interception: against steps worked out op by op, and against plain torch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memtrain
from memtrain.config.sources import Config
from memtrain.kernels.floats.formats import FP8_BACKWARD, FP8_FORWARD, FP16
from memtrain.precision.assignment import Precision

SCALE = 2.0**10


def mlp():
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)]
    return nn.Sequential(*layers)


def data(size=32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, size, generator=generator)
    return x, (x[:, :10] * 2 + x[:, 10:20]).argmax(1)


def wrapped(model, lr=0.1, cfg=None, **fields):
    fields = {"assignment": "uniform", "promotion": None, "loss_scale": "static", **fields}
    fields.setdefault("initial_scale", SCALE)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return memtrain.wrap(model, optimizer, cfg or Config(precision=Precision(**fields)))


def train(model, optimizer, steps=6):
    x, y = data()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_hand(model, x, y, low):
    """One step of the five ops; `low(i)` says whether the i-th tensor of the forward is low."""

    def v(index, tensor):
        return (FP8_FORWARD if low(index) else FP16).round(tensor)

    def dv(index, tensor):
        float_format = (
            FP8_BACKWARD if low(index) else memtrain.precision.FloatFormat(6, 9, overflow="inf")
        )
        return float_format.round(tensor)

    w = [(v(i, model[2 * i].weight.detach()), v(i, model[2 * i].bias.detach())) for i in range(3)]
    a = [v(0, x)]
    h = []
    for i in range(2):
        h.append(v(i + 1, F.linear(a[-1], *w[i])))
        a.append(v(i + 1, h[-1].relu()))
    out = v(3, F.linear(a[-1], *w[2])).requires_grad_()
    loss = F.cross_entropy(out, y)
    (grad,) = torch.autograd.grad(loss, out)
    g, found = dv(3, grad * SCALE), []
    for i in (2, 1, 0):
        rounded = [FP16.round(g.t() @ a[i]) / SCALE, FP16.round(g.sum(0)) / SCALE]
        found = [*rounded, *found]
        if i:
            g = dv(i, g @ w[i][0])  # of the relu's output, then of its input
            g = dv(i, g * (h[i - 1] > 0))
    return loss.detach(), found


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_a_step_is_the_one_worked_out_by_hand(ratio):
    x, y = data()
    model = mlp()
    model, _ = wrapped(model, assignment="size_ordered", ratio=ratio)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    state = memtrain.precision_state(model)
    groups = {value.group for value in state.graph.tensors if value.name in state.forward}
    assert len(groups) == {0.0: 0, 0.5: 1, 1.0: 4}[ratio]
    expected, gradients = by_hand(model, x, y, lambda group: group in groups)
    assert loss == expected
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_the_master_weights_are_what_the_optimizer_updates():
    model, optimizer = wrapped(mlp(), lr=1e-6)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 1)
    for old, p in zip(before, model.parameters(), strict=True):
        assert torch.equal(p, old - 1e-6 * p.grad)
        assert not torch.equal(p, FP8_FORWARD.round(p))


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "tanh"])
def test_a_backward_uses_the_rounded_output(name):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 64)

        def forward(self, x):
            x = self.layer(x)
            return F.softmax(x, 1) if name == "softmax" else getattr(torch, name)(x)

    model = Last()
    model, _ = wrapped(model, initial_scale=1.0)
    x, _ = data()
    y = model(x)
    grad = torch.randn(64, 64)
    y.backward(grad)
    h = F.linear(*map(FP8_FORWARD.round, (x, model.layer.weight.detach())))
    h = FP8_FORWARD.round(h + FP8_FORWARD.round(model.layer.bias.detach()))
    z = FP8_FORWARD.round(F.softmax(h, 1) if name == "softmax" else getattr(torch, name)(h))
    assert torch.equal(y.detach(), z)
    g = FP8_BACKWARD.round(grad)
    inner = {
        "softmax": lambda: torch.ops.aten._softmax_backward_data(g, z, 1, torch.float32),
        "sigmoid": lambda: torch.ops.aten.sigmoid_backward(g, z),
        "tanh": lambda: torch.ops.aten.tanh_backward(g, z),
    }[name]()
    expected = FP16.round(FP8_BACKWARD.round(inner).sum(0))
    assert torch.equal(model.layer.bias.grad, expected)


TWINS = {
    "fp32": {"assignment": "fp32"},
    "all_high_in_fp32": {"assignment": "size_ordered", "ratio": 0.0, "high": "fp32"},
    "and_dynamic_scale": {
        "assignment": "size_ordered", "ratio": 0.0, "high": "fp32", "loss_scale": "dynamic",
    },
}  # fmt: skip


@pytest.mark.parametrize("fields", TWINS.values(), ids=TWINS.keys())
def test_exact_twins_are_bit_identical_to_plain(fields):
    plain = mlp()
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    model, optimizer = wrapped(mlp(), **fields)
    assert train(model, optimizer) == expected
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a.grad, b.grad)


def test_fp32_leaves_the_model_alone():
    model, _ = wrapped(mlp(), assignment="fp32")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(ValueError, match="nothing is rounded"):
        memtrain.precision_state(model)


def test_evaluation_is_rounded_as_training_is():
    model, _ = wrapped(mlp())
    x, _ = data()
    training = model(x).detach()
    with torch.no_grad():
        assert torch.equal(model.eval()(x), training)
    with torch.inference_mode():
        assert torch.equal(model(x), training)


def test_a_first_forward_in_evaluation_decides_as_training_does():
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 10)).eval()
    model, _ = wrapped(model)
    with torch.no_grad():
        model(data()[0])
    assert not model.training
    names = [value.name for value in memtrain.precision_state(model).graph.tensors]
    assert "1 / dropout / output" in names


class Blocks(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.first, self.last, self.how = nn.Linear(32, 32), nn.Linear(32, 10), how
        self.block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        x = self.first(x)
        if self.how is None:
            return self.last(x + self.block(x))
        return self.last(x + checkpoint(self.block, x, use_reentrant=self.how))


@pytest.mark.parametrize("how", [False, True], ids=["saved_hooks", "reentrant"])
def test_recomputation_rounds_as_the_first_time(how):
    torch.manual_seed(0)
    models = [Blocks(None)]
    models.append(Blocks(how))
    models[1].load_state_dict(models[0].state_dict())
    runs = [wrapped(model, assignment="size_ordered", ratio=0.6) for model in models]
    assert train(*runs[0]) == train(*runs[1])
    for a, b in zip(*(model.parameters() for model, _ in runs), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_several_forwards_before_a_backward_and_one_that_fails():
    x, y = data()
    plain, _ = wrapped(mlp())
    F.cross_entropy(plain(x), y).backward()
    model, _ = wrapped(mlp())
    model(x)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(x[:, :5])
    first, second = model(x[:32]), model(x[32:])
    loss = F.cross_entropy(torch.cat([first, second]), y)
    loss.backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        # each forward's gradient is rounded before they are added
        assert torch.allclose(a.grad, b.grad, rtol=2**-6, atol=1e-4)


def test_parts_of_a_model_may_be_called_on_their_own():
    x, y = data()
    whole, _ = wrapped(mlp())
    F.cross_entropy(whole(x), y).backward()
    parts, _ = wrapped(mlp())
    parts(x)
    x = FP8_FORWARD.round(x)  # a part's own input is not rounded
    for module in parts:
        x = module(x)
    F.cross_entropy(x, y).backward()
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_part_that_runs_before_the_model_is_refused():
    model, _ = wrapped(mlp())
    with pytest.raises(RuntimeError, match="0 runs before the tensors of training are known"):
        model[0](data()[0])


def test_an_op_that_the_trace_did_not_have_is_high_and_listed():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.late = nn.Linear(32, 10), False

        def forward(self, x):
            y = self.layer(x)
            return y * 1.0009765625 if self.late else y

    model, _ = wrapped(Branch())
    x, _ = data()
    y = model(x)
    model.late = True
    z = model(x)
    assert torch.equal(z, FP16.round(y * 1.0009765625))
    state = memtrain.precision_state(model)
    assert list(state.untraced) == ["(root) / mul / output"]
    assert "not in the traced forward, so high: (root) / mul / output (1)" in str(state)


class Ops(nn.Module):
    """In-place ops, views, a slice that is written to, a shared module, a weight's view."""

    def __init__(self):
        super().__init__()
        self.layer, self.act = nn.Linear(32, 32), nn.ReLU(inplace=True)
        self.table = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x):
        x = self.act(self.layer(x))
        y = (x @ self.table.t()).view(-1, 2, 16).transpose(1, 2).reshape(-1, 32)
        y = self.act(self.layer(y)) + x
        z = y.clone()
        z[:, 0] = 0
        z += self.table.T[0]
        return z.chunk(2, dim=1)[0]


def test_views_in_place_ops_and_shared_modules():
    torch.manual_seed(0)
    model, _ = wrapped(Ops())
    y = model(data()[0])
    assert torch.equal(y, FP8_FORWARD.round(y))
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model, plain = Ops(), Ops()
    plain.load_state_dict(model.state_dict())
    model, _ = wrapped(model, assignment="size_ordered", ratio=0, high="fp32")
    for one in (model, plain):
        one(data()[0]).square().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_the_gradient_is_not_differentiated_again():
    model, _ = wrapped(mlp())
    loss = model(data()[0]).square().sum()
    with pytest.raises(RuntimeError, match="cannot be differentiated a second time"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_two_bytes_and_autocast(dtype):
    x, y = data()
    model, _ = wrapped(mlp().to(dtype), high="bf16")
    z = model(x.to(dtype))
    assert z.dtype == dtype
    assert torch.equal(z, FP8_FORWARD.round(z))
    F.cross_entropy(z.float(), y).backward()
    model, _ = wrapped(mlp())
    with torch.autocast("cpu", torch.bfloat16):
        F.cross_entropy(model(x), y).backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_models_that_cannot_be_rounded_are_refused():
    with pytest.raises(ValueError, match=r"0.weight has dtype torch.float64; allowed: torch.float"):
        wrapped(mlp().double())
    compiled = nn.Sequential(nn.Linear(32, 10), torch.compile(nn.Linear(10, 10), backend="eager"))
    with pytest.raises(ValueError, match="precision: 1 is compiled"):
        wrapped(compiled)
    model, _ = wrapped(nn.Sequential(nn.LayerNorm(32)))
    with pytest.raises(ValueError, match="has no GEMM"):
        model(data()[0])


@pytest.mark.parametrize("when", ["before", "wrapped", "later"])
def test_parts_compiled_in_place_are_refused_by_name_whenever_it_is_done(when):
    model, (x, _) = mlp(), data()
    hooks = len(model._forward_pre_hooks)
    if when == "before":
        model[2].compile(backend="eager")
        with pytest.raises(ValueError, match="precision: 2 is compiled"):
            wrapped(model)
        assert len(model._forward_pre_hooks) == hooks
        return
    wrapped(model)
    if when == "later":
        model(x)
    model[2].compile(backend="eager")
    with pytest.raises(ValueError, match="precision: 2 is compiled"):
        model(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_function_inside_is_refused_not_left_unrounded():
    class Net(nn.Linear):
        act = staticmethod(F.gelu)

        def forward(self, x):
            return self.act(super().forward(x))

    torch._dynamo.reset()
    model, _ = wrapped(Net(32, 32))
    model(torch.randn(16, 32))
    model.act = torch.compile(lambda x: F.gelu(x) * 2, backend="eager")
    with pytest.raises(RuntimeError, match=r"rounded op by op, which torch\.compile.*hide"):
        model(torch.randn(16, 32))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how", "ignore:The .grad attribute")
@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
def test_compiling_a_wrapped_model_is_an_error_and_disabling_works(later):
    x, _ = data()
    torch._dynamo.reset()
    model, _ = wrapped(mlp())
    if later:
        model(x)
    with pytest.raises(RuntimeError, match=r"rounded op by op, which torch\.compile.*hide"):
        torch.compile(model, backend="eager")(x)
    around = torch.compile(lambda x: torch.compiler.disable(model)(x).sum(), backend="eager")
    around(x).backward()
    assert memtrain.precision_state(model).step == 1
    assert torch.equal(around(x), model(x).sum())
