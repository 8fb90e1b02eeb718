"""The best piecewise-constant approximation of an activation's derivative: few-bit tables.

Prefix integrals on a grid, an exact dynamic program over the grid, and one around its result.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from memtrain.compressors.fewbit.functions import (
    FAMILIES,
    Array,
    Curve,
    Interval,
    complete,
    curve,
)
from memtrain.compressors.fewbit.step_function import EXACT, MAX_BITS, Approximation

# Gauss-Legendre on a grid cell (10 / 1000 wide): exact to rounding for these functions.
_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(8)
_ROWS = 128  # end points per iteration: the search stores _ROWS x n costs
_REACH = 8  # candidates on each side of a boundary
CELLS = 2000  # of the grid over the whole interval


class Problem(NamedTuple):
    """Integrals of f' from the start of a grid to its points, and of f'**2 over the whole grid."""

    curve: Curve
    grid: Array
    moment: Array
    energy: float

    @property
    def noise(self) -> float:
        """The rounding error of differences of numbers as large as the energy."""
        return 1e-14 * self.energy

    def prefix(self, s: Array) -> Array:
        """Return the integral of f' from the grid's start to the points `s`."""
        cell = np.clip(np.searchsorted(self.grid, s) - 1, 0, len(self.grid) - 2)
        return self.moment[cell] + _integrate(self.curve, self.grid[cell], s)[0]


def _integrate(curve: Curve, start: Array, stop: Array) -> tuple[Array, Array]:
    """Integrate f' and f'**2 over [start, stop], elementwise, by quadrature."""
    half = (stop - start)[..., None] / 2
    slope = curve.slope(start[..., None] + half * (1 + _NODES))
    measure = half * _NODE_WEIGHTS
    return (measure * slope).sum(-1), (measure * slope**2).sum(-1)


def prepare(curve: Curve, interval: Interval, cells: int) -> Problem:
    """Return the problem on an even grid of `cells` cells and the curve's break points."""
    # With this order of operations 0 and other round numbers are exact grid points.
    low, high = interval
    grid = low + (high - low) * np.arange(cells + 1) / cells
    for point in curve.breaks:
        if low < point < high:
            near = np.abs(grid[1:-1] - point) < 1e-6 * (high - low) / cells
            inner = grid[1:-1][~near]
            grid = np.sort(np.concatenate([grid[:1], inner, [point], grid[-1:]]))
    moment, energy = _integrate(curve, grid[:-1], grid[1:])
    return Problem(curve, grid, np.append(0.0, moment.cumsum()), float(energy.sum()))


def search(grid: Array, moment: Array, count: int) -> list[int]:
    """Return grid indices of the inner boundaries of the best split into `count` intervals.

    The energy is the same for every split, so an interval costs minus its moment**2 / length. Costs
    are the same in each layer, so all layers of some end points are computed together. The prefix
    moments are [n + 1]. The search takes 12 bytes per grid point and level, and the costs of 128
    rows.

    The costs violate the quadrangle inequality if f' is not monotone (GELU), so divide and conquer
    and SMAWK would be wrong. For any f', splitting an interval never costs more: T(j, i') >= T(j,
    i) + T(i, i'). So a start j with best[k-1][j] + T(j, i) >= best[k-1][i] is dominated, in layer
    k, by the start i for every end behind i, and is dropped.

    Example:
        >>> search(np.arange(5.0), np.array([0.0, 0.0, 0.0, 1.0, 2.0]), 2)
        [2]
    """
    n = len(grid) - 1
    best = np.full((count + 1, n + 1), np.inf)
    best[0, 0] = 0.0
    start_of = np.zeros((count + 1, n + 1), np.int32)
    lowest = [0] * (count + 1)  # the first remaining start of each layer
    for first in range(1, n + 1, _ROWS):
        end = np.arange(first, min(first + _ROWS, n + 1))
        width, rows = int(end[-1]), np.arange(len(end))
        left = min(lowest[1:])
        start = np.arange(left, width)
        cost = -_gain(grid[end, None] - grid[start], moment[end, None] - moment[start])
        cost[start >= end[:, None]] = np.inf
        for layer in range(1, min(count, width) + 1):
            low = lowest[layer]
            total = best[layer - 1, low:width] + cost[:, low - left :]
            winner = total.argmin(1)
            start_of[layer, end] = winner + low
            best[layer, end] = total[rows, winner]
            kept = total[-1] < best[layer - 1, width]
            lowest[layer] = low + (int(kept.argmax()) if kept.any() else width - low)
    cuts = [n]
    for layer in range(count, 1, -1):
        cuts.append(int(start_of[layer, cuts[-1]]))
    return cuts[:0:-1]


