"""Linear layers on FP8 GEMMs: operands against the formats, products against float64 and plain."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memtrain
from memtrain.config.sources import load
from memtrain.precision import E4M3FN, E5M2, FP8_BACKWARD, FP8_FORWARD, FloatFormat, fp8_gemm

WORKS = not fp8_gemm.unsupported(torch.ones(16, 16), torch.ones(16, 16))
needs = pytest.mark.skipif(not WORKS, reason="this torch has no FP8 GEMM on the CPU")
FORMATS = {
    "forward": FP8_FORWARD,
    "backward": FP8_BACKWARD,
    "e4m3fn": E4M3FN,
    "e5m2": E5M2,
    "far": FloatFormat(4, 3, bias=100),
    "wide": FloatFormat(5, 2, bias=-60),
}


def values(form):
    """Every number of a format, NaN and Inf where it has them."""
    return form.decode(torch.arange(256, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_an_operand_is_the_tensor(form, dtype):
    x = values(form)
    held = fp8_gemm.TYPES[form.exponent_bits, form.mantissa_bits]
    top = torch.finfo(held).max * 2.0**-form.bias
    for y in (x, x[x.isnan() | x.isinf() | (x.abs() <= top)]):
        codes, inverse, halved = fp8_gemm.quantize(y.to(dtype), form)
        assert codes.dtype == held
        got = codes.double() * inverse.double()
        assert bool(halved) == (form.max > top and len(y) == len(x))
        number = ~y.isnan()
        assert got[~number].isnan().all()
        wrong = number & (got != y)
        if not halved:
            assert not wrong.any()
            continue
        small = y[wrong].abs()  # odd multiples of the least number, taken to even ones
        assert len(small) == 2 ** (form.mantissa_bits + 1)
        assert (small < 2 * form.min_normal).all()
        assert ((got[wrong] - y[wrong]).abs() == form.min_subnormal).all()
        assert (got[wrong] / form.min_subnormal % 4 == 0).all()


def test_nan_beside_the_largest_number_stays_alone():
    x = torch.tensor([30.0, torch.nan, 1.0])
    codes, inverse, _ = fp8_gemm.quantize(x, FP8_FORWARD)
    torch.testing.assert_close(codes.float() * inverse, x, rtol=0, atol=0, equal_nan=True)


def bounded(got, a, b):
    """Within twice the error bound of a float32 sum of the products: k half ulps of their sizes."""
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    return ((got.double() - exact).abs() <= 2 * a.shape[1] * 2.0**-24 * size).all()


@needs
@pytest.mark.parametrize("shape", [(16, 32, 48), (5, 7, 3), (1, 1, 1), (2, 3, 40, 9)], ids=str)
def test_products_against_float64(shape):
    *rows, k, n = shape
    x = FP8_FORWARD.round(torch.randn(*rows, k) * 4).requires_grad_()
    w = FP8_FORWARD.round(torch.randn(n, k)).requires_grad_()
    bias = torch.randn(n, requires_grad=True)
    g = FP8_BACKWARD.round(torch.randn(*rows, n) * 1e3)
    seen = []
    y = fp8_gemm.linear(x, w, bias, FP8_FORWARD, FP8_BACKWARD, seen.append, seen.append)
    y.backward(g)
    flat, back = x.detach().reshape(-1, k), g.reshape(-1, n)
    bare = fp8_gemm.linear(x, w, None, FP8_FORWARD, None, seen.append, seen.append).detach()
    assert bounded(bare.reshape(-1, n), flat, w.detach().t())
    assert torch.equal(y.detach(), bare + bias.detach())
    assert bounded(x.grad.reshape(-1, k), back, w.detach())
    assert bounded(w.grad, back.t(), flat)
    assert torch.equal(bias.grad, back.sum(0))
    assert [bool(one) for one in seen] == [False] * 5


def model_and_data(scale=1.0):
    """Numbers so round that every order of a sum gives the same: gradients must be equal."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 16))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-2, 3, p.shape) * 0.25)
    return model, torch.randint(-3, 4, (16, 16)) * 0.5 * scale


def wrapped(model, **fields):
    given = {"assignment": "uniform", "promotion": None, "fp8_gemm": True, "initial_scale": 256.0}
    fields = {**given, **fields}
    cfg = {"preset": "precision_only", "precision": fields}
    return memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), cfg)


def step(model, optimizer, x):
    optimizer.zero_grad()
    y = model(x)
    y.backward(torch.ones_like(y) * 0.25)
    optimizer.step()
    return [y.detach(), *(p.grad for p in model.parameters())]


