"""The best piecewise-constant approximation of an activation's derivative: few-bit tables.

Prefix integrals on a grid, an exact dynamic program over the grid, and Newton steps off the grid.
"""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memtrain.compressors.fewbit.functions import (
    FAMILIES,
    Array,
    Curve,
    Function,
    Interval,
    complete,
    curve,
)
from memtrain.compressors.fewbit.step_function import EXACT, MAX_BITS, Approximation

# Gauss-Legendre on a grid cell (10 / 1000 wide): exact to rounding for these functions.
_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(8)
_ROWS = 128  # end points per iteration: the search stores _ROWS x n costs


class Problem(NamedTuple):
    """Prefix integrals on the grid: mass of w, moment w f', energy w f'**2."""

    curve: Curve
    weight: Function | None  # None: 1
    grid: Array
    mass: Array
    moment: Array
    energy: float

    @property
    def noise(self) -> float:
        """The rounding error of differences of numbers as large as the energy."""
        return 1e-14 * self.energy

    def prefix(self, s: Array) -> tuple[Array, Array]:
        """Return mass and moment from the interval's start to the points `s`."""
        if self.weight is None:
            return s - self.grid[0], self.curve.value(s) - self.curve.value(self.grid[:1])
        cell = np.clip(np.searchsorted(self.grid, s) - 1, 0, len(self.grid) - 2)
        mass, moment, _ = _integrate(self.curve, self.weight, self.grid[cell], s)
        return self.mass[cell] + mass, self.moment[cell] + moment

    def density(self, s: Array) -> Array:
        """Return the weight at `s`."""
        return np.ones_like(s) if self.weight is None else self.weight(s)


def _integrate(
    curve: Curve, weight: Function | None, start: Array, stop: Array
) -> tuple[Array, Array, Array]:
    """Integrate w, w f' and w f'**2 over [start, stop], elementwise, by quadrature."""
    half = (stop - start)[..., None] / 2
    x = start[..., None] + half * (1 + _NODES)
    slope = curve.slope(x)
    measure = half * _NODE_WEIGHTS * (1.0 if weight is None else weight(x))
    return measure.sum(-1), (measure * slope).sum(-1), (measure * slope**2).sum(-1)


def prepare(curve: Curve, weight: Function | None, interval: Interval, cells: int) -> Problem:
    """Return the problem on an even grid of `cells` cells and the curve's break points."""
    # With this order of operations 0 and other round numbers are exact grid points.
    low, high = interval
    grid = low + (high - low) * np.arange(cells + 1) / cells
    for point in curve.breaks:
        if low < point < high:
            near = np.abs(grid[1:-1] - point) < 1e-6 * (high - low) / cells
            inner = grid[1:-1][~near]
            grid = np.sort(np.concatenate([grid[:1], inner, [point], grid[-1:]]))
    mass, moment, energy = _integrate(curve, weight, grid[:-1], grid[1:])
    if weight is None:
        prefix = grid - low, curve.value(grid) - curve.value(grid[:1])
    else:
        prefix = np.append(0.0, mass.cumsum()), np.append(0.0, moment.cumsum())
    return Problem(curve, weight, grid, *prefix, float(energy.sum()))


def search(mass: Array, moment: Array, count: int, *, prune: bool = True) -> list[int]:
    """Return grid indices of the inner boundaries of the best split into `count` intervals.

    The energy is the same for every split, so an interval costs minus its moment**2 / mass. Costs
    are the same in each layer, so all layers of some end points are computed together. The prefix
    masses and moments are [n + 1]. The search takes 12 bytes per grid point and level, and the
    costs of 128 rows.

    The costs violate the quadrangle inequality if f' is not monotone (GELU), so divide and conquer
    and SMAWK would be wrong. For any f', splitting an interval never costs more: T(j, i') >= T(j,
    i) + T(i, i'). So a start j with best[k-1][j] + T(j, i) >= best[k-1][i] is dominated, in layer
    k, by the start i for every end behind i. It is dropped if `prune`.

    Example:
        >>> search(np.arange(5.0), np.array([0.0, 0.0, 0.0, 1.0, 2.0]), 2)
        [2]
    """
    n = len(mass) - 1
    best = np.full((count + 1, n + 1), np.inf)
    best[0, 0] = 0.0
    start_of = np.zeros((count + 1, n + 1), np.int32)
    lowest = [0] * (count + 1)  # the first remaining start of each layer
    for first in range(1, n + 1, _ROWS):
        end = np.arange(first, min(first + _ROWS, n + 1))
        width, rows = int(end[-1]), np.arange(len(end))
        left = min(lowest[1:])
        start = np.arange(left, width)
        cost = -_gain(mass[end, None] - mass[start], moment[end, None] - moment[start])
        cost[start >= end[:, None]] = np.inf
        for layer in range(1, min(count, width) + 1):
            low = lowest[layer]
            total = best[layer - 1, low:width] + cost[:, low - left :]
            winner = total.argmin(1)
            start_of[layer, end] = winner + low
            best[layer, end] = total[rows, winner]
            if prune:
                kept = total[-1] < best[layer - 1, width]
                lowest[layer] = low + (int(kept.argmax()) if kept.any() else width - low)
    cuts = [n]
    for layer in range(count, 1, -1):
        cuts.append(int(start_of[layer, cuts[-1]]))
    return cuts[:0:-1]


