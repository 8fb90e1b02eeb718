"""Values of pointwise nonlinearities, exactly as torch gives them, by name and parameters."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Function = Callable[..., Tensor]

# Called with the tensor, then the parameters in the order of torch's own arguments.
FUNCTIONS: dict[str, Function] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": torch.relu,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "celu": F.celu,
    "selu": F.selu,
    "sigmoid": torch.sigmoid,
    "logsigmoid": F.logsigmoid,
    "tanh": torch.tanh,
    "tanhshrink": F.tanhshrink,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "mish": F.mish,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "threshold": F.threshold,
    "clamp": torch.clamp,
}
_IN_PLACE: dict[str, Function] = {
    "silu": lambda x: F.silu(x, inplace=True),
    "relu": torch.relu_,
    "relu6": lambda x: F.relu6(x, inplace=True),
    "leaky_relu": F.leaky_relu_,
    "elu": F.elu_,
    "celu": torch.celu_,
    "selu": torch.selu_,
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
    "mish": lambda x: F.mish(x, inplace=True),
    "hardtanh": F.hardtanh_,
    "hardsigmoid": lambda x: F.hardsigmoid(x, inplace=True),
    "hardswish": lambda x: F.hardswish(x, inplace=True),
    "threshold": torch.threshold_,
    "clamp": torch.clamp_,
}

TWO_PASSES = frozenset({"quick_gelu", "logsigmoid", "tanhshrink", "softsign"})
"""Those whose value takes a second tensor like `x` while it is computed on the CPU."""


def check_function(function: str) -> None:
    """Raise `ValueError` unless it is a name in `FUNCTIONS`.

    Example:
        >>> check_function("relu")
    """
    if function not in FUNCTIONS:
        raise ValueError(f"function {function!r} is unknown; allowed: {', '.join(FUNCTIONS)}")


def value(function: str, x: Tensor, parameters: Sequence[float] = ()) -> Tensor:
    """The nonlinearity's value.

    Args:
        function: A name in `FUNCTIONS`.
        x: Float, any shape.
        parameters: The first of torch's own arguments after `x`, or none: torch's defaults.

    Returns:
        Like `x`.

    Example:
        >>> value("clamp", torch.tensor([-1.0, 3.0]), (0.0, 2.0))
        tensor([0., 2.])
    """
    return FUNCTIONS[function](x, *parameters)


def overwrite(function: str, x: Tensor, parameters: Sequence[float] = ()) -> Tensor:
    """The value written over `x`, by torch's own in-place op where there is one.

    Example:
        >>> x = torch.tensor([-1.0, 3.0])
        >>> overwrite("relu", x) is x, x.tolist()
        (True, [0.0, 3.0])
    """
    if function in _IN_PLACE:
        return _IN_PLACE[function](x, *parameters)
    return x.copy_(value(function, x, parameters))


def one_pass(function: str, parameters: Sequence[float], dtype: torch.dtype) -> tuple[float, float]:
    """The two numbers that a kernel which computes the value itself takes, as torch reads them.

    Args:
        function: A name in `FUNCTIONS`.
        parameters: As for `value`.
        dtype: Of `x`; torch rounds the bounds of a clamp to it.

    Returns:
        Two numbers, 0 where the function has fewer.

    Example:
        >>> one_pass("hardtanh", (), torch.float32), one_pass("gelu", (), torch.float32)
        ((-1.0, 1.0), (0.0, 0.0))
    """
    full = (*parameters, *_DEFAULTS.get(function, ())[len(parameters) :])
    if function in _ROUNDED:
        full = rounded(full, dtype)
    a, b, *_ = *full, 0.0, 0.0
    return a, b


@cache
def rounded(numbers: tuple[float, ...], dtype: torch.dtype) -> tuple[float, ...]:
    """Numbers as torch reads them beside a tensor of `dtype`.

    No mode sees it: under fake tensors the result would have no values.

    Example:
        >>> rounded((0.1,), torch.bfloat16)
        (0.10009765625,)
    """
    with _disable_current_modes():
        return tuple(torch.tensor(numbers, dtype=dtype, device="cpu").tolist())


_DEFAULTS: Mapping[str, tuple[float, ...]] = {
    "leaky_relu": (0.01,),
    "elu": (1.0,),
    "celu": (1.0,),
    "softplus": (1.0, 20.0),
    "hardtanh": (-1.0, 1.0),
    "relu6": (0.0, 6.0),
    "hardshrink": (0.5,),
    "softshrink": (0.5,),
    "clamp": (-inf, inf),
}
_ROUNDED = ("hardtanh", "relu6", "clamp", "hardshrink", "softshrink")
