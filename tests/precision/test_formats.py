"""Float formats against exact arithmetic and torch's own casts; what they refuse."""

from fractions import Fraction
from itertools import pairwise
from math import inf, isinf, nan

import pytest
import torch

from memtrain.kernels.dispatch import backend
from memtrain.precision import (
    BF16,
    E4M3FN,
    E5M2,
    FP8_BACKWARD,
    FP8_FORWARD,
    FP16,
    IEEE_FP16,
    FloatFormat,
)

# -- the definition in exact arithmetic --------------------------------------------------------


def positive(form):
    """(code, number) of every finite number from 0 upwards, by the definition in `FloatFormat`."""
    usual = 2 ** (form.exponent_bits - 1) - 1
    for exponent in range(2**form.exponent_bits):
        for mantissa in range(2**form.mantissa_bits):
            top = exponent == 2**form.exponent_bits - 1
            if top and form.specials == "ieee":
                continue
            if top and form.specials == "nan" and mantissa == 2**form.mantissa_bits - 1:
                continue
            fraction = Fraction(mantissa, 2**form.mantissa_bits)
            scale = Fraction(2) ** (max(exponent, 1) - usual - form.bias)
            code = exponent * 2**form.mantissa_bits + mantissa
            yield code, (fraction + (1 if exponent else 0)) * scale


def past(form, table):
    """The number that a format with one more code would have next."""
    code, last = table[-1]
    exponent = max(code >> form.mantissa_bits, 1)
    usual = 2 ** (form.exponent_bits - 1) - 1
    return last + Fraction(2) ** (exponent - usual - form.bias - form.mantissa_bits)


def neighbours(form):
    """Ascending (code, number), the last one the first past the format's end."""
    table = list(positive(form))
    return [*table, (table[-1][0] + 1, past(form, table))]


def probes(form):
    """Every number, every tie, and the float32 numbers beside the ties, with what they round to."""
    rows = neighbours(form)
    end = rows[-1][0]
    for (code, low), (above, high) in pairwise(rows):
        tie = (low + high) / 2
        exact = torch.tensor(float(tie), dtype=torch.float32)
        assert Fraction(exact.item()) == tie
        up = above if form.rounding == "away" or code % 2 else code
        yield low, code
        yield tie, up
        yield Fraction(torch.nextafter(exact, exact * 0).item()), code
        yield Fraction(torch.nextafter(exact, exact * 4).item()), above
    yield rows[-1][1], end
    yield 4 * rows[-1][1], end


def small_formats():
    for width in range(3, 9):
        for exponent_bits in range(1, width):
            for specials in ("none", "nan", "ieee"):
                for rounding in ("away", "even"):
                    for overflow in ("saturate", "inf"):
                        fields = (exponent_bits, width - 1 - exponent_bits)
                        try:
                            yield FloatFormat(*fields, 0, overflow, rounding, specials)
                        except ValueError:
                            # no mantissa for NaN, or 7 exponent bits whose range is too wide
                            assert fields[1] == 0 or exponent_bits == 7


SMALL = [
    *small_formats(),
    FP8_FORWARD,
    FloatFormat(4, 3, -9, "inf"),
    FloatFormat(2, 5, 100, "inf", "even", "ieee"),
]


def label(form):
    return "-".join(str(value) for value in vars(form).values())


def overflowed(form):
    if form.overflow == "saturate":
        return form.max
    return nan if form.specials == "nan" else inf


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("form", SMALL, ids=label)
def test_every_number_and_every_tie(name, form):
    values = dict(positive(form))
    rows = list(probes(form))
    x = torch.tensor([float(value) for value, _ in rows])
    expected = [float(values[c]) if c in values else overflowed(form) for _, c in rows]
    expected = torch.tensor(expected)
    mark = 2 ** (form.bits - 1)
    special = {"none": mark, "nan": mark - 1, "ieee": len(values)}[form.specials]
    special = len(values) - 1 if form.overflow == "saturate" else special
    codes = torch.tensor([c if c in values else special for _, c in rows], dtype=torch.uint8)
    with backend(name):
        y, count = form.round_count(x)
        down, again = form.round_count(-x)
        got = form.encode(x)
        minus = form.encode(-x)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(down, -expected, rtol=0, atol=0, equal_nan=True)
    over = sum(c not in values for _, c in rows)
    assert (count.item(), again.item()) == (over, over)
    assert torch.equal(got, codes)
    unsigned = codes.int() == {"none": 0, "nan": mark - 1, "ieee": -1}[form.specials]  # zero, NaN
    assert torch.equal(minus, torch.where(unsigned, codes, codes | mark))


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("form", SMALL, ids=label)
def test_every_code_decodes_to_its_number(name, form):
    values, mark = dict(positive(form)), 2 ** (form.bits - 1)
    expected = []
    for code in range(2 * mark):
        magnitude, sign = code % mark, -1 if code >= mark else 1
        if form.specials == "none" and code == mark:
            expected.append(nan)
        elif magnitude in values:
            expected.append(sign * float(values[magnitude]))
        elif form.specials == "ieee" and magnitude == len(values):
            expected.append(sign * inf)
        else:
            expected.append(nan)
    with backend(name):
        got = form.decode(torch.arange(2 * mark, dtype=torch.uint8))
        back = form.encode(got)
    torch.testing.assert_close(got, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)
    # every code but other NaNs is its number's
    number = got.isfinite() if form.overflow == "saturate" else ~got.isnan()
    assert torch.equal(back[number].long(), torch.arange(2 * mark)[number])
    assert form.decode(back[got.isnan()]).isnan().all()


def test_limits_follow_from_the_numbers():
    for form in SMALL:
        values = [value for _, value in positive(form)]
        assert form.max == float(values[-1])
        assert form.min_subnormal == float(values[1])


