"""Allocation against all allocations one by one; the widths that sites have while training runs."""

import itertools
import math
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memtrain.activations.adaptive.bit_widths import CAP, WIDTHS, BitWidths, allocate, uniform
from memtrain.activations.saved.site import Site
from memtrain.compressors import DerivativeCode, Group, Host, Identity, Samples
from memtrain.compressors.auto import Auto

cost = st.floats(0, 1e4)
items = st.lists(st.tuples(cost, st.integers(1, 50)), min_size=1, max_size=3)
A, B, C = (Site(name, "linear", "input") for name in "abc")
GROUP, SAMPLES = Auto(template=Group(group_size=64)), Auto(template=Samples(group_size=64))


def used(bits, sizes):
    return sum(b * size for b, size in zip(bits, sizes, strict=True))


def objective(costs, bits):
    """The variance that `allocate` minimises."""
    return sum(c / (2.0**b - 1) ** 2 for c, b in zip(costs, bits, strict=True))


def best(costs, sizes, budget):
    fitting = (
        bits for bits in itertools.product(WIDTHS, repeat=len(costs)) if used(bits, sizes) <= budget
    )
    return min(objective(costs, bits) for bits in fitting)


def last_cut(costs, bits):
    """What the dearest cut that was made cost: an upper bound of the last one's."""
    return max(
        objective([c], [b]) - objective([c], [b + 1]) if b < WIDTHS[-1] else 0.0
        for c, b in zip(costs, bits, strict=True)
    )


WORKED = {  # sensitivities, sizes and a budget, and the bits of each
    # 8 bits each take 24 of the 6 bits; every cut of the first costs 100 times the others'.
    # At (4, 1, 1) the terms are 100/225 + 1 + 1; (3, 2, 1) gives 100/49 + 1/9 + 1, more.
    "the first is sensitive": (([100.0, 1.0, 1.0], [1, 1, 1], 6), [4, 1, 1]),
    # A cut from 3 to 2 bits costs either item 50, and frees 3 times as much of the larger one.
    "a large item is cut first": (([550.0, 549.0], [3, 1], 10), [2, 3]),
    "no items": (([], [], 0), []),
    "nothing to cut": (([1.0, 2.0], [5, 6], 8 * 11), [8, 8]),
    "a sensitivity of zero": (([0.0, 5.0], [1, 1], 9), [1, 8]),
    "a budget met to the bit": (([1.0] * 10, [0.1] * 10, 0.1 * 10 * 2), [2] * 10),
    **{
        f"a sensitivity of {bad}": (([bad, 1.0], [1, 1], 9), allocate([CAP, 1.0], [1, 1], 9))
        for bad in (math.nan, math.inf, 1e300)
    },
}


@pytest.mark.parametrize("case", WORKED)
def test_a_case_worked_by_hand(case):
    given, bits = WORKED[case]
    assert allocate(*given) == bits


@settings(max_examples=200, deadline=None)
@given(items, st.floats(0, 1))
@example([(7200.0, 1), (1.192092896e-07, 1)], 0.9999999999999999)
def test_the_gap_to_the_best_is_below_the_last_cut(items, share):
    costs, sizes = zip(*items, strict=True)
    budget = (1 + share * (WIDTHS[-1] - 1)) * sum(sizes)
    bits = allocate(costs, sizes, budget)
    assert used(bits, sizes) <= budget * (1 + 1e-9)
    reached = objective(costs, bits)
    gap = reached - best(costs, sizes, budget * (1 + 1e-9))
    # A term is rounded twice and added once, half an epsilon each, in both of the gap's sums.
    rounding = (len(costs) + 2) * sys.float_info.epsilon * reached
    assert gap <= last_cut(costs, bits) + rounding


@settings(max_examples=200, deadline=None)
@given(st.lists(cost, min_size=1, max_size=3), st.data())
def test_equal_sizes_give_the_best(costs, data):
    budget = data.draw(st.integers(len(costs), 8 * len(costs)))
    bits = allocate(costs, [1] * len(costs), budget)
    expected = best(costs, [1] * len(costs), budget)
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


