"""Sizes as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.config.sizes import UNITS, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GB", 24_000_000_000),
        ("24GiB", 25_769_803_776),
        (" 24 gib ", 25_769_803_776),
        ("1.5KiB", 1536),
        (".5 MiB", 524_288),
        ("80.kB", 80_000),
        ("0.1TB", 100_000_000_000),
        ("2TiB", 2_199_023_255_552),
        ("7B", 7),
        ("0", 0),
        ("123", 123),
        (123, 123),
        # a float would lose the last digits
        ("123456789.123456789GB", 123_456_789_123_456_789),
        ("1.9B", 1),
    ],
)
def test_sizes_are_read(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["24 potatoes", "24G", "GiB", "", "-1GiB", -1, "1e9", "1.5", "1,5GiB", "24GiB!", "nan", "inf",
     "٣GiB", "1 2GiB"],
)  # fmt: skip
def test_the_error_of_a_wrong_size_names_what_is_allowed(text):
    with pytest.raises(ValueError, match=r"budget=.* is not a size; allowed: .*GiB"):
        parse_size(text, "budget")


@pytest.mark.parametrize("value", [1.5, None, True, [1]])
def test_what_is_neither_text_nor_a_whole_number_is_a_type_error(value):
    with pytest.raises(TypeError, match=r"size=.* is of type"):
        parse_size(value)


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNITS)))
def test_a_whole_number_of_any_unit_is_exact(number, unit):
    assert parse_size(f"{number}{unit}") == number * UNITS[unit]
    assert parse_size(f"{number} {unit.upper()}") == number * UNITS[unit]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.00 KiB"),
        (2**20 - 1, "1024.00 KiB"),
        (2**20, "1.00 MiB"),
        (2**40, "1,024.00 GiB"),
        (-(2**21), "-2.00 MiB"),
    ],
)
def test_sizes_are_shown(nbytes, text):
    assert format_size(nbytes) == text
