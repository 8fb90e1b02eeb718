"""Activation functions of the few-bit tables, with their derivatives, in float64."""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Function = Callable[[Array], Array]
Interval = tuple[float, float]


class Curve(NamedTuple):
    """The derivative of a function, elementwise on float64 arrays.

    `breaks` are the points where `slope` jumps or bends; the solver's grid contains them.
    """

    slope: Function
    breaks: tuple[float, ...] = ()


class Family(NamedTuple):
    """An activation with its parameters, in the order of the torch function's arguments.

    `defaults` are torch's; None marks a required parameter. `valid` checks the parameters, and
    `allowed` describes valid ones in error messages. A table's error is integrated over `interval`.
    """

    curve: Callable[..., Curve]
    defaults: Mapping[str, float | None] = {}
    valid: Callable[..., bool] = lambda *_: True
    allowed: str = "finite numbers"
    interval: Callable[..., Interval] = lambda *_: (-10.0, 10.0)


_erf = np.frompyfunc(math.erf, 1, 1)

_SELU_SCALE, _SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
_TANH_SCALE, _TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715


def _cdf(x: Array) -> Array:
    return 0.5 * (1.0 + np.asarray(_erf(x / math.sqrt(2)), np.float64))


def _normal_pdf(x: Array) -> Array:
    return np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _sigmoid(x: Array) -> Array:
    return 0.5 + 0.5 * np.tanh(0.5 * x)  # tanh never overflows


def _swish(beta: float) -> Curve:
    def slope(x: Array) -> Array:
        s = _sigmoid(beta * x)
        return s + beta * x * s * (1 - s)

    return Curve(slope)


def _gelu_tanh_slope(x: Array) -> Array:
    t = np.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _TANH_SCALE * (1 + 3 * _TANH_CUBIC * x * x)


def _mish_slope(x: Array) -> Array:
    t = np.tanh(np.logaddexp(0.0, x))
    return t + x * (1 - t * t) * _sigmoid(x)


def _elu(scale: float, alpha: float, stretch: float = 1.0) -> Curve:
    """Return the curve of scale * x above 0, scale * alpha * (exp(x / stretch) - 1) below."""
    return Curve(
        lambda x: np.where(
            x > 0, scale, scale * alpha * np.exp(np.minimum(x, 0.0) / stretch) / stretch
        ),
        (0.0,),
    )


def _softplus(beta: float, threshold: float) -> Curve:
    switch = threshold / beta  # torch returns x itself above it

    return Curve(lambda x: np.where(x > switch, 1.0, _sigmoid(beta * x)), (switch,))


def _hardswish_slope(x: Array) -> Array:
    return np.where(x <= -3, 0.0, np.where(x >= 3, 1.0, x / 3 + 0.5))


def _broken(breaks: tuple[float, ...], *slopes: float) -> Curve:
    """Return the curve of a piecewise-linear function: `slopes[i]` up to and at `breaks[i]`."""
    edges = np.array(breaks)

    def slope(x: Array) -> Array:
        return np.array(slopes)[np.searchsorted(edges, x, side="left")]

    return Curve(slope, breaks)


def _ramp(low: float, high: float) -> Curve:
    return _broken((low, high), 0.0, 1.0, 0.0)


def _shrink(lambd: float) -> Curve:
    return _broken((-lambd, lambd), 1.0, 0.0, 1.0) if lambd > 0 else _broken((), 1.0)


def _leaky(slope: float) -> Curve:
    return _broken((0.0,), slope, 1.0)


def _around(*points: float) -> Interval:
    """Return the default interval, extended by the largest magnitude of the points."""
    reach = 10.0 + max(map(abs, points))
    return -reach, reach


