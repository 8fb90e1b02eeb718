"""Values of pointwise nonlinearities, equal to torch's, by name and parameters."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Tensor]

_OF_TORCH = (
    "gelu", "silu", "relu6", "leaky_relu", "elu", "celu", "selu", "logsigmoid", "tanhshrink",
    "softplus", "softsign", "mish", "hardtanh", "hardsigmoid", "hardswish", "hardshrink",
    "softshrink", "threshold",
)  # fmt: skip
# Called with the tensor, then the parameters in the order of torch's arguments.
FUNCTIONS: dict[str, Function] = {
    **{name: getattr(F, name) for name in _OF_TORCH},
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "clamp": torch.clamp,
}
_WITH_INPLACE = (
    "silu", "relu6", "leaky_relu", "elu", "celu", "selu", "mish", "hardtanh", "hardsigmoid",
    "hardswish", "threshold",
)  # fmt: skip
_IN_PLACE: dict[str, Function] = {
    **{name: partial(getattr(F, name), inplace=True) for name in _WITH_INPLACE},
    "relu": torch.relu_,
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
    "clamp": torch.clamp_,
}


def value(function: str, x: Tensor, parameters: Sequence[float] = ()) -> Tensor:
    """Return the value of a nonlinearity, with the first of torch's arguments after `x`."""
    return FUNCTIONS[function](x, *parameters)


def overwrite(function: str, x: Tensor, parameters: Sequence[float] = ()) -> Tensor:
    """Write the value over `x`, by torch's own in-place op if it has one."""
    if function in _IN_PLACE:
        return _IN_PLACE[function](x, *parameters)
    return x.copy_(value(function, x, parameters))
