"""The activation functions that the few-bit solver knows, with their derivatives, in float64."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Function = Callable[[Array], Array]


class Curve(NamedTuple):
    """A function and its derivative, both elementwise on float64 arrays."""

    value: Function
    slope: Function


_erf = np.frompyfunc(math.erf, 1, 1)

_SELU_SCALE, _SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
_TANH_SCALE, _TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715


def _cdf(x: Array) -> Array:
    return 0.5 * (1.0 + np.asarray(_erf(x / math.sqrt(2)), np.float64))


def normal_pdf(x: Array) -> Array:
    """The standard normal density.

    Example:
        >>> round(float(normal_pdf(np.zeros(1))[0]), 6)
        0.398942
    """
    return np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _sigmoid(x: Array) -> Array:
    # tanh never overflows
    return 0.5 + 0.5 * np.tanh(0.5 * x)


def _softplus(x: Array) -> Array:
    return np.logaddexp(0.0, x)


def _swish(beta: float) -> Curve:
    def slope(x: Array) -> Array:
        s = _sigmoid(beta * x)
        return s + beta * x * s * (1 - s)

    return Curve(lambda x: x * _sigmoid(beta * x), slope)


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x**3)))


def _gelu_tanh_slope(x: Array) -> Array:
    t = np.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _TANH_SCALE * (1 + 3 * _TANH_CUBIC * x * x)


def _mish_slope(x: Array) -> Array:
    t = np.tanh(_softplus(x))
    return t + x * (1 - t * t) * _sigmoid(x)


def _elu(scale: float, alpha: float) -> Curve:
    def negative(x: Array) -> Array:
        return scale * alpha * np.expm1(np.minimum(x, 0.0))

    return Curve(
        lambda x: np.where(x > 0, scale * x, negative(x)),
        lambda x: np.where(x > 0, scale, negative(x) + scale * alpha),
    )


def _hardswish_slope(x: Array) -> Array:
    return np.where(x <= -3, 0.0, np.where(x >= 3, 1.0, x / 3 + 0.5))


# Names as `torch.nn.functional` has them; `gelu_tanh` is gelu(approximate="tanh").
CURVES: dict[str, Curve] = {
    "gelu": Curve(lambda x: x * _cdf(x), lambda x: _cdf(x) + x * normal_pdf(x)),
    "gelu_tanh": Curve(_gelu_tanh, _gelu_tanh_slope),
    "quick_gelu": _swish(1.702),
    "silu": _swish(1.0),
    # torch's derivative of relu at 0 is 0
    "relu": Curve(lambda x: np.maximum(x, 0.0), lambda x: np.where(x > 0, 1.0, 0.0)),
    "sigmoid": Curve(_sigmoid, lambda x: _sigmoid(x) * _sigmoid(-x)),
    "tanh": Curve(np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    "softplus": Curve(_softplus, _sigmoid),
    "softsign": Curve(lambda x: x / (1 + np.abs(x)), lambda x: (1 + np.abs(x)) ** -2.0),
    "mish": Curve(lambda x: x * np.tanh(_softplus(x)), _mish_slope),
    "elu": _elu(1.0, 1.0),
    "selu": _elu(_SELU_SCALE, _SELU_ALPHA),
    "hardswish": Curve(lambda x: x * np.clip(x + 3, 0, 6) / 6, _hardswish_slope),
}