def _gain(mass: Array, moment: Array) -> Array:
    """Return moment**2 / mass; 0 for intervals without mass in float64."""
    return np.divide(moment**2, mass, out=np.zeros_like(mass), where=mass > 0)


def fit(problem: Problem, boundaries: Array) -> tuple[Array, Array]:
    """Return the best levels [..., K] and the error [...] for boundaries [..., K - 1]."""
    edge = problem.grid[[0, -1]]
    shape = (*boundaries.shape[:-1], 1)
    edges = np.concatenate(
        [np.broadcast_to(edge[0], shape), boundaries, np.broadcast_to(edge[1], shape)], -1
    )
    mass, moment = (np.diff(p, axis=-1) for p in problem.prefix(edges))
    levels = np.divide(moment, mass, out=np.zeros_like(mass), where=mass > 0)
    return levels, problem.energy - _gain(mass, moment).sum(-1)


def gradient(problem: Problem, boundaries: Array) -> Array:
    """Return the error's derivative with respect to the boundaries, equation 5 of the paper."""
    levels, _ = fit(problem, boundaries)
    left, right = levels[..., :-1], levels[..., 1:]
    slope = problem.curve.slope(boundaries)
    return (2 * slope - left - right) * (right - left) * problem.density(boundaries)


def refine(problem: Problem, boundaries: Array) -> Array:
    """Refine boundaries by damped Newton descent; steps that increase the error are rejected.

    A boundary on a break point is fixed if the error increases on both sides.
    """
    noise = problem.noise
    low, high = problem.grid[[0, -1]]
    free = ~fixed_at_breaks(problem, boundaries)
    slant, error = gradient(problem, boundaries) * free, fit(problem, boundaries)[1]
    damping = 1e-6
    for _ in range(100):
        if damping > 1e9 or error <= noise or not slant.any():
            break
        curvature = np.where(np.outer(free, free), hessian(problem, boundaries), np.diag(~free))
        # The absolute curvature as scale prevents huge steps on flat stretches (relu).
        scale = np.diag(np.abs(np.diag(curvature)) + 1e-3)
        trial = boundaries - np.linalg.solve(curvature + damping * scale, slant)
        inside = all(a < b for a, b in pairwise([low, *trial, high]))
        if inside:
            new_slant, new_error = gradient(problem, trial) * free, fit(problem, trial)[1]
            smaller = np.abs(new_slant).max() < np.abs(slant).max()
            if new_error < error - noise or (new_error < error + noise and smaller):
                boundaries, slant, error = trial, new_slant, new_error
                damping = max(damping / 10, 1e-12)
                continue
        damping *= 10
    return boundaries


def fixed_at_breaks(problem: Problem, boundaries: Array) -> NDArray[np.bool_]:
    """Return a mask [K - 1] of the boundaries on break points at a local minimum of the error."""
    levels, _ = fit(problem, boundaries)
    left, right = levels[:-1], levels[1:]
    step = 1e-9 * (problem.grid[-1] - problem.grid[0])
    behind, ahead = (
        (2 * problem.curve.slope(boundaries + offset) - left - right) * (right - left)
        for offset in (-step, step)
    )
    return np.isin(boundaries, problem.curve.breaks) & (behind <= 0) & (ahead >= 0)


