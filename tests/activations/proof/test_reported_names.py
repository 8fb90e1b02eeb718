"""Wrong gradients that were once reported, continued: names on no list, numbers that are none."""

import math
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.activations.proof.comparison import flat, parameter_gradients
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

# 4. each name of an op is the op


def unit(h):  # in (-0.95, 0.95)
    return 0.95 * torch.tanh(h)


def positive(h):
    return h.square() + 0.01


def real(h):
    return 3 * h


def above_one(h):
    return 1.05 + h.square()


UNARY = {
    real: """exp exp2 expm1 sin cos sinh cosh tanh asinh atan erf erfc erfcx sigmoid expit square
    abs
    sgn i0 i0e i1 i1e ndtr log_ndtr sinc relu gelu silu mish softplus hardswish hardsigmoid elu selu
    logsigmoid log_sigmoid leaky_relu relu6 softsign tanhshrink hardtanh celu arctan arcsinh
    absolute     positive neg""",
    positive: """log log2 log10 log1p sqrt rsqrt reciprocal lgamma gammaln digamma psi entr""",
    unit: "tan asin acos atanh erfinv arcsin arccos arctanh",
    lambda h: 0.5 + 0.45 * torch.tanh(h): "logit ndtri",
    above_one: "acosh arccosh",
}
SPACES = (torch, torch.Tensor, torch.special, F, torch._C._nn, torch._C._special)


def spellings(name):
    """All ways in which torch lets the op be called, by `namespace.name`."""
    ways = {}
    for space in SPACES:
        for own in (name, f"special_{name}"):
            if callable(function := getattr(space, own, None)):
                ways[f"{getattr(space, '__name__', space)}.{own}"] = function
    for own in (name, f"special_{name}"):
        for overload in ("default", ""):
            packet = getattr(torch.ops.aten, own, None)
            if packet is not None and (not overload or overload in packet.overloads()):
                ways[f"aten.{own}.{overload}"] = getattr(packet, overload) if overload else packet
    return ways


def unary_cases():
    for domain, names in UNARY.items():
        for name in names.split():
            for spelling, function in spellings(name).items():
                yield pytest.param(domain, function, id=spelling)


NONLINEAR = re.findall(
    r"\S+",
    """gelu silu mish softplus hardswish hardsigmoid elu selu logsigmoid log_sigmoid softsign
    tanhshrink celu sigmoid expit tanh""",
)
"""With a code of f', which is no draw: for these the guide's cosine is the bound."""


@pytest.mark.parametrize(("domain", "function"), list(unary_cases()))
def test_an_op_by_any_name_is_exact_or_right_on_average(domain, function, request):
    torch.manual_seed(0)
    name = request.node.callspec.id.removesuffix(".default").rstrip(".").split(".")[-1]
    model = After(lambda h: function(domain(h)))
    if name.removeprefix("special_") in NONLINEAR:
        assert_promised(found(model, inputs()))
    else:
        assert_sound(model, inputs())


def shifted(h):
    return h.sign() * (h.abs() + 0.3)


def infinite(h):
    return torch.where(h > 0.5, -math.inf, h)


def square_matrices(h):
    return h.view(-1, 32, 32) + 4 * torch.eye(32)


def grid(h):
    return torch.tanh(h.view(4, 16, 64, 2))


IMAGES = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(2))
ATEN = torch.ops.aten
OTHERS = {
    "/": lambda h: h / shifted(h.roll(1, 0)),
    "r/": lambda h: 1.0 / shifted(h),
    "divide_": lambda h: (h * 1).divide_(shifted(h.roll(1, 0))),
    "aten.div.Tensor": lambda h: ATEN.div.Tensor(h, shifted(h.roll(1, 0))),
    "aten.div": lambda h: ATEN.div(h, shifted(h.roll(1, 0))),
    "aten.amax": lambda h: ATEN.amax(h, [1]),
    "amax of -inf": lambda h: torch.amax(infinite(h), 1),
    "%": lambda h: h % shifted(h.roll(1, 0)),
    "__rmod__": lambda h: shifted(h.roll(1, 0)).__rmod__(h),
    "r**": lambda h: 2.0**h,
    "pow of tensors": lambda h: torch.pow(positive(h), h.roll(1, 0)),
    "logaddexp of -inf": lambda h: torch.logaddexp(infinite(h), h.roll(1, 0)),
    "logaddexp2 of -inf": lambda h: torch.logaddexp2(infinite(h), h.roll(1, 0)),
    "grid_sampler": lambda h: torch.grid_sampler(IMAGES, grid(h), 0, 0, False),
    "aten.grid_sampler_2d": lambda h: ATEN.grid_sampler_2d(IMAGES, grid(h), 0, 0, False),
    "renorm inf": lambda h: torch.renorm(h, math.inf, 1, 0.5),
    "Tensor.inverse": lambda h: square_matrices(h).inverse(),
    "orgqr": lambda h: torch.orgqr(h.view(-1, 64, 32), h.view(-1, 64)[:4, :32].sigmoid()),
    "norm of few": lambda h: torch.linalg.vector_norm(h, 0.5, dim=1),
    "nuclear norm": lambda h: torch.linalg.matrix_norm(h, "nuc"),
    "igamma": lambda h: torch.special.gammainc(torch.ones(64, 128), positive(h)),
    "aminmax": lambda h: torch.cat(torch.aminmax(h, dim=1)),
    "max": lambda h: h.max() + h.min() + h.median() + h.max(1).values.sum(),
    "complex abs": lambda h: torch.view_as_complex(h.view(64, 64, 2)).abs(),
    "lp_pool1d": lambda h: F.lp_pool1d(h, 3.0, 4, 2),
    "lp_pool2d": lambda h: F.lp_pool2d(h.view(4, 8, 16, 16), 2.0, 2),
    "lp_pool3d": lambda h: F.lp_pool3d(h.view(1, 8, 4, 16, 16), 2.0, 2),
}
"""What torch's own database, of `test_op_database.py`, has not, or not with such numbers."""


