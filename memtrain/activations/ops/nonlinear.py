"""Nonlinearities that save derivative codes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from memtrain.activations.ops.call import Call, as_autocast
from memtrain.activations.ops.fewbit import Value, fewbit
from memtrain.activations.ops.method_sources import body_of, defined
from memtrain.compressors import Compressor, DerivativeCode, Key
from memtrain.compressors.fewbit.functions import FAMILIES, complete
from memtrain.compressors.fewbit.register import REGISTERED, Registered
from memtrain.compressors.fewbit.step_function import EXACT
from memtrain.kernels.derivative import pointwise

# The arguments after the input, by the function's name without its in-place mark: those among
# `_FLAGS` say how to run it, the others are the parameters, in the order of the tables.
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "gelu": ("approximate",),
    "silu": ("inplace",),
    "relu": ("inplace",),
    "relu6": ("inplace",),
    "leaky_relu": ("negative_slope", "inplace"),
    "elu": ("alpha", "inplace"),
    "celu": ("alpha", "inplace"),
    "selu": ("inplace",),
    "mish": ("inplace",),
    "sigmoid": (),
    "logsigmoid": (),
    "tanh": (),
    "tanhshrink": (),
    "softplus": ("beta", "threshold"),
    "softsign": (),
    "hardtanh": ("min_val", "max_val", "inplace"),
    "hardsigmoid": ("inplace",),
    "hardswish": ("inplace",),
    "hardshrink": ("lambd",),
    "softshrink": ("lambd",),
    "threshold": ("threshold", "value", "inplace"),
    "clamp": ("min", "max"),
    "clip": ("min", "max"),
    "clamp_min": ("min",),
    "clamp_max": ("max",),
}
_FLAGS = ("approximate", "inplace", "out")
# Torch's own other names; `log_sigmoid` is the C function behind F.logsigmoid.
_ALIASES = {"log_sigmoid": "logsigmoid", "swish": "silu", "expit": "sigmoid"}
NAMES = (*_ARGUMENTS, *_ALIASES)
# Of torch's own functions, those that autocast runs in float32 on some device.
_WIDE = {"softplus": F.softplus}

# Bodies of `forward` that write a nonlinearity out, as `ast.unparse` writes them with `x` as the
# argument -> the op.
_SOURCES = {
    "return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * "
    "(x + 0.044715 * torch.pow(x, 3.0))))": "gelu_tanh",
    "return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))": "gelu_tanh",
    "return 0.5 * x * (1 + torch.tanh(self.precomputed_constant * "
    "(x + 0.044715 * torch.pow(x, 3))))": "gelu_tanh",
    "return x * torch.sigmoid(1.702 * x)": "quick_gelu",
}
_GELU_CONSTANT = math.sqrt(2 / math.pi)
_LARGEST = float(np.finfo(np.float32).max)
_TINY = float(np.finfo(np.float32).tiny)


def _call(
    op: str,
    x: Tensor,
    inplace: bool = False,
    parameters: tuple[float, ...] = (),
    table: Value | None = None,
    original: Callable[[Tensor], Tensor] | None = None,
) -> Call:
    """Return a call of a nonlinearity that keeps derivative codes.

    `table` is the function whose derivative's table serves, with its parameters, where that is not
    the op itself (a clamp's gradient passes at its bounds, a hardtanh's does not). `original` is
    what autocast sees of the op where it may run in float32: of several ops, one may.
    """
    value, original = (op, parameters), original or _WIDE.get(op)
    table = table or value
    run = partial(_run, x, (value, table), inplace, original)
    waits = None if table[0] in EXACT else partial(run, waits=True)
    return Call(op, x, run, _is_code, plain=partial(_plain, value, original), waits=waits)


def _plain(value: Value, original: Callable[[Tensor], Tensor] | None, x: Tensor) -> Tensor:
    if original is not None:
        (x,) = as_autocast(original, (0,), x)
    return pointwise.value(value[0], x, value[1])


def _is_code(compressor: Compressor) -> bool:
    return compressor.gives_derivative


def _run(
    x: Tensor,
    functions: tuple[Value, Value],
    inplace: bool,
    original: Callable[[Tensor], Tensor] | None,
    compressor: Compressor,
    key: Key,
    *,
    waits: bool = False,
) -> Tensor:
    """Return the value, with codes in place of saved tensors; nothing random."""
    value, (function, parameters) = functions
    if not isinstance(compressor, DerivativeCode):
        raise TypeError(f"{value[0]} with {compressor!r}; allowed: a DerivativeCode")
    code = _code_of(compressor, function, parameters)
    if original is not None and torch.is_autocast_enabled(x.device.type):
        (x,) = as_autocast(original, (0,), x)
    return fewbit(x, code, inplace=inplace, value=value, waits=waits)


@lru_cache(maxsize=1024)  # a model has few; to make one checks it
def _code_of(
    compressor: DerivativeCode, function: str, parameters: tuple[float, ...]
) -> DerivativeCode:
    # A piecewise-linear function is exact with one bit.
    bits = 1 if function in EXACT else compressor.bits
    return replace(compressor, function=function, parameters=parameters, bits=bits)


def recognise(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """Return a call of a nonlinearity as function, method or in-place form; None for another op.

    Left alone: bounds that are tensors, parameters for which there is no table, and `out=`.
    """
    base = name.strip("_")
    op = _ALIASES.get(base, base)
    read = _read(op, args, kwargs)
    if read is None:
        return None
    x, values, flags = read
    inplace = name.endswith("_") or flags.get("inplace", False)
    # Torch's result is contiguous, where memtrain's form keeps the input's strides: the op that
    # reads it next may draw or round by its strides.
    if op == "logsigmoid" and not x.is_contiguous():
        return None
    if op in ("clamp", "clip", "clamp_min", "clamp_max"):
        return _clamp(x, values.get("min"), values.get("max"), inplace)
    if op == "gelu" and flags.get("approximate") == "tanh":
        op = "gelu_tanh"
    parameters = _parameters(op, values)
    if parameters is None:
        return None
    if op in ("hardshrink", "softshrink"):  # torch compares with lambd in the dtype of x
        return _call(op, x, inplace, parameters, (op, _rounded(parameters, x.dtype)))
    return _call(op, x, inplace, parameters)


def _read(
    op: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Any], dict[str, Any]] | None:
    """The input, the parameters given and the flags; None where they are not those we know."""
    if op not in _ARGUMENTS or (not args and "input" not in kwargs):
        return None
    if len(args) > 1 + len(_ARGUMENTS[op]):  # such as the scales of torch's own elu
        return None
    values = dict(zip(("input", *_ARGUMENTS[op]), args, strict=False)) | dict(kwargs)
    x = values.pop("input")
    flags = {flag: values.pop(flag) for flag in _FLAGS if flag in values}
    if not isinstance(x, Tensor) or not x.is_floating_point() or flags.get("out") is not None:
        return None
    if not values.keys() <= set(_ARGUMENTS[op]):
        return None
    if flags.get("approximate", "none") not in ("none", "tanh"):  # torch says what is wrong
        return None
    if not isinstance(flags.get("inplace", False), bool):  # another argument in its place
        return None
    return x, values, flags


def _parameters(op: str, values: Mapping[str, Any]) -> tuple[float, ...] | None:
    """All parameters of the call; None where there is no table for them."""
    arguments: dict[str, Any] = {**FAMILIES[op].defaults, **values}
    numbers = tuple(arguments.values())
    if not all(_is_number(value) for value in numbers):
        return None
    try:
        return complete(op, numbers)
    except ValueError:  # torch may allow it, or says itself what is wrong
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _clamp(x: Tensor, low: Any, high: Any, inplace: bool) -> Call | None:
    """Return a clamp between numbers: its gradient passes where low <= x <= high."""
    bounds = [value for value in (low, high) if value is not None]
    if not bounds or not all(_is_number(value) for value in bounds):
        return None
    lowest = -np.inf if low is None else float(low)
    highest = np.inf if high is None else float(high)
    first, last = _rounded((lowest, highest), x.dtype)
    if not first <= last:
        return None
    parameters = (lowest, highest)
    if last >= _LARGEST:
        if first <= -_LARGEST:
            return None
        return _call("clamp", x, inplace, parameters, ("threshold", (_next(first, -1), 0.0)))
    inside = (max(_next(first, -1), -_LARGEST), _next(last, 1))
    return _call("clamp", x, inplace, parameters, ("hardtanh", inside))


def _rounded(numbers: tuple[float, ...], dtype: torch.dtype) -> tuple[float, ...]:
    """As torch compares them with a tensor of `dtype`; the kernels compare in float32."""
    with _disable_current_modes():  # a fake mode's tensor has no values
        return tuple(torch.tensor(numbers, dtype=dtype, device="cpu").float().tolist())


def _next(x: float, direction: int) -> float:
    """Return the float32 next to `x`; subnormals count as 0, for the kernels flush them."""
    if abs(x) < _TINY:
        return direction * _TINY
    beside = float(np.nextafter(np.float32(x), np.float32(direction * np.inf)))
    return 0.0 if abs(beside) < _TINY else beside


def recognise_registered(function: Registered, args: Sequence[Any]) -> Call | None:
    """Return the call of a user's own function that `register` returned."""
    known = REGISTERED.get(function.name) is function
    if known and len(args) == 1 and isinstance(args[0], Tensor):
        return _call(function.name, args[0], original=function.plain)
    return None


def op_of(cls: type) -> str | None:
    """Return the nonlinearity that a class writes out, known by its source; None for other code."""
    return _SOURCES.get(body_of(defined(cls, "forward")) or "")


def recognise_module(op: str, module: nn.Module, x: Tensor) -> Call | None:
    """Return the call of a module whose class writes `op` out."""
    if getattr(module, "precomputed_constant", _GELU_CONSTANT) != _GELU_CONSTANT:
        return None
    return _call(op, x, original=partial(defined(type(module), "forward"), module))