# Names of `torch.nn.functional`; `gelu_tanh` is gelu(approximate="tanh"), `quick_gelu` is
# x * sigmoid(1.702 x).
FAMILIES: dict[str, Family] = {
    "gelu": Family(lambda: Curve(lambda x: _cdf(x) + x * _normal_pdf(x))),
    "gelu_tanh": Family(lambda: Curve(_gelu_tanh_slope)),
    "quick_gelu": Family(lambda: _swish(1.702)),
    "silu": Family(lambda: _swish(1.0)),
    "relu": Family(lambda: _leaky(0.0)),
    "sigmoid": Family(lambda: Curve(lambda x: _sigmoid(x) * _sigmoid(-x))),
    "tanh": Family(lambda: Curve(lambda x: 1 - np.tanh(x) ** 2)),
    "softplus": Family(
        _softplus,
        {"beta": 1.0, "threshold": 20.0},
        lambda beta, _: beta > 0,
        "beta > 0",
        lambda beta, _: (-10 / beta, 10 / beta),
    ),
    "softsign": Family(lambda: Curve(lambda x: (1 + np.abs(x)) ** -2.0)),
    "mish": Family(lambda: Curve(_mish_slope)),
    "elu": Family(
        lambda alpha: _elu(1.0, alpha),
        {"alpha": 1.0},
        interval=lambda alpha: _around(math.log(max(1.0, abs(alpha)))),
    ),
    "celu": Family(
        lambda alpha: _elu(1.0, alpha, alpha),
        {"alpha": 1.0},
        lambda alpha: alpha > 0,
        "alpha > 0",
        lambda alpha: (-10 * alpha, 10 * alpha),
    ),
    "selu": Family(lambda: _elu(_SELU_SCALE, _SELU_ALPHA)),
    "hardswish": Family(lambda: Curve(_hardswish_slope, (-3.0, 3.0))),
    "logsigmoid": Family(lambda: Curve(lambda x: _sigmoid(-x))),
    "tanhshrink": Family(lambda: Curve(lambda x: np.tanh(x) ** 2)),
    "leaky_relu": Family(_leaky, {"negative_slope": 0.01}),
    "relu6": Family(lambda: _ramp(0.0, 6.0)),
    "hardtanh": Family(
        _ramp,
        {"min_val": -1.0, "max_val": 1.0},
        lambda low, high: low <= high,
        "min_val <= max_val",
        _around,
    ),
    "hardsigmoid": Family(lambda: _broken((-3.0, 3.0), 0.0, 1 / 6, 0.0)),
    "hardshrink": Family(_shrink, {"lambd": 0.5}, interval=_around),
    "softshrink": Family(
        _shrink, {"lambd": 0.5}, lambda lambd: lambd >= 0, "lambd >= 0", interval=_around
    ),
    "threshold": Family(
        lambda threshold, _: _broken((threshold,), 0.0, 1.0),
        {"threshold": None, "value": None},
        interval=lambda threshold, _: _around(threshold),
    ),
}


def complete(function: str, parameters: Sequence[float] = ()) -> tuple[float, ...]:
    """Complete the parameters of a function with torch's defaults, and check them.

    Example:
        >>> complete("softplus", (2.0,)), complete("gelu")
        ((2.0, 20.0), ())
    """
    check_name(function, FAMILIES)
    family = FAMILIES[function]
    names = list(family.defaults)
    wanted = f"function {function!r} takes {', '.join(names) or 'no parameters'}"
    for value in parameters:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"parameter {value!r} is a {type(value).__name__}; allowed: numbers")
    rest = list(family.defaults.values())[len(parameters) :]
    if len(parameters) > len(names) or None in rest:
        raise ValueError(f"parameters {tuple(parameters)} do not fit: {wanted}")
    # Adding 0 turns -0 into 0: equal parameters give equal tables.
    full = (*(float(v) + 0.0 for v in parameters), *(v for v in rest if v is not None))
    if not (all(map(math.isfinite, full)) and family.valid(*full)):
        raise ValueError(f"parameters {full} are out of range: {wanted}; allowed: {family.allowed}")
    return full


def check_name(function: str, names: Sequence[str] | Mapping[str, object]) -> None:
    """Raise ValueError with the nearest name if `function` is not in `names`."""
    if function not in names:
        near = difflib.get_close_matches(str(function), list(names), 1, 0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"function {function!r} is unknown; {hint}allowed: {', '.join(names)}")


def curve(function: str, parameters: Sequence[float] = ()) -> Curve:
    """Return the function with its parameters set."""
    full = complete(function, parameters)  # checks the name
    return FAMILIES[function].curve(*full)


# Functions with defaults for all parameters.
CURVES: dict[str, Curve] = {
    name: curve(name) for name, family in FAMILIES.items() if None not in family.defaults.values()
}