def _gain(length: Array, moment: Array) -> Array:
    """Return moment**2 / length; 0 for intervals without a length in float64."""
    return np.divide(moment**2, length, out=np.zeros_like(length), where=length > 0)


def fit(problem: Problem, boundaries: Array) -> tuple[Array, float]:
    """Return the best levels [K] and the error for boundaries [K - 1]."""
    edges = np.concatenate([problem.grid[:1], boundaries, problem.grid[-1:]])
    length, moment = np.diff(edges), np.diff(problem.prefix(edges))
    levels = np.divide(moment, length, out=np.zeros_like(length), where=length > 0)
    return levels, problem.energy - float(_gain(length, moment).sum())


def refine(problem: Problem, boundaries: Array) -> Array:
    """Move boundaries off the grid, all together, as long as the error decreases.

    Each boundary has `2 * _REACH + 1` candidates around itself, and a dynamic program finds the
    best of each. The candidates' distance, a cell of the grid, shrinks when no boundary moves.
    """
    if fit(problem, boundaries)[1] <= problem.noise:
        return boundaries
    low, high = problem.grid[[0, -1]]
    offsets = np.arange(-_REACH, _REACH + 1)
    stay = 2 * np.finfo(np.float64).eps * problem.energy * (offsets == 0)  # more than rounding
    step = (high - low) / (len(problem.grid) - 1)
    for _ in range(200):
        points = np.clip(boundaries[:, None] + step * offsets, low, high)
        moment = problem.prefix(np.concatenate([[low], points.ravel(), [high]]))
        moments = moment[1:-1].reshape(points.shape)
        best = _gain(points[0] - low, moments[0] - moment[0]) + stay
        starts = []
        for k in range(1, len(points)):
            width = points[k] - points[k - 1][:, None]
            total = best[:, None] + _gain(width, moments[k] - moments[k - 1][:, None])
            total[width < 0] = -np.inf
            starts.append(total.argmax(0))
            best = total.max(0) + stay
        at = [int((best + _gain(high - points[-1], moment[-1] - moments[-1])).argmax())]
        for start in reversed(starts):
            at.append(int(start[at[-1]]))
        before, boundaries = boundaries, points[np.arange(len(points)), at[::-1]]
        if np.array_equal(before, boundaries):
            step /= _REACH
            if step < 1e-9 * (high - low):
                break
    return boundaries


def solve(curve: Curve, bits: int, interval: Interval = (-10.0, 10.0)) -> Approximation:
    """Find the step function with 2**bits levels nearest to f' in the L2 norm.

    An exact dynamic program finds the best boundaries on a grid of `CELLS` cells over the interval;
    a search around them then moves them off the grid. Every level is the mean of f' over its
    interval. If f' and the interval are even, the approximation is in |x|, so that all levels serve
    both halves; `error` is that of the whole interval.

    Example:
        >>> table = solve(curve("gelu"), 2)
        >>> [round(s, 4) + 0.0 for s in table.boundaries], round(table.error, 4)
        ([-0.469, 0.0, 0.469], 0.0406)

    Reference:
        Novikov et al., Few-Bit Backward, ICML 2023, arXiv:2202.00441, section 2 (equations 3 to 5).
    """
    check_bits(bits)
    even = _is_even(curve, interval)
    low, cells = (0.0, CELLS // 2) if even else (interval[0], CELLS)
    problem = prepare(curve, (low, interval[1]), cells)
    boundaries = refine(problem, problem.grid[search(problem.grid, problem.moment, 2**bits)])
    levels, error = fit(problem, boundaries)
    return Approximation(
        boundaries=tuple(boundaries.tolist()),
        levels=tuple(levels.tolist()),
        error=0.0 if error <= problem.noise else error * (2 if even else 1),
        parity="even" if even else "plain",
    )


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


def _is_even(curve: Curve, interval: Interval) -> bool:
    if interval[0] != -interval[1]:
        return False
    x = interval[1] * (np.arange(512) + 0.5) / 512
    return np.allclose(curve.slope(x), curve.slope(-x), rtol=1e-9, atol=1e-12)
