import numpy as np
import pytest
import torch
import torch.nn.functional as F

from memtrain.compressors.fewbit.functions import FAMILIES, complete, curve
from memtrain.compressors.fewbit.solver import table
from memtrain.compressors.fewbit.step_function import EXACT

CALLS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
# Parameters besides the defaults.
PARAMETERS = {
    "elu": [(5.0,), (0.3,), (-1.0,)],
    "celu": [(5.0,), (0.25,)],
    "leaky_relu": [(0.2,), (-0.5,), (0.0,)],
    "softplus": [(10.0, 20.0), (0.5, 20.0), (2.0, 3.0)],
    "hardtanh": [(-2.0, 3.0), (0.0, 1.0), (-1.0, 0.0), (0.1, 0.3), (1.0, 1.0)],
    "hardshrink": [(0.0,), (1.5,), (-1.0,), (0.1,)],
    "softshrink": [(0.0,), (1.5,), (0.1,)],
    "threshold": [(0.0, 0.0), (0.1, 20.0), (-2.0, 1.0)],
}
CASES = [
    (function, parameters)
    for function, family in FAMILIES.items()
    for parameters in [
        *([()] if None not in family.defaults.values() else []),
        *PARAMETERS.get(function, []),
    ]
]
every_case = pytest.mark.parametrize(("function", "parameters"), CASES, ids=str)


def call(function, parameters, x):
    return CALLS.get(function, getattr(F, function, None))(x, *parameters)


def slopes(function, parameters, x):
    x = x.clone().requires_grad_()
    call(function, parameters, x).sum().backward()
    return x.grad


@every_case
def test_curves_equal_torch_and_its_autograd(function, parameters):
    x = torch.linspace(-8.03, 8.05, 401, dtype=torch.float64)
    made = curve(function, parameters)
    # torch's hardsigmoid multiplies by the float32 nearest to 1 / 6 in float64 too
    rtol = 2**-24 if function == "hardsigmoid" else 1e-11
    expected = slopes(function, parameters, x).numpy()
    assert np.allclose(made.slope(x.numpy()), expected, rtol=rtol, atol=1e-13)


def neighbours(points, dtype):
    """The points, the floats next to them, zeros, subnormals and the largest numbers."""
    tiny = torch.finfo(dtype).tiny
    breaks = torch.tensor([*points, 0.0, 1.0, -1.0, 100.0, -100.0], dtype=torch.float64).to(dtype)
    same = {torch.float32: torch.int32}.get(dtype, torch.int16)
    bits = torch.cat([breaks[breaks != 0], torch.tensor([tiny, -tiny], dtype=dtype)]).view(same)
    return torch.cat(
        [
            *((bits + step).view(dtype) for step in range(-3, 4)),
            torch.tensor([0.0, -0.0, tiny / 4, -tiny / 4, 3e4, -3e4], dtype=dtype),
            torch.randn(200).to(dtype) * 4,
        ]
    )


EXACT_CASES = [case for case in CASES if case[0] in EXACT]


@pytest.mark.parametrize(("function", "parameters"), EXACT_CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_exact_tables_are_torchs_autograd_at_every_float(function, parameters, dtype):
    rounded = parameters
    if function in ("hardshrink", "softshrink"):
        # As torch rounds lambd to the dtype.
        rounded = tuple(torch.tensor(parameters, dtype=dtype).tolist())
    for bits in (1, 3):
        step = table(function, bits, rounded)
        assert (len(step.levels), step.error) == (2, 0.0)
    x = neighbours(curve(function, parameters).breaks, dtype)
    if 0.0 in parameters[-1:] and function in ("hardtanh", "hardshrink", "softshrink"):
        # Points at 0 are exact for all numbers but subnormals.
        x = x[(x == 0) | (x.abs() >= torch.finfo(torch.float32).tiny)]
    level = torch.from_numpy(step(x.double().numpy())).float()
    # A product with 1 is exact, so the gradient is the level, rounded once.
    assert torch.equal(level.to(dtype), slopes(function, parameters, x))


def test_defaults_are_torchs():
    x = torch.linspace(-4, 4, 101)
    for function, family in FAMILIES.items():
        if family.defaults and None not in family.defaults.values():
            assert torch.equal(call(function, (), x), call(function, complete(function), x))
            assert table(function, 2) == table(function, 2, complete(function))


def test_tables_scale_with_their_parameters():
    unit, wide, narrow = table("celu", 3), table("celu", 3, (5.0,)), table("softplus", 3, (10.0,))
    assert np.allclose(np.array(wide.boundaries) / 5, unit.boundaries, rtol=0, atol=1e-6)
    assert np.allclose(wide.levels, unit.levels, rtol=0, atol=1e-6)
    assert wide.error == pytest.approx(5 * unit.error, rel=1e-6)
    plain = table("softplus", 3)
    assert np.allclose(np.array(narrow.boundaries) * 10, plain.boundaries, rtol=0, atol=1e-6)
    assert narrow.error == pytest.approx(plain.error / 10, rel=1e-6)


def test_elus_jump_and_softplus_switch_are_boundaries():
    assert 0.0 in table("elu", 2, (5.0,)).boundaries
    assert 0.5 in table("softplus", 2, (2.0, 1.0)).boundaries


@pytest.mark.parametrize(
    ("function", "parameters", "word"),
    [
        ("gelo", (), "did you mean 'gelu'"),
        ("gelu", (1.0,), "no parameters"),
        ("threshold", (), "threshold, value"),
        ("threshold", (1.0,), "threshold, value"),
        ("elu", (1.0, 2.0), "alpha"),
        ("elu", (float("nan"),), "nan"),
        ("celu", (0.0,), "alpha > 0"),
        ("softplus", (-1.0,), "beta > 0"),
        ("hardtanh", (1.0, -1.0), "min_val <= max_val"),
        ("softshrink", (-0.5,), "lambd >= 0"),
    ],
)
def test_wrong_parameters_are_named(function, parameters, word):
    with pytest.raises(ValueError, match=word):
        complete(function, parameters)


@pytest.mark.parametrize("value", ["1", True, None])
def test_a_parameter_that_is_no_number_is_a_type_error(value):
    with pytest.raises(TypeError, match=repr(value)):
        complete("elu", (value,))
