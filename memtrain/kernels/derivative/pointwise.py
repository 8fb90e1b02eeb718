"""Values of pointwise nonlinearities, equal to torch's, by name and parameters."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Tensor]

# Called with the tensor, then the parameters in the order of torch's arguments.
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
_WITH_INPLACE = (
    "silu", "relu", "relu6", "leaky_relu", "elu", "celu", "selu", "mish", "hardtanh", "hardsigmoid",
    "hardswish", "threshold",
)  # fmt: skip
_IN_PLACE: dict[str, Function] = {
    **{name: partial(getattr(F, name), inplace=True) for name in _WITH_INPLACE},
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
    "clamp": torch.clamp_,
}


def value(function: str, x: Tensor, parameters: Sequence[float] = ()) -> Tensor:
    """Return the value of a nonlinearity, with the first of torch's arguments after `x`.

    Example:
        >>> value("clamp", torch.tensor([-1.0, 3.0]), (0.0, 2.0))
        tensor([0., 2.])
    """
    return FUNCTIONS[function](x, *parameters)


def overwrite(function: str, x: Tensor, parameters: Sequence[float] = ()) -> Tensor:
    """Write the value over `x`, by torch's own in-place op if it has one."""
    if function in _IN_PLACE:
        return _IN_PLACE[function](x, *parameters)
    return x.copy_(value(function, x, parameters))