# -- the paper's formats, from its code's own table --------------------------------------------


@pytest.mark.parametrize(
    ("form", "largest", "least", "overflow"),
    [
        (FP16, 2.0**32 * (2 - 2.0**-9), 2.0**-39, 2.0**32 * (2 - 2.0**-10)),
        (FP8_FORWARD, 30.0, 2.0**-13, 31.0),
        (FP8_BACKWARD, 114688.0, 2.0**-16, 122880.0),
    ],
)
def test_the_papers_table(form, largest, least, overflow):
    assert (form.max, form.min_subnormal) == (largest, least)
    under = torch.nextafter(torch.tensor(overflow), torch.tensor(0.0)).item()
    y, count = form.round_count(torch.tensor([under, overflow]))
    assert y.tolist() == [largest, inf if form.overflow == "inf" else largest]
    assert count.item() == 1
    half = torch.tensor(least / 2)
    lower = torch.nextafter(half, torch.tensor(0.0))
    assert form.round(torch.stack([half, lower])).tolist() == [least, 0.0]  # half is a tie: away


def test_worked_cases():
    # 1.0625 = 1 + 2**-4 lies halfway between 1 and 1.125 with three mantissa bits.
    assert FP8_FORWARD.round(torch.tensor([1.0625, -1.0625])).tolist() == [1.125, -1.125]
    even = FloatFormat(4, 3, 4, rounding="even")
    assert even.round(torch.tensor([1.0625, 1.1875])).tolist() == [1.0, 1.25]
    # 1 = 2**(e - 7 - 4) for e = 11: code 11 * 8; 30 = 1.111b * 2**4 for e = 15.
    x = torch.tensor([1.0, -1.0, 30.0, 2.0**-13, -0.0, nan])
    assert FP8_FORWARD.encode(x).tolist() == [88, 216, 127, 1, 0, 128]
    zero = FP8_FORWARD.round(torch.tensor([-0.0, -(2.0**-20)]))
    assert zero.signbit().all()
    assert FP8_BACKWARD.decode(FP8_BACKWARD.encode(torch.tensor([inf, -inf]))).isnan().all()
    assert FP8_FORWARD.round(torch.tensor([inf, -inf])).tolist() == [30.0, -30.0]


# -- torch's own casts --------------------------------------------------------------------------

CASTS = {
    IEEE_FP16: torch.float16,
    BF16: torch.bfloat16,
    E4M3FN: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
}


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("form", CASTS, ids=[str(dtype) for dtype in CASTS.values()])
def test_rounding_equals_torchs_casts(name, form):
    whole = torch.arange(2**16) << 16
    halves = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x3000])
    words = (whole[:, None] | halves).flatten()
    x = torch.where(words > 2**31 - 1, words - 2**32, words).int().view(torch.float32)
    if form == E4M3FN:  # past it torch's versions differ: NaN or saturation
        over = x.abs() > 464
        assert torch.equal(form.round(x[over]), x[over].sign() * 448)
        x = x[~over]
    cast = x.to(CASTS[form])
    with backend(name):
        y, code = form.round(x), form.encode(x)
        back = form.decode(code)
    wide, number = cast.float(), ~cast.float().isnan()
    assert torch.equal(y.isnan(), ~number)
    assert torch.equal(y[number].view(torch.int32), wide[number].view(torch.int32))
    assert torch.equal(code[number], cast.view(code.dtype)[number])
    assert torch.equal(back[number].view(torch.int32), wide[number].view(torch.int32))
    assert back[~number].isnan().all()


@pytest.mark.parametrize("form", [IEEE_FP16, BF16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_every_sixteen_bit_code(form, name):
    code = torch.arange(-(2**15), 2**15).to(torch.int16)
    own = code.view(CASTS[form])
    with backend(name):
        assert torch.equal(form.decode(code).isnan(), own.isnan())
        number = ~own.isnan()
        assert torch.equal(form.decode(code)[number], own.float()[number])
        assert torch.equal(form.encode(own)[number], code[number])


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((0, 7), "exponent_bits=0"),
        ((-1, 7), "exponent_bits=-1"),
        ((4.0, 3), r"exponent_bits=4\.0"),
        ((True, 3), "exponent_bits=True"),
        ((4, -1), "mantissa_bits=-1"),
        ((5, 11), "17 bits with the sign; allowed: 3 to 16"),
        ((1, 0), "2 bits with the sign"),
        ((9, 3), "exponent_bits=9: a range beyond float32's"),
        ((8, 7), "exponent_bits=8: a range beyond float32's"),
        ((4, 3, 200), "bias=200; allowed: -119 to 117, or 120"),
        ((4, 3, -120), "bias=-120"),
        ((4, 3, 118), "bias=118"),
        ((4, 3, 1.5), r"bias=1\.5"),
        ((4, 3, 0, "wrap"), "overflow='wrap'; allowed: saturate, inf"),
        ((4, 3, 0, "inf", "up"), "rounding='up'; allowed: away, even, stochastic"),
        ((4, 3, 0, "inf", "even", "fn"), "specials='fn'; allowed: none, nan, ieee"),
        ((4, 0, 0, "inf", "even", "ieee"), "mantissa_bits=0"),
    ],
)
def test_wrong_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        FloatFormat(*fields)


def test_the_widest_formats_are_allowed():
    for form in (FloatFormat(4, 3, -119), FloatFormat(4, 3, 117), FloatFormat(4, 3, 120), BF16):
        assert isinf(form.max) is False
        ends = torch.tensor([form.max, form.min_subnormal])
        with backend("reference"):
            assert torch.equal(form.round(ends), ends)
        assert torch.equal(form.decode(form.encode(ends)), ends)