@pytest.mark.parametrize("name", OTHERS)
def test_an_op_on_no_list_is_exact_or_right_on_average(name):
    torch.manual_seed(0)
    assert_sound(After(OTHERS[name]), inputs())


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch, at deepcopy
def test_an_exported_module_is_as_good_as_the_module():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 8)), inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its internals
        exported = torch.export.export(model, (x,)).module()
    no_noisier(exported, model, x)


@pytest.mark.parametrize("op", ["sin", "cos"])
def test_a_laplacian_of_waves_is_exact_or_right_on_average(op):
    """The gradient of a gradient, of inputs that span tens of radians."""
    torch.manual_seed(0)

    class Laplacian(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(2, 128), nn.Linear(128, 1)
            with torch.no_grad():
                self.first.weight.mul_(30)

        def forward(self, x):
            x = x[:, :2].clone().requires_grad_()
            y = self.last(getattr(torch, op)(self.first(x)))
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            columns = [
                torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i]
                for i in range(2)
            ]
            return torch.stack(columns)

    assert_sound(Laplacian(), inputs(512))


# 5. a number that is none stays where it is

SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "-1e9": -1e9, "1e30": 1e30}


def spoiled(h, value, rows=slice(3, 5)):
    """Two rows of h are such numbers, as constants: no gradient goes there."""
    mask = torch.zeros(64, 1, dtype=torch.bool)
    mask[rows] = True
    return h.masked_fill(mask, value), mask


def dropped(y, mask):
    return torch.where(mask, 0.0, y)


READERS = {
    "softmax": lambda h: F.softmax(h, 1),
    "log_softmax": lambda h: F.log_softmax(h, 1),
    "logsumexp": lambda h: h.logsumexp(1, keepdim=True),
    "mul": lambda h: h * h.roll(7, 1),
    "exp": torch.exp,
    "linear": lambda h: F.linear(h, torch.ones(8, 128)),
    "matmul": lambda h: h @ torch.ones(128, 8),
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": F.relu,
    "layer_norm": lambda h: F.layer_norm(h, (128,)),
    "rms_norm": lambda h: F.rms_norm(h, (128,)),
    "square": torch.square,
    "nan_to_num": lambda h: h.nan_to_num(),
    "nansum": lambda h: h.nansum(1, keepdim=True),
    "nanmean": lambda h: h.nanmean(1, keepdim=True),
    "where": lambda h: torch.where(h.isfinite(), h * h, 0.0),
    "dropout": lambda h: F.dropout(h, 0.2),
}


@pytest.mark.each_value
@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("name", READERS)
def test_a_number_that_is_none_leaves_its_neighbours_alone(name, value):
    """No gradient is NaN that was a number, and the noise of the others is what it is without."""
    reader, number = READERS[name], SPECIAL[value]
    weight = nn.Parameter(torch.linspace(-1, 1, 128))
    errors = []
    for each in (number, 0.5):
        torch.manual_seed(0)

        def body(h, each=each):
            h, mask = spoiled(h * weight, each)
            return dropped(reader(h), mask)

        model, x = After(body), inputs()
        baseline = flat(parameter_gradients(model, x).grads)
        draws = torch.stack(draws_of(of_parts(model), x))
        finite = baseline.isfinite()
        assert draws[:, finite].isfinite().all()
        noise = (draws - baseline)[:, finite].norm(dim=1)
        errors.append((noise.mean(), noise.std() / DRAWS**0.5, baseline[finite].norm()))
    (a, sa, na), (b, sb, _) = errors
    assert a <= 1.5 * b + 5 * (sa**2 + sb**2) ** 0.5 + 1e-5 * na, (float(a / na), float(b / na))


def test_rows_that_are_masked_altogether_cost_no_gradient():
    """Their softmax is NaN, and what follows takes it out."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.values = nn.Linear(128, 128), nn.Linear(128, 128)

        def forward(self, x):
            pad = torch.zeros(64, dtype=torch.bool)
            pad[40:] = True
            h = self.first(x)
            scores = (h @ h.mT / 12).masked_fill(pad.unsqueeze(1) | pad, -math.inf)
            return torch.where(pad.unsqueeze(1), 0.0, scores.softmax(1)) @ self.values(x)

    torch.manual_seed(0)
    model, x = Masked(), inputs()
    baseline = flat(parameter_gradients(model, x).grads)
    draws = torch.stack(draws_of(of_parts(model), x))
    assert draws[:, baseline.isfinite()].isfinite().all()
