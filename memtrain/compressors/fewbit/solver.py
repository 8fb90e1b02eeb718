"""The best piecewise-constant stand-in for an activation's derivative: few-bit tables."""

from functools import lru_cache

import numpy as np

from memtrain.compressors.fewbit import files as files
from memtrain.compressors.fewbit.exact import EXACT
from memtrain.compressors.fewbit.functions import (
    FAMILIES,
    Array,
    Curve,
    Function,
    Interval,
    check_name,
    complete,
    curve,
    normal_pdf,
)
from memtrain.compressors.fewbit.search import fit, prepare, refine, search
from memtrain.compressors.fewbit.step_function import MAX_BITS, Approximation

__all__ = ["MAX_BITS", "Approximation", "solve", "table"]

VERSION = 2  # of what a table holds; part of the names of cached files
_SLOW_BITS = 6  # from here on solving may take seconds (docs/guides/fewbit.md)


def solve(
    fn: str | Function | tuple[Function, Function] | Curve,
    bits: int,
    interval: Interval = (-10.0, 10.0),
    weight: str | Function = "uniform",
    *,
    n: int = 2000,
    refine: bool = True,
    parity: str = "auto",
) -> Approximation:
    """Find the step function of 2**bits levels nearest to f' in the weighted L2 norm.

    An exact dynamic programme over a grid of `n` cells finds the globally best boundaries on that
    grid; damped Newton steps on the analytic gradient then move them off the grid.

    Args:
        fn: A name (of `fewbit_functions.CURVES`, default parameters), a function of float64 arrays
            (its derivative is then taken by central differences), a pair (function, derivative), or
            a `Curve`, which also tells where the derivative jumps.
        bits: 1 to 8.
        interval: Where the error counts; outside, the outermost levels hold.
        weight: `"uniform"` (1), `"normal"` (the standard density) or a positive function of
            float64 arrays. With `"uniform"` every level is the exact (f(b) - f(a)) / (b - a).
        n: Grid cells over the interval.
        refine: Whether to leave the grid.
        parity: `"even"` solves for |x| on the half line, so that all levels serve both halves;
            `"plain"` does not; `"auto"` is `"even"` where f', the weight and the interval are even.

    Returns:
        The approximation; its `error` counts the whole interval for either parity.

    Raises:
        ValueError: If a name is unknown or a value out of range, or `parity="even"` is asked for
            what is not even.

    Memory:
        12 n bytes per level; no n x n matrix is held.

    Example:
        >>> table = solve("gelu", 2)
        >>> [round(s, 4) + 0.0 for s in table.boundaries], round(table.error, 4)
        ([-0.469, 0.0, 0.469], 0.0406)

    Reference:
        Novikov et al., Few-Bit Backward: Quantized Gradients of Activation Functions for Memory
        Footprint Reduction, ICML 2023, arXiv:2202.00441, section 2 (equations 3 to 5, dynamic
        programming).
    """
    _check(bits, interval, n, parity)
    shape, density = _curve(fn), _density(weight)
    even = _is_even(shape, density, interval) if parity != "plain" else False
    if parity == "even" and not even:
        raise ValueError(f"parity 'even' asked for, but f', weight or interval {interval} is not")
    low, cells = (0.0, n // 2) if even else (interval[0], n)
    problem = prepare(shape, density, (low, interval[1]), cells)
    boundaries = problem.grid[search(problem.mass, problem.moment, 2**bits)]
    if refine:
        boundaries = _snap(_refined(problem, boundaries), shape.kinks, interval)
    levels, error = fit(problem, boundaries)
    return Approximation(
        boundaries=tuple(boundaries.tolist()),
        levels=tuple(levels.tolist()),
        error=0.0 if error <= problem.noise else float(error) * (2 if even else 1),
        parity="even" if even else "plain",
    )


_refined = refine  # `solve` has an argument of that name


@lru_cache(maxsize=1024)
def table(function: str, bits: int, parameters: tuple[float, ...] = ()) -> Approximation:
    """The table that training uses, kept for the life of the process, and on disk where slow.

    Piecewise-linear functions of two slopes (relu, relu6, leaky_relu, prelu, rrelu, hardtanh,
    hardsigmoid, hardshrink, softshrink, threshold) have a table of one bit whatever `bits` says: it
    is their derivative, bit for bit, at every float32, bfloat16 and float16 (subnormal kinks count
    as 0). All others are `solve`d on [-10, 10], which scales with the parameters: by alpha for
    celu, by 1 / beta for softplus, and wider by log(alpha) for elu.

    Args:
        function: A name in `fewbit_functions.FAMILIES`.
        bits: 1 to 8.
        parameters: In the order of the torch function's arguments; torch's defaults where left out.

    Returns:
        The approximation.

    Raises:
        ValueError: If the function is unknown, or a value out of range.

    Example:
        >>> table("relu", 1).levels, table("hardtanh", 3).parity
        ((0.0, 1.0), 'band')
    """
    full = complete(function, parameters)
    check_bits(bits)
    if function in EXACT:
        return EXACT[function](*full)
    interval = FAMILIES[function].interval(*full)

    def compute() -> Approximation:
        return solve(curve(function, full), bits, interval)

    if bits < _SLOW_BITS:
        return compute()
    return files.cached(files.key(VERSION, function, bits, full), compute)


def _snap(boundaries: Array, kinks: tuple[float, ...], interval: Interval) -> Array:
    """Put boundaries that refinement moved off a kink by rounding back on it."""
    for kink in kinks:
        near = np.abs(boundaries - kink) < 1e-9 * (interval[1] - interval[0])
        boundaries = np.where(near, kink, boundaries)
    return boundaries


def check_bits(bits: int) -> None:
    """Raise a ValueError unless `bits` is an integer from 1 to 8."""
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise ValueError(f"bits {bits!r} is no integer; allowed: 1 to {MAX_BITS}")
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits {bits} is out of range; allowed: 1 to {MAX_BITS}")


def _check(bits: int, interval: Interval, n: int, parity: str) -> None:
    check_bits(bits)
    if not (np.isfinite(interval).all() and interval[0] < interval[1]):
        raise ValueError(f"interval {interval} is not allowed; it must be finite and ascending")
    if n < 2 * 2**bits:
        raise ValueError(f"n {n} is too small for {bits} bits; allowed: {2 * 2**bits} or more")
    if parity not in ("auto", "even", "plain"):
        raise ValueError(f"parity {parity!r} is unknown; allowed: auto, even, plain")


def _curve(fn: str | Function | tuple[Function, Function] | Curve) -> Curve:
    if isinstance(fn, str):
        check_name(fn, FAMILIES)
        return curve(fn)
    if isinstance(fn, tuple):
        return fn if isinstance(fn, Curve) else Curve(fn[0], fn[1])
    step = 1e-5  # error about step**2 f''' / 6 plus 1e-16 / step: 1e-11
    return Curve(fn, lambda x: (fn(x + step) - fn(x - step)) / (2 * step))


def _density(weight: str | Function) -> Function | None:
    if not isinstance(weight, str):
        return weight
    if weight not in ("uniform", "normal"):
        raise ValueError(f"weight {weight!r} is unknown; allowed: uniform, normal or a function")
    return None if weight == "uniform" else normal_pdf


def _is_even(shape: Curve, weight: Function | None, interval: Interval) -> bool:
    if interval[0] != -interval[1]:
        return False
    x = interval[1] * (np.arange(512) + 0.5) / 512
    return all(
        np.allclose(f(x), f(-x), rtol=1e-9, atol=1e-12)
        for f in (shape.slope, weight)
        if f is not None
    )
