"""Shapes, strides and values that nobody thought of, on every registered compressor.

A NaN that spoils more than its compressor states breaks the bound of an element beside it.
"""

import math
import pickle
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from memtrain.compressors import COMPRESSORS, Group, Identity, Key, Patch, Samples
from memtrain.kernels.dispatch import backend
from memtrain.precision import FORMATS, FloatFormat
from tests.compressors.stated_errors import BF16_MAX, STATED

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # the interpreter's
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FAKE = FakeTensorMode()

WIDTHS = st.integers(1, 8)
SIZES = st.sampled_from((8, 16, 64, 104, 256, 1000, 16384))
ROUNDINGS = st.sampled_from(("nearest", "stochastic"))
MAPS = st.sampled_from(
    [("DE", True), ("DE", False), ("DE-0", False), ("Linear", True), ("Linear", False)]
)
INNER = st.sampled_from([Group(bits=3), Samples(bits=(4, 1)), Patch(), Identity()])
FUNCTIONS = ("gelu", "silu", "relu", "sigmoid", "hardswish", "hardshrink", "hardtanh", "relu6")
FORMS = st.builds(FloatFormat, st.integers(2, 6), st.integers(0, 9), rounding=st.just("stochastic"))


def built(name, **fields):
    return st.deferred(lambda: st.builds(COMPRESSORS[name], **fields))


def mapped(name, **fields):
    return st.builds(
        lambda form, bits, **rest: COMPRESSORS[name](
            map=form[0], signed=form[1], bits=bits, **rest
        ),
        MAPS,
        st.integers(2, 8),
        **fields,
    )


GROUP = {"group_size": SIZES, "rounding": ROUNDINGS}
FIELDS: dict[str, st.SearchStrategy] = {
    "identity": built("identity"),
    "derivative": built("derivative", bits=st.integers(1, 4), function=st.sampled_from(FUNCTIONS)),
    "group": built("group", bits=WIDTHS, **GROUP),
    "samples": built("samples", bits=st.lists(WIDTHS, min_size=1, max_size=4), **GROUP),
    "host": built("host", inner=INNER),
    "integers": built("integers", limit=st.just(2**63)),
    "block": mapped(
        "block", rounding=ROUNDINGS, block_size=st.sampled_from((8, 16, 32, 128, 2048))
    ),
    "patch": built("patch", rounding=ROUNDINGS),
    "rank1": mapped("rank1", rounding=ROUNDINGS),
    "factored": built("factored"),
    "lloyd_max": built("lloyd_max"),
    "float": built("float", format=st.sampled_from(tuple(FORMATS)) | FORMS),
}
DTYPES = {"integers": (*INTEGERS, torch.bool), "float": FLOATS[:3]}
BAD = ("nan", "inf", "-inf")
VALUES = ("normal", "steps", "constant", "small", "denormal", "spread", "huge", "full", *BAD)
# These add numbers up: sums of the largest ones overflow.
MODEST = ("factored", "lloyd_max")
OF_EACH = {
    name: [v for v in VALUES if name not in MODEST or v not in ("huge", "full", "spread")]
    for name in COMPRESSORS
}
VIEWS = ("plain", "permuted", "strided", "expanded", "offset")

side = st.sampled_from((0, 1, 1, 2, 4, 5)) | st.integers(1, 40) | st.sampled_from((127, 257, 300))


@dataclass(frozen=True)
class Case:
    compressor: object
    shape: tuple
    dtype: torch.dtype
    view: str
    values: str
    seed: int


def smaller(shape, limit):
    """The shape with its longest sides halved to at most `limit` elements, zeros counted as 1."""
    shape = list(shape)
    while math.prod(max(1, size) for size in shape) > limit:
        longest = shape.index(max(shape))
        shape[longest] = (shape[longest] + 1) // 2
    return tuple(shape)


def cases(name, values):
    least = 2 if name in ("factored", "lloyd_max") else 0
    return st.builds(
        Case,
        FIELDS[name],
        st.lists(side, min_size=least, max_size=5).map(lambda shape: smaller(shape, 4096)),
        st.sampled_from(DTYPES.get(name, FLOATS)),
        st.sampled_from(VIEWS),
        values,
        st.integers(0, 2**32),
    )


# -- the tensor of a case ---------------------------------------------------------------------

OF_NORMAL = {
    "steps": lambda x, info: x.round(),  # ties, and zeros of both signs
    "constant": lambda x, info: torch.full_like(x, 0.3),
    "small": lambda x, info: x * info.smallest_normal,
    "denormal": lambda x, info: (x * 5).round() * info.smallest_normal * info.eps,
    "spread": lambda x, info: x**7 * 10 if info.bits == 16 else (4 * x) ** 29,
    "huge": lambda x, info: x * (min(info.max, BF16_MAX) / 8),
    "full": lambda x, info: x.sign() * info.max,
}


def filled(case, shape, random):
    dtype = case.dtype
    if dtype == torch.bool:
        return torch.rand(shape, generator=random) < 0.5
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        low, high = (info.min, info.max) if case.values in ("huge", "full") else (0, 100)
        return torch.randint(low, high, shape, generator=random, dtype=torch.int64).to(dtype)
    info, x = torch.finfo(dtype), torch.randn(shape, generator=random, dtype=torch.float64)
    x = OF_NORMAL.get(case.values, lambda x, info: x)(x, info)
    x = x.clamp(info.min, info.max).to(dtype)
    if type(case.compressor).__name__ == "Factored":
        x = x.abs()
    if case.values in BAD and x.numel():
        at = torch.randint(x.numel(), (), generator=random)
        x.view(-1)[at : at + 1 + 24 * (case.seed % 2)] = float(case.values)
    return x