def hessian(problem: Problem, boundaries: Array) -> Array:
    """Return the error's tridiagonal second derivatives, [K - 1, K - 1].

    f'' and w' are central differences.
    """
    step = 1e-6
    levels, _ = fit(problem, boundaries)
    edges = np.concatenate([problem.grid[:1], boundaries, problem.grid[-1:]])
    mass = np.maximum(np.diff(problem.prefix(edges)[0]), np.finfo(np.float64).tiny)
    slope, weight = problem.curve.slope(boundaries), problem.density(boundaries)
    ahead, behind = boundaries + step, boundaries - step
    bend = (problem.curve.slope(ahead) - problem.curve.slope(behind)) / (2 * step)
    tilt = (problem.density(ahead) - problem.density(behind)) / (2 * step)
    left, right = levels[:-1], levels[1:]
    off, jump = 2 * slope - left - right, right - left
    # The derivatives of the levels on a boundary's left and right.
    d_left = weight * (slope - left) / mass[:-1]
    d_right = -weight * (slope - right) / mass[1:]
    diagonal = (
        (2 * bend - d_left - d_right) * jump * weight
        + off * (d_right - d_left) * weight
        + off * jump * tilt
    )
    shared = levels[1:-1]  # the level between a boundary and the next
    coupling = 2 * weight[:-1] * weight[1:] * (slope[:-1] - shared) * (slope[1:] - shared)
    coupling = coupling / mass[1:-1]
    return np.diag(diagonal) + np.diag(coupling, 1) + np.diag(coupling, -1)


def solve(
    fn: str | Curve,
    bits: int,
    interval: Interval = (-10.0, 10.0),
    weight: Function | None = None,
    *,
    n: int = 2000,
    refine: bool = True,
) -> Approximation:
    """Find the step function with 2**bits levels nearest to f' in the weighted L2 norm.

    An exact dynamic program finds the best boundaries on a grid of `n` cells over the interval;
    damped Newton steps on the analytic gradient then move them off the grid (`refine`). The weight
    is a positive function of float64 arrays, or None for 1: then every level is exactly (f(b) -
    f(a)) / (b - a). If f', the weight and the interval are even, the approximation is in |x|, so
    that all levels serve both halves; `error` is that of the whole interval. A name stands for the
    curve with torch's defaults.

    Example:
        >>> table = solve("gelu", 2)
        >>> [round(s, 4) + 0.0 for s in table.boundaries], round(table.error, 4)
        ([-0.469, 0.0, 0.469], 0.0406)

    Reference:
        Novikov et al., Few-Bit Backward, ICML 2023, arXiv:2202.00441, section 2 (equations 3 to 5).
    """
    check_bits(bits)
    if not (np.isfinite(interval).all() and interval[0] < interval[1]):
        raise ValueError(f"interval {interval} is not allowed; it must be finite and ascending")
    if n < 2 * 2**bits:
        raise ValueError(f"n {n} is too small for {bits} bits; allowed: {2 * 2**bits} or more")
    shape = curve(fn) if isinstance(fn, str) else fn
    even = _is_even(shape, weight, interval)
    low, cells = (0.0, n // 2) if even else (interval[0], n)
    problem = prepare(shape, weight, (low, interval[1]), cells)
    boundaries = problem.grid[search(problem.mass, problem.moment, 2**bits)]
    if refine:
        boundaries = _refined(problem, boundaries)
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
    """Return the table for training, cached in the process.

    Piecewise-linear functions of two slopes (relu, relu6, leaky_relu, hardtanh, hardsigmoid,
    hardshrink, softshrink, threshold) always have a table of one bit: their exact derivative for
    every float32, bfloat16 and float16 (subnormal break points count as 0). Other functions are
    solved on [-10, 10], scaled by alpha for celu and 1 / beta for softplus, and extended by
    log(alpha) for elu. The parameters are the torch function's arguments; torch's defaults if
    omitted.
    """
    full = complete(function, parameters)
    check_bits(bits)
    if function in EXACT:
        return EXACT[function](*full)
    return solve(curve(function, full), bits, FAMILIES[function].interval(*full))


def check_bits(bits: int) -> None:
    """Raise ValueError unless `bits` is an integer from 1 to 8."""
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise ValueError(f"bits {bits!r} is not an integer; allowed: 1 to {MAX_BITS}")
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits {bits} is out of range; allowed: 1 to {MAX_BITS}")


def _is_even(shape: Curve, weight: Function | None, interval: Interval) -> bool:
    if interval[0] != -interval[1]:
        return False
    x = interval[1] * (np.arange(512) + 0.5) / 512
    return all(
        np.allclose(f(x), f(-x), rtol=1e-9, atol=1e-12)
        for f in (shape.slope, weight)
        if f is not None
    )
