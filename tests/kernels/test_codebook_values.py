"""Codebooks against values worked by hand, and what all of them have in common."""

import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode

from memtrain.kernels.codebook import values
from memtrain.kernels.codebook.values import CODEBOOKS, Codebook, codebook, float_bits

FLOATS = ("E2M1", "E3M0", "E1M2", "E2M2", "E4M3", "E5M2", "E3M4")


def every_book():
    """Each codebook at each number of bits, with and without a sign, that there is."""
    for name, bits, signed in itertools.product((*CODEBOOKS, *FLOATS), range(2, 9), (False, True)):
        if (name, signed) == ("DE-0", True) or float_bits(name, signed=signed) not in (None, bits):
            continue
        yield Codebook(name, bits, signed)


def test_dynamic_exponents_of_two_and_three_bits():
    # Signed, m exponents: 2**i cells of [0.1, 1] in the decade i under the top one.
    assert codebook("DE", bits=2, signed=True) == (-0.55, 0.0, 0.55, 1.0)
    want = (-0.775, -0.325, -0.055, 0, 0.055, 0.325, 0.775, 1)
    assert codebook("DE", bits=3, signed=True) == pytest.approx(want, abs=1e-15)
    # Unsigned has twice the cells: of [0.1, 1], 0.45 wide.
    assert codebook("DE", bits=2, signed=False) == pytest.approx((0, 0.325, 0.775, 1), abs=1e-15)
    want = (0, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1)
    assert codebook("DE", bits=3, signed=False) == pytest.approx(want, abs=1e-15)
    want = (0.325, 0.325, 0.775, 1)
    assert codebook("DE-0", bits=2, signed=False) == pytest.approx(want, abs=1e-15)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("signed", [False, True])
def test_dynamic_exponents_hold_their_decades(bits, signed):
    values = codebook("DE", bits=bits, signed=signed)
    for decade in range(bits - 1):
        top = 10.0 ** (decade - bits + 2)
        inside = [v for v in values if top / 10 < v < top]
        cells = 2 ** (decade + (not signed))
        assert len(inside) == cells
        assert inside[0] == pytest.approx(top * (0.1 + 0.45 / cells))
        assert inside[-1] == pytest.approx(top * (1 - 0.45 / cells))
    zero = values.index(0.0)
    assert values[-1] == 1.0
    assert zero == (2 ** (bits - 1) - 1 if signed else 0)
    assert [-v for v in values[:zero]] == list(values[zero + 1 : -1][::-1] if signed else ())


def test_powers():
    assert codebook("Power-2", bits=2, signed=False) == (1 / 16, 1 / 4, 9 / 16, 1)
    assert codebook("Power-3", bits=2, signed=False) == (1 / 64, 1 / 8, 27 / 64, 1)
    third = 1 / 3
    want = (-1, -(third**2), third**2, 1)
    assert codebook("Power-2", bits=2, signed=True) == pytest.approx(want)
    assert codebook("Power-3", bits=2, signed=True) == pytest.approx((-1, -(third**3), third**3, 1))


def test_small_floats():
    half = [v / 6 for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
    assert codebook("E2M1", bits=3, signed=False) == pytest.approx(half)
    signed = codebook("E2M1", bits=4, signed=True)
    assert signed == pytest.approx([-1, *(-v for v in half[:0:-1]), *half])
    assert codebook("E3M0", bits=3, signed=False) == (0, *(2.0**-k for k in range(6, -1, -1)))


def test_the_eight_bit_float_is_torchs():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).double()
    finite = every[every.isfinite() & (every >= 0)].unique()
    ours = torch.tensor(codebook("E5M2", bits=7, signed=False), dtype=torch.float64)
    # torch's top exponent holds Inf and NaN: our table has one octave more
    ours = ours / ours[len(finite) - 1]
    assert torch.allclose(ours[: len(finite)], finite / finite[-1], rtol=2.0**-50, atol=0)
    assert len(ours) == len(finite) + 4


@pytest.mark.parametrize("case", list(every_book()), ids=lambda b: f"{b.name}-{b.bits}-{b.signed}")
def test_books_fill_their_bits_and_ascend(case):
    values = codebook(case.name, bits=case.bits, signed=case.signed)
    repeated = case.name == "DE-0" or (case.name in FLOATS and case.signed)
    assert len(values) == 2**case.bits
    assert list(values) == sorted(values)
    assert len(set(values)) == 2**case.bits - repeated
    assert values[-1] == 1.0
    assert values[0] >= (-1 if case.signed else 0)


def test_tables_that_a_simulated_step_asks_for_first_are_real():
    book, device = Codebook("Power-3", 2, signed=True), torch.device("cpu")
    values._table.cache_clear()
    with FakeTensorMode():
        made = book.values(device), book.midpoints(device)
    assert {type(table) for table in made} == {torch.Tensor}


@pytest.mark.parametrize(
    ("name", "bits", "signed"),
    [
        ("E2M1", 3, True),
        ("E2M1", 4, False),
        ("E6M1", 8, True),
        ("E0M3", 4, True),
        ("Power-4", 4, 0),
        ("de", 4, True),
        ("DE", 1, True),
        ("DE-0", 4, True),
    ],
)
def test_bad_codebooks_raise(name, bits, signed):
    with pytest.raises(ValueError, match=r"allowed|must be 2 to 8"):
        codebook(name, bits=bits, signed=signed)
