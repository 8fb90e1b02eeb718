"""The best piecewise-constant stand-in for an activation's derivative: few-bit tables."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from memtrain.compressors.fewbit_functions import CURVES, Array, Curve, Function, normal_pdf

MAX_BITS = 4
# Gauss-Legendre on one grid cell (10 / 1000 wide): exact to rounding for these functions.
_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(8)
_ROWS = 128  # end points handled at once: the search holds _ROWS x n costs, never n x n


@dataclass(frozen=True, kw_only=True)
class Approximation:
    """A step function q that replaces f' in the backward pass.

    Attributes:
        boundaries: The 2**bits - 1 inner boundaries, ascending.
        levels: The 2**bits values; `levels[i]` holds left of and at `boundaries[i]`.
        error: The weighted integral of (f' - q)**2 over the whole interval.
        parity: `"plain"`: the boundaries are compared with x; `"even"`: with |x|.
    """

    boundaries: tuple[float, ...]
    levels: tuple[float, ...]
    error: float
    parity: str = "plain"

    @property
    def even(self) -> bool:
        """Whether the boundaries are compared with |x|."""
        return self.parity == "even"

    def __call__(self, x: Array) -> Array:
        """q(x) in float64; a value equal to a boundary takes the level on its left.

        Example:
            >>> solve("relu", 1)(np.array([-1.0, 0.0, 1.0])).tolist()
            [0.0, 0.0, 1.0]
        """
        side = np.abs(x) if self.even else x
        return np.array(self.levels)[np.searchsorted(self.boundaries, side, side="left")]


class _Problem(NamedTuple):
    """Prefix integrals on the grid: mass of w, moment w f', energy w f'**2."""

    curve: Curve
    weight: Function | None  # None: 1
    grid: Array
    mass: Array
    moment: Array
    energy: float

    @property
    def noise(self) -> float:
        """Rounding of the error, a difference of numbers as large as the energy."""
        return 1e-14 * self.energy

    def prefix(self, s: Array) -> tuple[Array, Array]:
        """Mass and moment from the interval's start to any points `s`."""
        if self.weight is None:
            return s - self.grid[0], self.curve.value(s) - self.curve.value(self.grid[:1])
        cell = np.clip(np.searchsorted(self.grid, s) - 1, 0, len(self.grid) - 2)
        mass, moment, _ = _integrate(self.curve, self.weight, self.grid[cell], s)
        return self.mass[cell] + mass, self.moment[cell] + moment


def solve(
    fn: str | Function | tuple[Function, Function],
    bits: int,
    interval: tuple[float, float] = (-10.0, 10.0),
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
        fn: A name (`CURVES`), a function of float64 arrays (its derivative is then taken by central
            differences), or a pair (function, derivative).
        bits: 1 to 4.
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
        O(n) per level; no n x n matrix is held.

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
    curve, density = _curve(fn), _density(weight)
    even = _is_even(curve, density, interval) if parity != "plain" else False
    if parity == "even" and not even:
        raise ValueError(f"parity 'even' asked for, but f', weight or interval {interval} is not")
    low, cells = (0.0, n // 2) if even else (interval[0], n)
    problem = _prefix_integrals(curve, density, low, interval[1], cells)
    boundaries = problem.grid[_search(problem.mass, problem.moment, 2**bits)]
    if refine:
        boundaries = _refine(problem, boundaries)
    levels, error = _fit(problem, boundaries)
    return Approximation(
        boundaries=tuple(boundaries.tolist()),
        levels=tuple(levels.tolist()),
        error=0.0 if error <= problem.noise else float(error) * (2 if even else 1),
        parity="even" if even else "plain",
    )


@cache
def table(function: str, bits: int) -> Approximation:
    """The table that training uses: `solve(function, bits)`, kept for the life of the process.

    Example:
        >>> table("relu", 1).levels
        (0.0, 1.0)
    """
    return solve(function, bits)


def _check(bits: int, interval: tuple[float, float], n: int, parity: str) -> None:
    if not isinstance(bits, int) or not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits {bits!r} is out of range; allowed: 1 to {MAX_BITS}")
    if not (np.isfinite(interval).all() and interval[0] < interval[1]):
        raise ValueError(f"interval {interval} is not allowed; it must be finite and ascending")
    if n < 2 * 2**bits:
        raise ValueError(f"n {n} is too small for {bits} bits; allowed: {2 * 2**bits} or more")
    if parity not in ("auto", "even", "plain"):
        raise ValueError(f"parity {parity!r} is unknown; allowed: auto, even, plain")


def _curve(fn: str | Function | tuple[Function, Function]) -> Curve:
    if isinstance(fn, str):
        if fn not in CURVES:
            raise ValueError(f"function {fn!r} is unknown; allowed: {', '.join(CURVES)}")
        return CURVES[fn]
    if isinstance(fn, tuple):
        return Curve(*fn)
    step = 1e-5  # error about step**2 f''' / 6 plus 1e-16 / step: 1e-11
    return Curve(fn, lambda x: (fn(x + step) - fn(x - step)) / (2 * step))


def _density(weight: str | Function) -> Function | None:
    if isinstance(weight, Callable):
        return weight
    if weight not in ("uniform", "normal"):
        raise ValueError(f"weight {weight!r} is unknown; allowed: uniform, normal or a function")
    return None if weight == "uniform" else normal_pdf


def _is_even(curve: Curve, weight: Function | None, interval: tuple[float, float]) -> bool:
    if interval[0] != -interval[1]:
        return False
    x = interval[1] * (np.arange(512) + 0.5) / 512
    return all(
        np.allclose(f(x), f(-x), rtol=1e-9, atol=1e-12)
        for f in (curve.slope, weight)
        if f is not None
    )


def _integrate(
    curve: Curve, weight: Function | None, start: Array, stop: Array
) -> tuple[Array, Array, Array]:
    """Integrals of w, w f' and w f'**2 over [start, stop], elementwise, by quadrature."""
    half = (stop - start)[..., None] / 2
    x = start[..., None] + half * (1 + _NODES)
    slope = curve.slope(x)
    measure = half * _NODE_WEIGHTS * (1.0 if weight is None else weight(x))
    return measure.sum(-1), (measure * slope).sum(-1), (measure * slope**2).sum(-1)


def _prefix_integrals(
    curve: Curve, weight: Function | None, low: float, high: float, cells: int
) -> _Problem:
    # This order of operations makes 0 and other round numbers exact grid points.
    grid = low + (high - low) * np.arange(cells + 1) / cells
    mass, moment, energy = _integrate(curve, weight, grid[:-1], grid[1:])
    if weight is None:
        prefix = grid - low, curve.value(grid) - curve.value(grid[:1])
    else:
        prefix = np.append(0.0, mass.cumsum()), np.append(0.0, moment.cumsum())
    return _Problem(curve, weight, grid, *prefix, float(energy.sum()))


def _search(mass: Array, moment: Array, count: int) -> list[int]:
    """Grid indices of the inner boundaries of the best split into exactly `count` intervals.

    The energy is the same for every split, so an interval costs minus its moment**2 / mass. All
    layers of a few end points are done together, for the costs are the same in each layer.
    """
    n = len(mass) - 1
    best = np.full((count + 1, n + 1), np.inf)
    best[0, 0] = 0.0
    start_of = np.zeros((count + 1, n + 1), np.int32)
    for first in range(1, n + 1, _ROWS):
        end = np.arange(first, min(first + _ROWS, n + 1))
        width = end[-1]
        cost = -_gain(mass[end, None] - mass[:width], moment[end, None] - moment[:width])
        cost[np.arange(width) >= end[:, None]] = np.inf
        for layer in range(1, count + 1):
            total = best[layer - 1, :width] + cost
            start_of[layer, end] = total.argmin(1)
            best[layer, end] = total[np.arange(len(end)), start_of[layer, end]]
    cuts = [n]
    for layer in range(count, 1, -1):
        cuts.append(int(start_of[layer, cuts[-1]]))
    return cuts[:0:-1]


def _gain(mass: Array, moment: Array) -> Array:
    """moment**2 / mass; 0 where a far tail has no mass left in float64."""
    return np.divide(moment**2, mass, out=np.zeros_like(mass), where=mass > 0)


def _fit(problem: _Problem, boundaries: Array) -> tuple[Array, Array]:
    """Best levels and error for boundaries [..., K - 1]: shapes [..., K] and [...]."""
    edge = problem.grid[[0, -1]]
    shape = (*boundaries.shape[:-1], 1)
    edges = np.concatenate(
        [np.broadcast_to(edge[0], shape), boundaries, np.broadcast_to(edge[1], shape)], -1
    )
    mass, moment = (np.diff(p, axis=-1) for p in problem.prefix(edges))
    levels = np.divide(moment, mass, out=np.zeros_like(mass), where=mass > 0)
    return levels, problem.energy - _gain(mass, moment).sum(-1)


def _gradient(problem: _Problem, boundaries: Array) -> Array:
    """The error's derivative by each boundary, equation 5 of the paper."""
    levels, _ = _fit(problem, boundaries)
    left, right = levels[..., :-1], levels[..., 1:]
    weight = 1.0 if problem.weight is None else problem.weight(boundaries)
    return (2 * problem.curve.slope(boundaries) - left - right) * (right - left) * weight


def _refine(problem: _Problem, boundaries: Array) -> Array:
    """Damped Newton descent; a step is taken only if the error does not grow."""
    noise = problem.noise
    low, high = problem.grid[[0, -1]]
    gradient, error = _gradient(problem, boundaries), _fit(problem, boundaries)[1]
    damping = 1e-6
    for _ in range(100):
        if damping > 1e9 or error <= noise or not gradient.any():
            break
        hessian = _hessian(problem, boundaries)
        # Absolute curvature as scale: flat stretches (relu) then give no wild steps.
        scale = np.diag(np.abs(np.diag(hessian)) + 1e-3)
        trial = boundaries - np.linalg.solve(hessian + damping * scale, gradient)
        inside = all(a < b for a, b in pairwise([low, *trial, high]))
        if inside:
            new_gradient, new_error = _gradient(problem, trial), _fit(problem, trial)[1]
            smaller = np.abs(new_gradient).max() < np.abs(gradient).max()
            if new_error < error - noise or (new_error < error + noise and smaller):
                boundaries, gradient, error = trial, new_gradient, new_error
                damping = max(damping / 10, 1e-12)
                continue
        damping *= 10
    return boundaries


def _hessian(problem: _Problem, boundaries: Array) -> Array:
    step = 1e-6 * np.eye(len(boundaries))
    rows = _gradient(problem, boundaries + step) - _gradient(problem, boundaries - step)
    return (rows + rows.T) / 4e-6
