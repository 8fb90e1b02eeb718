from itertools import combinations

import numpy as np
import pytest

from memtrain.compressors.fewbit import solver
from memtrain.compressors.fewbit.functions import CURVES, FAMILIES, Curve, complete
from memtrain.compressors.fewbit.solver import solve, table

# Novikov et al., ICML 2023, table of errors (Swish is silu); elu and mish by an independent
# programme at n = 4000.
PUBLISHED = {
    "gelu": (0.1410, 0.0406, 0.0119, 0.0031),
    "silu": (0.2150, 0.0479, 0.0170, 0.0045),
    "sigmoid": (0.0181, 0.0038, 0.0009, 0.0002),
    "tanh": (0.1584, 0.0319, 0.0073, 0.0017),
    "selu": (0.2554, 0.1010, 0.0184, 0.0039),
    "softplus": (0.2902, 0.0541, 0.0121, 0.0029),
    "elu": (0.1622, 0.0251, 0.0052, 0.0012),
    "mish": (0.1688, 0.0400, 0.0136, 0.0036),
    # the same, of an even derivative
    "softsign": (0.1252, 0.0313, 0.0078, 0.0020),
    # one bit by hand: a step at 0, and twice the integral of (x / 3 + 1/2)**2 over [-3, 0]
    "hardswish": (0.5, 0.2520, 0.0556, 0.0102),
    # the mirror image of softplus, with the same errors
    "logsigmoid": (0.2902, 0.0541, 0.0121, 0.0029),
    "celu": (0.1622, 0.0251, 0.0052, 0.0012),
}


@pytest.mark.parametrize("function", PUBLISHED)
def test_solve_is_as_good_as_published(function):
    for bits, published in enumerate(PUBLISHED[function], start=1):
        # Below the published value by its rounding and by what refinement gains on its grid.
        assert -1e-4 < table(function, bits).error - published <= 0.5e-4


def on_grid(function, bits, n, interval=(-10.0, 10.0)):
    """The best boundaries and their error on a grid, without refinement."""
    problem = solver.prepare(CURVES[function], interval, n)
    boundaries = problem.grid[solver.search(problem.grid, problem.moment, 2**bits)]
    return boundaries.tolist(), solver.fit(problem, boundaries)[1]


@pytest.mark.parametrize("function", ["gelu", "silu"])
def test_search_on_the_papers_grid_gives_its_digits(function):
    for bits, published in enumerate(PUBLISHED[function], start=1):
        assert round(on_grid(function, bits, 4096)[1], 4) == published


@pytest.mark.parametrize("bits", [3, 4, 5])
def test_hardswish_has_the_optimum_of_a_straight_line_between_two_breaks(bits):
    # f' is 0, then a line of slope 1/3 from -3 to 3, then 1: its jumps of 1/2 cost an interval
    # across them 1/4 of its overlap, far more than a wider piece of the line. So two levels are
    # those outside, and n = 2**bits - 2 equal pieces of the line err by (6 / n)**3 / 9 / 12 each.
    optimum = 2 / (2**bits - 2) ** 2
    assert table("hardswish", bits).error == pytest.approx(optimum, rel=1e-9)
    # The search is exact: no other split of a grid that has the optimum's boundaries is better.
    n = {3: 400, 4: 1400, 5: 1000}[bits]
    assert on_grid("hardswish", bits, n)[1] == pytest.approx(optimum, rel=1e-9)


@pytest.mark.parametrize(
    ("function", "parameters"),
    [("hardswish", ()), ("selu", ()), ("elu", (0.3,)), ("softplus", (2.0, 3.0))],
)
def test_refinement_beside_breaks_forgets_the_grid(function, parameters, monkeypatch):
    shape, errors = FAMILIES[function].curve(*complete(function, parameters)), []
    for n in (700, 1500, 2000):
        monkeypatch.setattr(solver, "CELLS", n)
        errors.append(solve(shape, 4).error)
    assert errors == pytest.approx([errors[0]] * 3, rel=1e-9)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_solve_makes_relu_exact(bits):
    step = solve(CURVES["relu"], bits)
    assert step.error == 0
    assert 0.0 in step.boundaries
    assert set(step.levels) == {0.0, 1.0}
    x = np.array([-11.0, -1e-30, 0.0, 1e-30, 11.0])
    assert step(x).tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("function", ["gelu", "mish", "tanh"])
