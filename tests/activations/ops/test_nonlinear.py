import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memtrain.activations.intercept.replaced_ops import REPLACED, recogniser
from memtrain.activations.ops import nonlinear
from memtrain.activations.ops.nonlinear import NAMES, recognise_registered
from memtrain.compressors import DerivativeCode, Group, Keep, Key
from memtrain.compressors.fewbit.register import Registered, register
from memtrain.compressors.fewbit.step_function import EXACT
from memtrain.kernels.dispatch import backend, has_triton
from tests.activations.intercept.intercepted import intercept
from tests.activations.replaced import recognise

CODE, KEY = DerivativeCode(bits=4), Key(seed=1)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

# op, the call, parameters
CALLS = {
    "relu": F.relu,
    "relu_torch": torch.relu,
    "relu_method": lambda x: x.relu(),
    "relu6": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": lambda x: F.elu(x, alpha=1.5),
    "celu": lambda x: F.celu(x, 0.5),
    "selu": F.selu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "sigmoid_method": lambda x: x.sigmoid(),
    "logsigmoid": F.logsigmoid,
    "tanh": torch.tanh,
    "tanhshrink": F.tanhshrink,
    "softplus": lambda x: F.softplus(x, 2.0, threshold=3),
    "softsign": F.softsign,
    "hardtanh": lambda x: F.hardtanh(x, -0.7, max_val=0.3),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardshrink": lambda x: F.hardshrink(x, 0.3),
    "softshrink": lambda x: F.softshrink(x, 0.3),
    "threshold": lambda x: F.threshold(x, 0.1, -2.0),
    "clamp": lambda x: torch.clamp(x, -0.7, 0.3),
    "clamp_keyword": lambda x: x.clamp(max=0.3),
    "clip": lambda x: torch.clip(x, min=0.1),
    "clamp_min": lambda x: x.clamp_min(0),
    "clamp_max": lambda x: torch.clamp_max(x, 0.3),
}
IN_PLACE = {
    "relu": lambda x: F.relu(x, inplace=True),
    "relu_method": lambda x: x.relu_(),
    "relu6": lambda x: F.relu6(x, inplace=True),
    "leaky_relu": lambda x: F.leaky_relu_(x, 0.2),
    "elu": lambda x: F.elu(x, 1.5, inplace=True),
    "celu": lambda x: torch.celu_(x, 0.5),
    "selu": lambda x: F.selu(x, inplace=True),
    "silu": lambda x: F.silu(x, inplace=True),
    "mish": lambda x: F.mish(x, inplace=True),
    "sigmoid": lambda x: x.sigmoid_(),
    "tanh": torch.tanh_,
    "hardtanh": lambda x: F.hardtanh_(x, -0.7, 0.3),
    "hardsigmoid": lambda x: F.hardsigmoid(x, inplace=True),
    "hardswish": lambda x: F.hardswish(x, inplace=True),
    "threshold": lambda x: F.threshold_(x, 0.1, -2.0),
    "clamp": lambda x: x.clamp_(-0.7, 0.3),
    "clip": lambda x: torch.clip_(x, min=0.1),
    "clamp_min": lambda x: x.clamp_min_(0),
}


class _Seen(torch.overrides.TorchFunctionMode):
    """Runs every call that is recognised in its replaced form."""

    def __init__(self, code=CODE):
        super().__init__()
        self.code, self.calls = code, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        known = REPLACED.get(func)
        call = None if known is None else known[0](known[1], args, kwargs or {})
        if isinstance(func, Registered):
            call = recognise_registered(func, args)
        if call is None or not call.x.requires_grad:
            return func(*args, **(kwargs or {}))
        self.calls.append(call)
        return call.run(self.code, KEY)


def samples(dtype):
    """Numbers on both sides of every non-differentiable point, and the points."""
    points = torch.tensor([0.0, -0.0, 0.1, -0.3, 0.3, -0.7, 3.0, -3.0, 6.0, 1.5])
    return torch.cat([torch.linspace(-8, 8, 501), points]).to(dtype)