# -- the widths that sites have --------------------------------------------------------------


@pytest.mark.parametrize("average", [1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 8])
def test_uniform_has_the_average(average):
    widths = uniform(average)
    assert sum(widths) / len(widths) == average
    assert max(widths) - min(widths) <= 1
    assert max(widths) <= 8


def test_the_first_allocation_is_uniform():
    bits = BitWidths(2.5)
    assert bits.resolve(A, SAMPLES) == Samples(bits=(3, 2), group_size=64)
    assert bits.resolve(B, GROUP) == Group(bits=2, group_size=64)


def test_templates_keep_everything_but_their_bits():
    auto = Auto(template=Host(inner=Samples(group_size=128)))
    expected = Host(inner=Samples(bits=(5, 1), group_size=128))
    assert auto.with_bits((5, 1)) == expected
    assert auto.per_sample
    assert not GROUP.per_sample
    assert GROUP.group_size == 64


@pytest.mark.parametrize("template", [Identity(), DerivativeCode(), Host(inner=Identity())])
def test_only_groups_have_automatic_bits(template):
    with pytest.raises(ValueError, match="allowed: group, samples"):
        Auto(template=template)


def test_solve_shares_the_budget_by_need():
    bits = BitWidths(2.0)
    for site in (A, B):
        bits.resolve(site, GROUP)
    bits.solve({A.name: [(100.0, 10)], B.name: [(0.0, 10)]})
    # B is cut to one bit; of 40 bits 30 are left for A
    assert bits.resolve(A, GROUP).bits == 3
    assert bits.resolve(B, GROUP).bits == 1
    assert bits.stale == {A.name, B.name}


def test_samples_are_pooled_over_sites():
    bits = BitWidths(2.0)
    bits.solve({A.name: [(0.0, 4), (64.0, 4), (0.0, 4)], B.name: [(0.0, 4)] * 3})
    # 12 bits for six equal items: five at 1, the sensitive one at 7
    assert bits.resolve(A, SAMPLES).bits == (7, 1, 1)
    assert bits.resolve(B, SAMPLES).bits == (1, 1, 1)


def test_sites_that_share_a_payload_have_equal_compressors():
    bits = BitWidths(3.0)
    bits.leaders = {B.name: A.name}
    bits.solve({A.name: [(1.0, 4), (50.0, 4)], C.name: [(1.0, 8)]})
    assert bits.resolve(A, SAMPLES) == bits.resolve(B, SAMPLES)
    assert bits.stale >= {A.name, B.name}


def test_sites_that_are_gone_keep_their_bits_and_new_ones_start_uniform():
    bits = BitWidths(4.0)
    bits.solve({A.name: [(9.0, 4)], B.name: [(1.0, 4)]})
    before = bits.widths[A.name]
    bits.solve({B.name: [(1.0, 4)]})
    assert bits.widths[A.name] == before
    assert bits.widths[B.name] == (4,)
    assert bits.resolve(C, GROUP).bits == 4


def test_a_common_factor_does_not_matter():
    widths = []
    for scale in (1.0, 2.0**40):
        bits = BitWidths(3.0)
        bits.solve({A.name: [(5.0 * scale, 4)], B.name: [(1e-3 * scale, 4)]})
        widths.append(bits.widths)
    assert widths[0] == widths[1]


def test_state_goes_on():
    bits, other = BitWidths(2.0), BitWidths(2.0)
    bits.leaders = {B.name: A.name}
    bits.solve({A.name: [(1.0, 4), (50.0, 4)]})
    other.resolve(C, GROUP)
    other.load_state_dict(bits.state_dict())
    assert other.resolve(B, SAMPLES) == bits.resolve(B, SAMPLES)
    assert other.stale == {C.name}


def test_nothing_to_solve():
    bits = BitWidths(2.0)
    bits.solve({})
    assert bits.widths == {}


@pytest.mark.parametrize("average", [0.5, 9, math.nan])
def test_average_out_of_range(average):
    with pytest.raises(ValueError, match="average_bits="):
        BitWidths(average)
