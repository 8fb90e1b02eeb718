"""The widths that sites have: uniform at first, then by need, the same for shared payloads."""

import math

import pytest

from memtrain.activations.adaptive.bit_widths import Bits, Need, uniform
from memtrain.activations.saved.site import Site
from memtrain.compressors import DerivativeCode, Group, Host, Identity, Samples
from memtrain.compressors.auto import Auto

A, B, C = (Site(name, "linear", "input") for name in "abc")
GROUP, SAMPLES = Auto(template=Group(group_size=64)), Auto(template=Samples(group_size=64))


@pytest.mark.parametrize("average", [1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 8])
def test_uniform_has_the_average(average):
    widths = uniform(average)
    assert sum(widths) / len(widths) == average
    assert max(widths) - min(widths) <= 1
    assert max(widths) <= 8


def test_the_first_allocation_is_uniform():
    bits = Bits(2.5)
    assert bits.resolve(A, SAMPLES) == Samples(bits=(3, 2), group_size=64)
    assert bits.resolve(B, GROUP) == Group(bits=2, group_size=64)


def test_templates_keep_everything_but_their_bits():
    auto = Auto(template=Host(inner=Samples(bounds="fp32")))
    expected = Host(inner=Samples(bits=(5, 1), bounds="fp32", weights=(2.0, 1.0)))
    assert auto.with_bits((5, 1), (2.0, 1.0)) == expected
    assert auto.per_sample
    assert not GROUP.per_sample
    assert GROUP.group_size == 64


@pytest.mark.parametrize("template", [Identity(), DerivativeCode(), Host(inner=Identity())])
def test_only_groups_have_automatic_bits(template):
    with pytest.raises(ValueError, match="allowed: group, samples"):
        Auto(template=template)


def test_solve_shares_the_budget_by_need():
    bits = Bits(2.0)
    for site in (A, B):
        bits.resolve(site, GROUP)
    bits.solve({A.name: Need([100.0], [10]), B.name: Need([0.0], [10])})
    # B is cut to one bit; of 40 bits 30 are left for A
    assert bits.resolve(A, GROUP).bits == 3
    assert bits.resolve(B, GROUP).bits == 1
    assert bits.stale == {A.name, B.name}


def test_samples_are_pooled_over_sites():
    bits = Bits(2.0)
    bits.solve({A.name: Need([0.0, 64.0, 0.0], [4] * 3), B.name: Need([0.0] * 3, [4] * 3)})
    # 12 bits for six equal items: five at 1, the sensitive one at 7
    assert bits.resolve(A, SAMPLES).bits == (7, 1, 1)
    assert bits.resolve(B, SAMPLES).bits == (1, 1, 1)


def test_sites_that_share_a_payload_have_equal_compressors():
    bits = Bits(3.0)
    bits.leaders = {B.name: A.name}
    bits.weights = {A.name: (1.0, 2.0)}
    bits.solve({A.name: Need([1.0, 50.0], [4, 4]), C.name: Need([1.0], [8])})
    assert bits.resolve(A, SAMPLES) == bits.resolve(B, SAMPLES)
    assert bits.stale >= {A.name, B.name}


def test_sites_that_are_gone_keep_their_bits_and_new_ones_start_uniform():
    bits = Bits(4.0)
    bits.solve({A.name: Need([9.0], [4]), B.name: Need([1.0], [4])})
    before = bits.widths[A.name]
    bits.solve({B.name: Need([1.0], [4])})
    assert bits.widths[A.name] == before
    assert bits.widths[B.name] == (4,)
    assert bits.resolve(C, GROUP).bits == 4


def test_a_common_factor_does_not_matter():
    widths = []
    for scale in (1.0, 2.0**40):
        bits = Bits(3.0)
        bits.solve({A.name: Need([5.0 * scale], [4]), B.name: Need([1e-3 * scale], [4])})
        widths.append(bits.widths)
    assert widths[0] == widths[1]


def test_bad_sensitivities_get_the_most():
    for bad in (math.nan, math.inf):
        bits = Bits(3.0)
        bits.solve({A.name: Need([bad], [4]), B.name: Need([1.0], [4])})
        assert bits.widths[A.name] > bits.widths[B.name]


def test_state_goes_on():
    bits, other = Bits(2.0), Bits(2.0)
    bits.leaders = {B.name: A.name}
    bits.solve({A.name: Need([1.0, 50.0], [4, 4])})
    other.resolve(C, GROUP)
    other.load(bits.state())
    assert other.resolve(B, SAMPLES) == bits.resolve(B, SAMPLES)
    assert other.stale == {C.name}


def test_nothing_to_solve():
    bits = Bits(2.0)
    bits.solve({})
    assert bits.widths == {}


@pytest.mark.parametrize("average", [0.5, 9, math.nan])
def test_average_out_of_range(average):
    with pytest.raises(ValueError, match="average_bits="):
        Bits(average)