def replaced(call, x, grad):
    """Value, gradient and the codes that serve, of `call` on a copy of `x`."""
    leaf = x.clone().requires_grad_()
    with mock.patch.object(nonlinear, "fewbit", wraps=nonlinear.fewbit) as fewbit, _Seen():
        y = call(leaf * 1)
    (dx,) = torch.autograd.grad(y, leaf, grad)
    return y.detach(), dx, [run.args[1] for run in fewbit.call_args_list]


def check(call, x):
    grad = torch.randn(x.shape).to(x.dtype)
    value, dx, codes = replaced(call, x, grad)
    assert len(codes) == 1
    twin = x.clone().requires_grad_()
    expected = call(twin * 1)
    assert torch.equal(value, expected)
    function, parameters = codes[0].function, codes[0].parameters
    if function in EXACT:
        exact = torch.autograd.grad(expected, twin, grad)[0]
        # A point that float32 does not represent is elsewhere in float64.
        sure = torch.ones_like(x, dtype=torch.bool)
        if x.dtype == torch.float64:
            for point in parameters:
                sure &= (x.abs() - abs(point)).abs() > 2**-22 * abs(point)
        assert torch.equal(dx[sure], exact[sure])
    step = DerivativeCode(bits=4, function=function, parameters=parameters).table()
    level = torch.from_numpy(np.asarray(step(x.float().double().numpy())))
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    assert torch.equal(dx, (grad.to(wide) * level.to(wide)).to(x.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_functions_give_torchs_value_and_the_tables_gradient(name, dtype):
    check(CALLS[name], samples(dtype))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_forms_do_too(name, dtype):
    check(IN_PLACE[name], samples(dtype))


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_forms_write_to_their_argument_and_count_its_version(name):
    leaf = torch.randn(50, requires_grad=True)
    x = leaf * 1
    version = x._version
    with _Seen():
        y = IN_PLACE[name](x)
    assert y is x
    assert x._version > version
    with _Seen(), pytest.raises(RuntimeError, match="leaf Variable"):
        IN_PLACE[name](leaf)


def test_calls_without_a_table_are_left_alone():
    x = torch.randn(4)
    bound = torch.zeros(4)
    assert recognise("clamp", (x, bound), {}) is None
    assert recognise("clamp", (x, 1.0, -1.0), {}) is None
    assert recognise("clamp", (x,), {}) is None
    assert recognise("sigmoid", (x,), {"out": bound}) is None
    assert recognise("threshold", (x, float("inf"), 0.0), {}) is None
    assert recognise("softplus", (x, -1.0), {}) is None
    assert recognise("relu", (torch.ones(3, dtype=torch.int64),), {}) is None
    assert recognise("relu", (), {}) is None
    for others in ((1.0, 2.0, 3.0), (1.0, 2.0)):  # scales: torch._C._nn.elu
        assert recognise("elu", (x, *others), {}) is None
    assert recognise("add", (x, x), {}) is None


def test_every_name_is_tested():
    tested = {name.split("_torch")[0] for name in CALLS}
    assert set(NAMES) - {"log_sigmoid", "swish", "expit"} <= tested


@pytest.mark.parametrize(
    "name",
    ["NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation", "QuickGELUActivation"],
)
def test_hugging_face_modules(name):
    activations = pytest.importorskip("transformers.activations")
    module = getattr(activations, name)()
    x = torch.linspace(-4, 4, 301, requires_grad=True)
    plain = module(x.double())
    ours = recogniser(type(module))(module, x).run(CODE, KEY)
    assert ((ours - plain).abs() <= 4 * 2**-23 * x.abs().clamp_min(1)).all()


class QuickGELUActivation(nn.Module):
    """The name of a known class, with other mathematics."""

    def forward(self, x):
        return x * torch.sigmoid(3 * x)


class OtherConstant(nn.Module):
    """The source of a known class, with another constant."""

    precomputed_constant = 0.5

    def forward(self, input):
        return (
            0.5
            * input
            * (1 + torch.tanh(self.precomputed_constant * (input + 0.044715 * torch.pow(input, 3))))
        )


def test_a_name_makes_no_module_a_known_one():
    x = torch.linspace(-4, 4, 301, requires_grad=True)
    assert nonlinear.op_of(QuickGELUActivation) is None
    assert nonlinear.op_of(nn.GELU) is None  # the mode sees the call
    assert recogniser(OtherConstant)(OtherConstant(), x) is None


class NewGELUActivation(nn.Module):
    """As GPT-2 writes it out."""

    def forward(self, input):
        inner = math.sqrt(2.0 / math.pi) * (input + 0.044715 * torch.pow(input, 3.0))
        return 0.5 * input * (1.0 + torch.tanh(inner))


class _Widened(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.first, self.act = nn.Linear(64, 64), act

    def forward(self, x):
        h = self.first(x)
        z, y = h * h.sin(), self.act(h)
        with torch.autocast("cpu", enabled=False):  # a product's factors have one dtype
            return y, z, y @ y.t().detach()


@pytest.fixture
def as_on_cuda():
    """Autocast of the CPU runs softplus and pow in float32, as that of CUDA does."""
    within = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def widened(op):
        def run(x, *others):
            with torch._C._ExcludeDispatchKeyGuard(within):
                return op(x.float() if x.dtype in (torch.float16, torch.bfloat16) else x, *others)

        return run

    library = torch.library.Library("aten", "IMPL")
    for name, op in [
        ("softplus", torch.ops.aten.softplus.default),
        ("pow.Tensor_Scalar", torch.ops.aten.pow.Tensor_Scalar),
    ]:
        library.impl(name, widened(op), "AutocastCPU")
    yield
    library._destroy()


ACTS = {
    "function": (F.softplus, "softplus"),
    "module": (NewGELUActivation(), "gelu_tanh"),
    "own": (register(lambda x: torch.pow(x, 1.0).tanh(), "test_own_wide"), "test_own_wide"),
}


@pytest.mark.parametrize("compressor", [CODE, Group(bits=8)], ids=["replaced", "hooked"])
@pytest.mark.parametrize("name", ACTS)
def test_what_autocast_runs_in_float32_stays_so(as_on_cuda, name, compressor):
    act, op = ACTS[name]
    model, x = _Widened(act), torch.randn(128, 64)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            y, *others = model(x)
        return y, torch.autograd.grad(y.sum() + sum(o.sum() for o in others), model.first.weight)[0]

    exact, gradient = run()
    intercept(
        model,
        lambda site: compressor if site.op == op or compressor != CODE else Keep("another op"),
    )
    ours = [run() for _ in range(3)]  # the first forward records, the second reuses
    for y, found in ours:
        assert y.dtype == exact.dtype == torch.float32
        torch.testing.assert_close(y, exact)
        assert (found - gradient).norm() <= 0.15 * gradient.norm()


@pytest.mark.skipif(not has_triton(), reason="no triton")
def test_every_backend_gives_autocasts_dtype(as_on_cuda):
    x = torch.randn(8, 256).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        exact = F.softplus(x)
        for name in ("reference", "cpu", "triton"):
            with backend(name):
                y = recognise("softplus", (x,), {}).run(CODE, KEY)
            assert y.dtype == exact.dtype == torch.float32


def test_a_registered_function_is_seen():
    own = register(lambda x: x * torch.sigmoid(x), "test_own_swish", bits=3)
    x = torch.linspace(-3, 3, 100, requires_grad=True)
    with _Seen() as seen:
        y = own(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert [call.op for call in seen.calls] == ["test_own_swish"]
    assert torch.equal(y, x * torch.sigmoid(x))
    level = own.table(4)(x.detach().double().numpy())
    assert torch.equal(dx, torch.from_numpy(level).float())