@needs
def test_training_is_the_same_as_on_plain_gemms():
    found = []
    for on in (False, True):
        model, x = model_and_data()
        model, optimizer = wrapped(model, fp8_gemm=on)
        found.append(step(model, optimizer, x))
        with torch.no_grad():
            found[-1].append(model(x))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    state = memtrain.precision_state(model)
    assert state.gemms == dict.fromkeys(("0 / linear", "2 / linear", "3 / linear"), "")
    assert "FP8 GEMMs: 3 of 3 linear layers, 0 operands halved" in str(state)


@needs
def test_layers_that_do_not_run_there_are_listed():
    model, x = model_and_data()
    model, optimizer = wrapped(model, assignment="size_ordered", ratio=0.5)
    step(model, optimizer, x)
    state = memtrain.precision_state(model)
    groups = {value.name: value.group for value in state.graph.tensors if state.is_low(value.name)}
    assert len(set(groups.values())) == 1  # the middle one
    assert state.gemms == {
        "0 / linear": "high: input, weight", "2 / linear": "", "3 / linear": "high: input, weight",
    }  # fmt: skip
    assert "FP8 GEMMs: 1 of 3 linear layers" in str(state)
    assert "not 0 / linear: high: input, weight" in str(state)


@needs
def test_saturated_operands_are_halved_and_counted():
    model, x = model_and_data(scale=64.0)
    model, optimizer = wrapped(model)
    found = step(model, optimizer, x)
    state = memtrain.precision_state(model)
    assert state.halved > 0
    plain, x = model_and_data(scale=64.0)
    # no number here is so small that halving takes a bit of it
    for a, b in zip(found, step(*wrapped(plain, fp8_gemm=False), x), strict=True):
        assert torch.equal(a, b)


@needs
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_operands_are_counted_once_where_a_part_runs_again(reentrant):
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            if reentrant is None:
                return super().forward(x)
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    model = Checkpointed(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    model, _ = wrapped(model, initial_scale=65536.0)
    x = torch.randn(8, 16)
    x[0, 0] = 40.0  # 30, the largest number
    y = model(x.requires_grad_())
    y.backward(torch.eye(8, 16))  # 65536, of the highest binade
    state = memtrain.precision_state(model)
    assert (state.halved, state.scale.overflows) == (2, 0)


@needs
def test_an_overflow_of_the_gradient_skips_the_step():
    model, x = model_and_data()
    model, optimizer = wrapped(model)
    y = model(x)
    y.backward(torch.full_like(y, 1e9))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert memtrain.precision_state(model).scale.overflows == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@needs
def test_what_is_saved_is_the_same():
    entries = []
    for on in (False, True):
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
        model, optimizer = wrapped(model, fp8_gemm=on)
        step(model, optimizer, torch.randn(64, 64))
        entries.append(memtrain.plan_of(model).entries("activation"))
    for on in entries:
        assert any("Float(" in entry.compressor for entry in on)


@needs
def test_models_in_two_bytes_and_autocast():
    for dtype in (torch.bfloat16, torch.float16):
        model, x = model_and_data()
        model, _ = wrapped(model.to(dtype), high="bf16")
        y = model(x.to(dtype))
        y.sum().backward()
        assert y.dtype == model[0].weight.grad.dtype == dtype
    model, x = model_and_data()
    model, _ = wrapped(model)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(
        p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters()
    )


def test_formats_that_no_such_gemm_takes_are_refused():
    with pytest.raises(ValueError, match=r"fp8_gemm=true with low='1-3-4'.*allowed: 1-4-3 and 1-5"):
        load({"precision": {"low": "1-3-4", "fp8_gemm": True}})
    assert load(["precision=uniform", "precision.fp8_gemm=true"]).precision.fp8_gemm


DRAWN = {"low": "fp8_forward:stochastic", "low_backward": "fp8_backward:stochastic"}


@pytest.mark.parametrize("fields", [{"fp8_gemm": False}, DRAWN, {}], ids=["plain", "drawn", "fp8"])
def test_memtrains_own_recomputation_changes_nothing(fields):
    found = []
    for names in ([], ["1"]):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 32))
        model = nn.Sequential(nn.Linear(32, 32), block, nn.Linear(32, 8))
        precision = {"assignment": "uniform", "promotion": 0.01, "fp8_gemm": WORKS, **fields}
        cfg = {"preset": "precision_only", "precision": precision}
        cfg["activations"] = {"recompute": names}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = memtrain.wrap(model, optimizer, cfg)
        x = torch.randn(64, 32)
        x[:2] *= 50  # promoted
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        state = memtrain.precision_state(model)
        assert state.promotions
        found.append(([p.grad for p in model.parameters()], state.promotions, state.scale.value))
    for a, b in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(a, b)
    assert found[0][1:] == found[1][1:]
