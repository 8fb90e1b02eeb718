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


EYE = torch.eye(32)


def square_matrices(h):
    return h.view(-1, 32, 32) + 4 * EYE


def spd(h):
    m = h.view(-1, 32, 32)
    return m @ m.mT + EYE


def grid(h):
    return torch.tanh(h.view(4, 16, 64, 2))


IMAGES = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(2))
VOLUMES = torch.randn(2, 3, 6, 6, 6, generator=torch.Generator().manual_seed(3))
ATEN = torch.ops.aten
OTHERS = {
    "/": lambda h: h / shifted(h.roll(1, 0)),
    "r/": lambda h: 1.0 / shifted(h),
    "div": lambda h: torch.div(h, shifted(h.roll(1, 0))),
    "divide": lambda h: torch.divide(h, shifted(h.roll(1, 0))),
    "true_divide": lambda h: torch.true_divide(h, shifted(h.roll(1, 0))),
    "Tensor.divide": lambda h: h.divide(shifted(h.roll(1, 0))),
    "div_": lambda h: (h * 1).div_(shifted(h.roll(1, 0))),
    "divide_": lambda h: (h * 1).divide_(shifted(h.roll(1, 0))),
    "aten.div.Tensor": lambda h: ATEN.div.Tensor(h, shifted(h.roll(1, 0))),
    "aten.div": lambda h: ATEN.div(h, shifted(h.roll(1, 0))),
    "aten.amax": lambda h: ATEN.amax(h, [1]),
    "amax of -inf": lambda h: torch.amax(infinite(h), 1),
    "remainder": lambda h: torch.remainder(h, shifted(h.roll(1, 0))),
    "%": lambda h: h % shifted(h.roll(1, 0)),
    "__rmod__": lambda h: shifted(h.roll(1, 0)).__rmod__(h),
    "fmod": lambda h: torch.fmod(h, shifted(h.roll(1, 0))),
    "pow": lambda h: positive(h) ** 1.7,
    "r**": lambda h: 2.0 ** h,
    "float_power": lambda h: torch.float_power(positive(h), -1.7),
    "Tensor.float_power": lambda h: positive(h).float_power(2.5),
    "pow of tensors": lambda h: torch.pow(positive(h), h.roll(1, 0)),
    "xlogy": lambda h: torch.xlogy(h, positive(h.roll(1, 0))),
    "special.xlogy": lambda h: torch.special.xlogy(h, positive(h.roll(1, 0))),
    "special.xlog1py": lambda h: torch.special.xlog1py(h, positive(h.roll(1, 0))),
    "logaddexp": lambda h: torch.logaddexp(30 * h, 30 * h.roll(1, 0)),
    "logaddexp2": lambda h: torch.logaddexp2(30 * h, 30 * h.roll(1, 0)),
    "logaddexp of -inf": lambda h: torch.logaddexp(infinite(h), h.roll(1, 0)),
    "logaddexp2 of -inf": lambda h: torch.logaddexp2(infinite(h), h.roll(1, 0)),
    "hypot": lambda h: torch.hypot(h, h.roll(1, 0)),
    "atan2": lambda h: torch.atan2(h, shifted(h.roll(1, 0))),
    "arctan2": lambda h: torch.arctan2(h, shifted(h.roll(1, 0))),
    "ldexp": lambda h: torch.ldexp(h, h.roll(1, 0)),
    "copysign": lambda h: torch.copysign(h, h.roll(1, 0)),
    "lerp": lambda h: torch.lerp(h, h.roll(1, 0), h.roll(2, 0)),
    "addcdiv": lambda h: torch.addcdiv(h, h.roll(2, 0), shifted(h.roll(1, 0))),
    "grid_sample": lambda h: F.grid_sample(IMAGES, grid(h), align_corners=False),
    "grid_sampler": lambda h: torch.grid_sampler(IMAGES, grid(h), 0, 0, False),
    "grid_sampler_2d": lambda h: torch.grid_sampler_2d(IMAGES, grid(h), 0, 0, False),
    "aten.grid_sampler_2d": lambda h: ATEN.grid_sampler_2d(IMAGES, grid(h), 0, 0, False),
    "grid_sampler_3d": lambda h: torch.grid_sampler_3d(
        VOLUMES, torch.tanh(h.flatten()[:6144].view(2, 8, 16, 8, 3)), 0, 0, False
    ),
    "renorm": lambda h: torch.renorm(h, 2, 0, 3.0),
    "renorm inf": lambda h: torch.renorm(h, math.inf, 1, 0.5),
    "solve": lambda h: torch.linalg.solve(square_matrices(h), EYE),
    "solve_triangular": lambda h: torch.linalg.solve_triangular(
        square_matrices(h).tril(), EYE, upper=False
    ),
    "inv": lambda h: torch.linalg.inv(square_matrices(h)),
    "Tensor.inverse": lambda h: square_matrices(h).inverse(),
    "cholesky": lambda h: torch.linalg.cholesky(spd(h)),
    "Tensor.cholesky": lambda h: spd(h).cholesky(),
    "qr": lambda h: torch.linalg.qr(square_matrices(h)),
    "orgqr": lambda h: torch.orgqr(h.view(-1, 64, 32), h.view(-1, 64)[:4, :32].sigmoid()),
    "householder_product": lambda h: torch.linalg.householder_product(
        h.view(-1, 64, 32), h.view(-1, 64)[:4, :32].sigmoid()
    ),
    "svdvals": lambda h: torch.linalg.svdvals(square_matrices(h)),
    "eigvalsh": lambda h: torch.linalg.eigvalsh(spd(h)),
    "det": lambda h: torch.linalg.det(square_matrices(h) / 4),
    "slogdet": lambda h: torch.linalg.slogdet(square_matrices(h))[1],
    "logdet": lambda h: torch.logdet(spd(h)),
    "pinv": lambda h: torch.linalg.pinv(square_matrices(h)),
    "matrix_exp": lambda h: torch.matrix_exp(square_matrices(h) / 8),
    "cumprod": lambda h: (1 + 0.1 * h).cumprod(1),
    "logcumsumexp": lambda h: torch.logcumsumexp(20 * h, 1),
    "prod": lambda h: (1 + 0.1 * h).prod(1),
    "std": lambda h: h.std(1),
    "norm of few": lambda h: torch.linalg.vector_norm(h, 0.5, dim=1),
    "matrix_norm": lambda h: torch.linalg.matrix_norm(h, "nuc"),
    "logsumexp": lambda h: torch.logsumexp(30 * h, 1),
    "bce": lambda h: F.binary_cross_entropy(h.sigmoid(), torch.full_like(h, 0.3)),
    "ctc": lambda h: F.ctc_loss(
        h.view(64, 4, 32).log_softmax(-1), torch.arange(32).view(4, 8) % 31 + 1,
        torch.full((4,), 64), torch.full((4,), 8),
    ),
    "cdist": lambda h: torch.cdist(h[:32], h[32:]),
    "polygamma": lambda h: torch.polygamma(1, positive(h)),
    "igamma": lambda h: torch.special.gammainc(torch.ones(64, 128), positive(h)),
    "mvlgamma": lambda h: torch.mvlgamma(positive(h) + 2, 2),
    "normalize": lambda h: F.normalize(h, dim=1),
    "aminmax": lambda h: torch.cat(torch.aminmax(h, dim=1)),
    "max": lambda h: h.max() + h.min() + h.median() + h.max(1).values.sum(),
    "maximum": lambda h: torch.maximum(h, h.roll(1, 0)) + torch.fmin(h, h.roll(1, 1)),
    "scatter_reduce": lambda h: h.scatter_reduce(1, h.argsort(1) // 4, h, "amax"),
    "l1_loss": lambda h: F.l1_loss(h, h.roll(1, 0)),
    "lu_factor": lambda h: torch.linalg.lu_factor(square_matrices(h))[0],
    "poisson_nll_loss": lambda h: F.poisson_nll_loss(
        positive(h), torch.ones_like(h), log_input=False
    ),
    "complex abs": lambda h: torch.view_as_complex(h.view(64, 64, 2)).abs(),
    "complex angle": lambda h: torch.view_as_complex(h.view(64, 64, 2)).angle(),
}  # fmt: skip


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
