"""The greedy allocation against all allocations, one by one."""

import itertools
import math
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memtrain.activations.adaptive.allocate import CAP, WIDTHS, allocate, objective

LADDER = (1, 2, 4, 8, 32)
cost = st.floats(0, 1e4)
items = st.lists(st.tuples(cost, st.integers(1, 50)), min_size=1, max_size=4)


def used(bits, sizes):
    return sum(b * size for b, size in zip(bits, sizes, strict=True))


def best(costs, sizes, budget, allowed):
    fitting = (
        bits
        for bits in itertools.product(allowed, repeat=len(costs))
        if used(bits, sizes) <= budget
    )
    return min(objective(costs, bits) for bits in fitting)


def last_cut(costs, bits, allowed):
    """What the dearest cut that was made cost: an upper bound of the last one's."""
    above = dict(itertools.pairwise(sorted(allowed)))
    return max(
        objective([c], [b]) - objective([c], [above[b]]) if b in above else 0.0
        for c, b in zip(costs, bits, strict=True)
    )


def test_a_case_worked_by_hand():
    # 8 bits each take 24 of the 6 bits; every cut of the first costs 100 times the others'.
    # At (4, 1, 1) the terms are 100/225 + 1 + 1; (3, 2, 1) gives 100/49 + 1/9 + 1, more.
    assert allocate([100.0, 1.0, 1.0], [1, 1, 1], 6) == [4, 1, 1]
    assert objective([100.0, 1.0, 1.0], [4, 1, 1]) == pytest.approx(100 / 225 + 2)


def test_a_large_item_is_cut_first_for_it_frees_more():
    # 10 bits: the larger item's two cuts free 6 and cost 50; both items at 2 would cost 100.
    assert allocate([550.0, 549.0], [3, 1], 10, allowed=(1, 2, 3, 4)) == [2, 3]


@settings(max_examples=200, deadline=None)
@given(items, st.floats(0, 1), st.sampled_from([WIDTHS[:4], LADDER]))
@example([(7200.0, 1), (1.192092896e-07, 1)], 0.9999999999999999, WIDTHS[:4])
def test_the_gap_to_the_best_is_below_the_last_cut(items, share, allowed):
    costs, sizes = zip(*items, strict=True)
    low, high = (bound * sum(sizes) for bound in (min(allowed), max(allowed)))
    budget = low + share * (high - low)
    bits = allocate(costs, sizes, budget, allowed=allowed)
    assert used(bits, sizes) <= budget * (1 + 1e-9)
    reached = objective(costs, bits)
    gap = reached - best(costs, sizes, budget * (1 + 1e-9), allowed)
    # A term is rounded twice and added once, half an epsilon each, in both of the gap's sums.
    rounding = (len(costs) + 2) * sys.float_info.epsilon * reached
    assert gap <= last_cut(costs, bits, allowed) + rounding


@settings(max_examples=200, deadline=None)
@given(st.lists(cost, min_size=1, max_size=4), st.data())
def test_equal_sizes_give_the_best(costs, data):
    budget = data.draw(st.integers(len(costs), 5 * len(costs)))
    allowed = WIDTHS[:5]
    bits = allocate(costs, [1] * len(costs), budget, allowed=allowed)
    expected = best(costs, [1] * len(costs), budget, allowed)
    assert objective(costs, bits) == pytest.approx(expected, rel=1e-12)


@settings(max_examples=200, deadline=None)
@given(items, st.floats(1, 8), st.floats(0, 2))
def test_more_budget_takes_no_bit_away(items, average, more):
    costs, sizes = zip(*items, strict=True)
    small = allocate(costs, sizes, average * sum(sizes))
    large = allocate(costs, sizes, (average + more) * sum(sizes))
    assert all(a <= b for a, b in zip(small, large, strict=True))


@settings(max_examples=100, deadline=None)
@given(st.lists(cost, min_size=2, max_size=30), st.floats(1, 8))
def test_of_equal_sizes_the_more_sensitive_has_no_fewer_bits(costs, average):
    bits = allocate(costs, [3] * len(costs), average * 3 * len(costs))
    ranked = sorted(zip(costs, bits, strict=True))
    for (lower, fewer), (higher, more) in itertools.pairwise(ranked):
        assert fewer <= more or lower == higher


def test_no_items():
    assert allocate([], [], 0) == []


def test_nothing_to_cut_leaves_the_most_bits():
    assert allocate([1.0, 2.0], [5, 6], 8 * 11) == [8, 8]
    assert allocate([1.0], [5], 1e9, allowed=LADDER) == [32]


def test_zero_sensitivities_are_cut_to_the_ground_first():
    assert allocate([0.0, 5.0], [1, 1], 9) == [1, 8]
    bits = allocate([0.0, 0.0], [1, 1], 6)
    assert sum(bits) <= 6


def test_bad_sensitivities_count_as_the_cap():
    for bad in (math.nan, math.inf, 1e300):
        assert allocate([bad, 1.0], [1, 1], 9) == allocate([CAP, 1.0], [1, 1], 9)
        assert objective([bad], [1]) == CAP


def test_a_budget_met_to_the_bit_is_met():
    assert allocate([1.0] * 10, [0.1] * 10, 0.1 * 10 * 2) == [2] * 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], [1, 2], 9), "1 sensitivities, but 2 sizes"),
        (([-1.0], [1], 9), "sensitivity -1"),
        (([1.0], [0], 9), "size 0"),
        (([1.0, 1.0], [4, 4], 7), "budget=7 bits; allowed: 8 or more"),
        (([1.0], [1], math.nan), "budget=nan"),
    ],
)
def test_wrong_values_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        allocate(*arguments)


def test_widths_below_one_are_refused():
    with pytest.raises(ValueError, match="widths of 1 bit or more"):
        allocate([1.0], [1], 9, allowed=(0, 1))