def tensor(case):
    random, shape = torch.Generator().manual_seed(case.seed), case.shape
    if case.view == "permuted":
        order = torch.randperm(len(shape), generator=random).tolist()
        inverse = [order.index(dim) for dim in range(len(shape))]
        return filled(case, [shape[dim] for dim in order], random).permute(inverse)
    if case.view == "strided" and shape:
        return filled(case, (*shape[:-1], 3 * shape[-1]), random)[..., 1::3]
    if case.view == "expanded" and shape:
        at = int(torch.randint(len(shape), (), generator=random))
        once = [1 if dim == at else size for dim, size in enumerate(shape)]
        return filled(case, once, random).expand(shape)
    if case.view == "offset":
        return filled(case, (math.prod(shape) + 3,), random)[3:].view(shape)
    return filled(case, shape, random)


# -- the properties ---------------------------------------------------------------------------


def raw(x):
    """The bits of a tensor: NaN equals NaN, and 0 is not -0."""
    return x.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def equal(a, b):
    """Equal numbers: any NaN equals any other."""
    numbers = ((a == b) | ((a != a) & (b != b))).all()
    return a.dtype == b.dtype and a.shape == b.shape and bool(numbers)


def payloads(compare, a, b):
    return a.tensors.keys() == b.tensors.keys() and all(
        compare(a.tensors[name], b.tensors[name]) for name in a.tensors
    )


def check_error(name, case, x, y, packed, key):
    target, allowed = STATED[name](case.compressor, x, packed, key)
    target, allowed = target.double().reshape(-1), allowed.double().reshape(-1)
    y = y.reshape(-1).double()
    anything = allowed == math.inf
    assert torch.equal((y.isnan() | anything), (target.isnan() | anything))
    beside = y.isnan() | anything | (y == target)
    over = ((y - target).abs() - allowed)[~beside]
    assert (over <= 0).all(), f"over the stated error by {over.max()}"


def check_bytes(case, x, packed):
    """Without data a meta or (slower, so in an eighth of the cases) fake tensor takes as many."""
    if case.seed % 8:
        bare = case.compressor.compress(x.to("meta"), key=Key())
    else:
        with FAKE:
            bare = case.compressor.compress(FAKE.from_tensor(x), key=Key())
            y = case.compressor.decompress(bare)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
    if x.dtype in INTEGERS:
        assert packed.nbytes <= bare.nbytes  # their width follows the values
    else:
        assert packed.nbytes == bare.nbytes


def check(name, case):
    x, key = tensor(case), Key(seed=case.seed, site=3, step=1)
    before, version, strides = x.clone(), x._version, x.stride()
    packed = case.compressor.compress(x, key=key)
    y = case.compressor.decompress(packed)
    assert (packed.shape, packed.dtype) == (x.shape, x.dtype)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert same(x, before)
    assert (x._version, x.stride()) == (version, strides)
    check_error(name, case, x, y, packed, key)
    check_bytes(case, x, packed)
    # A pickled compressor is the same value, and equal keys give equal payloads.
    again = pickle.loads(pickle.dumps(case.compressor))
    assert again == case.compressor
    assert payloads(same, again.compress(x, key=key), packed)
    assert same(again.decompress(pickle.loads(pickle.dumps(packed))), y)
    for other in ("reference", "triton"):
        with backend(other):
            twin = case.compressor.compress(x, key=key)
            assert payloads(equal, twin, packed), other
            assert equal(case.compressor.decompress(packed), y), other


QUIET = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate, Phase.shrink),
}


def test_every_compressor_has_fields_and_a_stated_error():
    assert COMPRESSORS.keys() <= FIELDS.keys() == STATED.keys()


@pytest.mark.parametrize(
    ("name", "values"), [(name, one) for name, values in OF_EACH.items() for one in values]
)
def test_cases_that_nobody_thought_of(name, values):
    settings(max_examples=8, derandomize=True, **QUIET)(
        given(cases(name, st.just(values)))(lambda case: check(name, case))
    )()


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "values"), OF_EACH.items(), ids=str)
def test_many_cases_that_nobody_thought_of(name, values):
    # Other ones each night; a failure prints the case.
    settings(max_examples=2500, **QUIET)(
        given(cases(name, st.sampled_from(values)))(lambda case: check(name, case))
    )()


# -- what it found ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_groups_of_float16_stay_finite_where_their_bounds_round_beyond_its_range(name):
    x = torch.tensor([65504.0, -65504, 65500, 0] * 2, dtype=torch.float16)
    compressor = Group(bits=8, group_size=8, rounding="nearest")
    with backend(name):
        y = compressor.decompress(compressor.compress(x, key=Key()))
    assert y[:3].tolist() == [65504.0, -65504.0, 65504.0]
    assert float(y[3].abs()) <= 65536 / 255


@pytest.mark.parametrize("shape", [(0, 1), (1, 0), (0, 0, 1, 4), (3, 1, 0)])
def test_patches_of_no_elements(shape):
    packed = Patch().compress(torch.empty(shape), key=Key())
    assert packed.nbytes == 0
    assert Patch().decompress(packed).shape == shape