@pytest.mark.parametrize("bits", [1, 2])
def test_search_finds_what_brute_force_finds(function, bits):
    n = 12
    boundaries, error = on_grid(function, bits, n, (-2.5, 3.0))
    problem = solver.prepare(CURVES[function], (-2.5, 3.0), n)
    errors = {
        cut: float(solver.fit(problem, problem.grid[list(cut)])[1])
        for cut in combinations(range(1, n), 2**bits - 1)
    }
    best = min(errors, key=errors.__getitem__)
    assert error == pytest.approx(errors[best], abs=1e-12)
    assert boundaries == problem.grid[list(best)].tolist()


def test_search_is_exhaustive_on_rough_functions():
    rng = np.random.default_rng(0)
    for _ in range(20):
        n, count = int(rng.integers(10, 14)), int(rng.integers(2, 6))
        grid = np.append(0.0, rng.random(n).cumsum())
        moment = np.append(0.0, (rng.standard_normal(n).cumsum() ** 2 * rng.random(n)).cumsum())
        gains = {
            cut: (np.diff(moment[[0, *cut, n]]) ** 2 / np.diff(grid[[0, *cut, n]])).sum()
            for cut in combinations(range(1, n), count - 1)
        }
        assert solver.search(grid, moment, count) == list(max(gains, key=gains.__getitem__))


def test_eight_bits_have_a_sixteenth_of_the_error_of_six():
    # A step function's squared error falls by 4 a bit on a smooth derivative, at the limit.
    for function in ("gelu", "tanh"):
        six, eight = table(function, 6), table(function, 8)
        assert len(eight.levels) == 256
        assert 14 < six.error / eight.error < 18


def test_a_point_off_the_grid_becomes_a_boundary():
    step = solve(Curve(lambda x: np.where(x > 0.12345, 1.0, 0.0), (0.12345,)), 1)
    assert step.boundaries == (0.12345,)
    assert step.levels == (0.0, 1.0)
    assert step.error == 0


@pytest.mark.parametrize("n", [128, 129, 300])
def test_search_does_not_depend_on_its_chunks(n, monkeypatch):
    whole = on_grid("mish", 3, n)
    monkeypatch.setattr(solver, "_ROWS", 17)
    assert on_grid("mish", 3, n) == whole


@pytest.mark.parametrize(("function", "bits"), [("gelu", 3), ("tanh", 2), ("selu", 4)])
def test_error_is_the_integral_of_the_squared_difference(function, bits):
    step = table(function, bits)
    width = 1e-4
    x = -10 + width * (np.arange(200_000) + 0.5)
    integral = ((CURVES[function].slope(x) - step(x)) ** 2).sum() * width
    # Midpoints err where a cell holds a boundary, by at most the jump of q (1 at most) there.
    assert step.error == pytest.approx(integral, abs=width * (np.diff(step.levels) ** 2).sum())


def test_refine_reaches_a_stationary_point_below_the_grid_error():
    fine = table("silu", 3)
    assert fine.error < on_grid("silu", 3, solver.CELLS)[1]
    levels = np.array(fine.levels)
    slope = CURVES["silu"].slope(np.array(fine.boundaries))
    # equation 5: f' at a boundary is the mean of its neighbours
    assert np.allclose(slope, (levels[1:] + levels[:-1]) / 2, rtol=0, atol=1e-6)


def test_parity_halves_the_line_for_even_derivatives_only():
    assert table("tanh", 2).parity == "even"
    assert table("gelu", 2).parity == "plain"
    assert solve(CURVES["tanh"], 1, (-10, 9)).parity == "plain"


@pytest.mark.parametrize("bits", [0, 9, True, 2.0])
def test_solve_names_the_bits_that_it_refuses(bits):
    with pytest.raises(ValueError, match=f"bits {bits}"):
        solve(CURVES["gelu"], bits)
