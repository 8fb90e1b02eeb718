"""The knapsack's solutions exist, lie on the hull of all of them, and are close to the optimum."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from memtrain.planner.knapsack import Item, Option, Segment, solve
from tests.planner.nets import everything

integers = st.integers(0, 9)
options = st.builds(Option, integers.map(float), integers.map(float), st.integers(0, 3).map(float))
segments_of = st.lists(
    st.builds(
        Segment,
        st.lists(
            st.builds(Item, st.lists(options, min_size=1, max_size=3)), min_size=1, max_size=2
        ),
        st.none() | options,
        integers.map(float),
        integers.map(float),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(segments_of, st.integers(0, 9))
def test_what_is_found_exists(segments, max_error):
    plans = {plan[:4] for plan in everything(segments, max_error)}
    found = solve(segments, max_error)
    assert {plan[:4] for plan in found} <= plans
    assert all(plan.error <= max_error for plan in found)


@settings(max_examples=60, deadline=None)
@given(segments_of, st.floats(0, 10))
def test_every_corner_of_the_hull_of_all_plans_is_found(segments, price):
    """For any price of a byte none of all plans is cheaper than the cheapest found."""

    def cheapest(plans):
        return min(plan.seconds + price * plan.saved for plan in plans)

    plans = everything(segments, 100)
    assert cheapest(solve(segments, 100)) == pytest.approx(cheapest(plans))


def blocks(n_blocks, n_items):
    """Transformer-like: items of different sizes, 8 to 2 bits, blocks that may be recomputed."""
    sizes = torch.rand(n_blocks, n_items, generator=torch.Generator().manual_seed(0)).tolist()
    return [
        Segment(
            [
                Item(
                    [Option(0.0, 32 * size, 0.0)]
                    + [
                        Option(size * (1 + b / 32), b * size, 4.0 ** (2 - b))
                        for b in (8, 6, 4, 3, 2)
                    ]
                )
                for size in row
            ],
            Option(6.0, 1.0, 0.0),
            32 * sum(row),
            1.0,
        )
        for row in sizes
    ]


def optimum(segments, room, max_error):
    """Seconds of the linear relaxation, by scipy: no plan that fits is faster."""
    columns, one_each = [], []
    for segment in segments:
        again = len(columns)
        columns.append(segment.recompute)
        for item in segment.items:
            first = len(columns)
            columns += item.options
            one_each.append([again, *range(first, len(columns))])
    table = np.array([(own.seconds, own.nbytes, own.error) for own in columns])
    chosen = np.zeros((len(one_each), len(columns)))
    for row, own in enumerate(one_each):
        chosen[row, own] = 1
    limits = LinearConstraint(table[:, 1:].T, ub=[room, max_error])
    return milp(table[:, 0], constraints=[limits, LinearConstraint(chosen, 1, 1)],
                bounds=Bounds(0, 1)).fun  # fmt: skip


def test_solutions_come_close_to_the_optimum_where_plans_are_too_many_to_list():
    segments = blocks(6, 8)
    max_error = 48 * 4.0**-2
    found = solve(segments, max_error)
    low, high = min(p.saved for p in found), max(p.saved for p in found)
    for share in (0.2, 0.5, 0.8):
        room = low + share * (high - low)
        best = min(plan.seconds for plan in found if plan.saved <= room)
        least = optimum(segments, room, max_error)
        assert 0 < least <= best <= 1.05 * least
