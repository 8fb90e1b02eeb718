"""User-defined elementwise functions, approximated like built-in ones."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from memtrain.compressors.fewbit.functions import FAMILIES, Array, Curve, Interval
from memtrain.compressors.fewbit.solver import check_bits, solve
from memtrain.compressors.fewbit.step_function import Approximation

Elementwise = Callable[[Tensor], Tensor]
_POINTS = 2001  # points of the check


@dataclass(frozen=True, eq=False, kw_only=True)
class Registered:
    """A registered function, called like the original.

    In a wrapped model the call is one op: an active `TorchFunctionMode` receives this object as the
    function, and few-bit codes replace its saved input. `name` is its name in sites, rules and
    `DerivativeCode(function=...)`, `bits` the default of its table.
    """

    name: str
    plain: Elementwise
    derivative: Elementwise | None
    bits: int
    interval: Interval

    @property
    def __name__(self) -> str:
        """The function's name."""
        return self.name

    def __call__(self, x: Tensor) -> Tensor:
        """Call the function, or the active `TorchFunctionMode`."""
        if has_torch_function((x,)):
            return handle_torch_function(self, (x,), x)
        return self.plain(x)

    def table(self, bits: int | None = None) -> Approximation:
        """Return the step function for the derivative with `self.bits` or other bits, cached.

        Example:
            >>> logistic = register(torch.sigmoid, "doctest_logistic")
            >>> logistic.table().parity, len(logistic.table(2).levels)
            ('even', 4)
        """
        width = self.bits if bits is None else bits
        check_bits(width)
        return _solved(self, width)

    def __reduce__(self) -> tuple[Callable[[str], "Registered"], tuple[str]]:
        """Pickle by name: pickle cannot find a decorated function under its own name."""
        return registered, (self.name,)


REGISTERED: dict[str, Registered] = {}


def register(
    fn: Elementwise,
    name: str | None = None,
    derivative: Elementwise | None = None,
    *,
    bits: int = 3,
    interval: Interval = (-10.0, 10.0),
) -> Registered:
    """Register a user-defined function, so that few-bit codes can replace its saved input.

    The function is evaluated in float64 on the CPU, and its table is solved at first use. A later
    registration replaces an earlier one with the same name, whose calls then keep their input.

    Args:
        fn: An elementwise function from a tensor to a tensor with the same shape and dtype, without
            side effects.
        name: Letters, digits and underscores; `fn.__name__` by default.
        derivative: f', elementwise; autograd through `fn` by default. It may differ from the true
            derivative, as in a straight-through estimator.
        bits: Bits per code, 1 to 8.
        interval: The interval of the error's integral. The outermost levels continue outside.

    Returns:
        A function to call in place of `fn`; also `REGISTERED[name]`.

    Raises:
        ValueError: If the name is not allowed or built in, `bits` or `interval` is out of range, or
            the function is not elementwise, or not finite on the interval.
        TypeError: If `fn` is not callable.

    Example:
        >>> square = register(lambda x: x.relu().square(), "doctest_square", bits=2)
        >>> square(torch.tensor([-1.0, 3.0]))
        tensor([0., 9.])
        >>> len(square.table().levels)
        4
    """
    if not callable(fn):
        raise TypeError(f"fn is a {type(fn).__name__}; allowed: a function of a tensor")
    name = str(getattr(fn, "__name__", "") if name is None else name)
    if not name.isidentifier():
        raise ValueError(f"name {name!r}; allowed: letters, digits, underscores")
    if name in FAMILIES:
        raise ValueError(f"name {name!r} is taken by a built-in function")
    check_bits(bits)
    low, high = (float(end) for end in interval)
    if not (np.isfinite([low, high]).all() and low < high):
        raise ValueError(f"interval {interval} is not allowed; it must be finite and ascending")
    _alone(_check, name, fn, derivative, (low, high))
    REGISTERED[name] = Registered(
        name=name, plain=fn, derivative=derivative, bits=bits, interval=(low, high)
    )
    return REGISTERED[name]


def registered(name: str) -> Registered:
    """Return the function with a name, which must be registered in this process."""
    if name not in REGISTERED:
        raise ValueError(
            f"function {name!r} is not registered in this process; call "
            f"memtrain.compressors.fewbit.register.register first; registered: "
            f"{', '.join(REGISTERED) or 'none'}"
        )
    return REGISTERED[name]


def _alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run `work` in a separate thread, without the caller's thread-local modes.

    Fake tensors, interception, autocast, inference mode and default devices are such modes.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *arguments).result()


def _values(fn: Elementwise, x: Array) -> Array:
    with torch.no_grad():
        return fn(torch.from_numpy(x.copy())).numpy()


def _slopes(fn: Elementwise, derivative: Elementwise | None, x: Array) -> Array:
    if derivative is not None:
        return _values(derivative, x)
    point = torch.from_numpy(x.copy()).requires_grad_()
    y = fn(point)
    if not y.requires_grad:
        return np.zeros_like(x)
    return torch.autograd.grad(y.sum(), point)[0].numpy()


def _check(name: str, fn: Elementwise, derivative: Elementwise | None, interval: Interval) -> None:
    """Check the function on a grid."""
    x = np.linspace(*interval, _POINTS)
    for what, run in (("values", fn), ("derivatives", derivative)):
        if run is None:
            whole, part = _slopes(fn, None, x), _slopes(fn, None, x[: _POINTS // 3])
        else:
            y = run(torch.from_numpy(x.copy()))
            if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != torch.float64:
                got = f"{y.dtype} {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
                raise ValueError(
                    f"{name!r} gives {got} for float64 {x.shape}; allowed: the same shape and dtype"
                )
            whole, part = _values(run, x), _values(run, x[: _POINTS // 3])
        # The ends of vectorised loops may round differently.
        if not np.allclose(whole[: len(part)], part, rtol=1e-9, atol=1e-12, equal_nan=True):
            raise ValueError(
                f"{name!r} is not elementwise: its {what} change with their neighbours"
            )
        if not np.isfinite(whole).all():
            at = x[~np.isfinite(whole)][0]
            raise ValueError(f"{name!r} has {what} that are not finite, the first at {at:g}")


@lru_cache(maxsize=256)
def _solved(function: Registered, bits: int) -> Approximation:
    curve = Curve(lambda x: _slopes(function.plain, function.derivative, x))
    return _alone(lambda: solve(curve, bits, function.interval))
