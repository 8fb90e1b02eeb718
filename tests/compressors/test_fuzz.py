"""Shapes, strides and values that nobody thought of, on every registered compressor.

What a compressor states of its error is `allowed` here, element by element: so a NaN that spoilt
more than the compressor says would break the bound of an element beside it.
"""

import math
import pickle
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from memtrain.compressors import COMPRESSORS, Group, Identity, Key, Patch, Samples
from memtrain.kernels.codebook import lloyd_max as lloyd
from memtrain.kernels.codebook.values import codebook
from memtrain.kernels.dispatch import backend
from memtrain.precision import FORMATS, FloatFormat

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
BF16_MAX = torch.finfo(torch.bfloat16).max
FAKE = FakeTensorMode()
U = 2.0**-24  # half a unit in float32's last place

WIDTHS = st.integers(1, 8)
SIZES = st.sampled_from((8, 16, 64, 104, 256, 1000, 16384))
ROUNDINGS = st.sampled_from(("nearest", "stochastic"))
BOUNDS = st.sampled_from(("bf16", "fp32"))
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


GROUP = {"group_size": SIZES, "rounding": ROUNDINGS, "bounds": BOUNDS}
FIELDS: dict[str, st.SearchStrategy] = {
    "identity": built("identity"),
    "derivative": built("derivative", bits=st.integers(1, 4), function=st.sampled_from(FUNCTIONS)),
    "group": built("group", bits=WIDTHS, **GROUP),
    "samples": built("samples", bits=st.lists(WIDTHS, min_size=1, max_size=4), **GROUP),
    "host": built("host", inner=INNER),
    "mask": built("mask"),
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
DTYPES = {"mask": (torch.bool,), "integers": INTEGERS, "float": FLOATS[:3]}
# These add numbers up: sums of the largest ones overflow.
MODEST = ("factored", "lloyd_max")
BAD = ("nan", "inf", "-inf")
VALUES = ("normal", "steps", "constant", "small", "denormal", "spread", "huge", "full", *BAD)
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


def cases(name):
    least = 2 if name in ("factored", "lloyd_max") else 0
    values = [v for v in VALUES if name not in MODEST or v not in ("huge", "full", "spread")]
    return st.builds(
        Case,
        FIELDS[name],
        st.lists(side, min_size=least, max_size=5).map(lambda shape: smaller(shape, 4096)),
        st.sampled_from(DTYPES.get(name, FLOATS)),
        st.sampled_from(VIEWS),
        st.sampled_from(values),
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
        x.view(-1)[at] = float(case.values)
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


# -- what each compressor states: the value aimed at, and how far from it (inf: anything) ---------


def last_place(dtype, magnitude):
    """The error of rounding numbers up to `magnitude` to `dtype`."""
    info = torch.finfo(dtype)
    return info.eps / 2 * magnitude + info.smallest_normal * info.eps


def outward_error(lo, hi, ends):
    """How far an end lies from what it is rounded outwards to."""
    magnitude = torch.maximum(lo.abs(), hi.abs())
    return 2 * last_place(ends, magnitude) if ends != torch.float32 else 0 * magnitude


def range_error(lo, hi, parts, share, dtype, ends):
    """`share` of a `parts`-th of the range between ends that were rounded outwards to `ends`."""
    magnitude, outwards = torch.maximum(lo.abs(), hi.abs()), outward_error(lo, hi, ends)
    step = (hi - lo + 2 * outwards) / parts
    arithmetic = U * (8 * (hi - lo) + 4 * magnitude) + 2.0**-100
    return share * step + arithmetic + last_place(dtype, magnitude + outwards)


def grouped(rows, length, bits, compressor, dtype):
    """Target and error of rows in groups; `bits` of each row."""
    n, size = rows.shape
    rows = rows.float().double()
    bad_size = -size % length
    padded = torch.cat([rows, rows[:, -1:].expand(n, bad_size)], 1) if size else rows
    groups = padded.view(n, padded.shape[1] // length, length)
    clean, target = groups.isfinite(), groups
    if groups.numel():
        lo, hi = (
            reduce(groups.where(clean, end), 2, keepdim=True).clamp(-BF16_MAX, BF16_MAX)
            for reduce, end in ((torch.amin, math.inf), (torch.amax, -math.inf))
        )
        target = groups.nan_to_num(-math.inf).maximum(lo).minimum(hi)
        target = target.where(clean.any(2, keepdim=True), torch.nan)
        ends = torch.bfloat16 if compressor.bounds == "bf16" else torch.float32
        share = 0.5 if compressor.rounding == "nearest" else 1.0
        parts = (2.0**bits - 1).view(n, 1, 1)
        error = range_error(lo, hi, parts, share, dtype, ends)
        # What is not finite decodes to a bound itself, wherever the steps between them lie.
        error = torch.where(clean, error, error + outward_error(lo, hi, ends))
    else:
        error = torch.zeros_like(groups)
    return target.flatten(1)[:, :size], error.flatten(1)[:, :size]


def group(compressor, x, packed, key):
    bits = torch.tensor([compressor.bits], dtype=torch.float64)
    return grouped(x.reshape(1, -1), compressor.group_size, bits, compressor, x.dtype)


def samples(compressor, x, packed, key):
    n = x.shape[0] if x.dim() else 1
    size = math.prod(x.shape[1:])
    widths = torch.tensor(compressor.widths(n), dtype=torch.float64)
    order = packed.tensors["order"].long()
    bits = widths.new_empty(n).index_copy_(0, order, widths) if order.numel() else widths
    length = min(compressor.group_size, max(8, -(-size // 8) * 8))
    return grouped(x.reshape(n, size), length, bits, compressor, x.dtype)


def patch(compressor, x, packed, key):
    rows, columns = (1, 1, *x.shape)[-2:]
    maps = x.float().double().reshape(math.prod(x.shape[:-2]), rows, columns)
    if not maps.numel():
        return maps, maps
    kind = x.dtype if x.dtype != torch.float64 else torch.float32
    ends = torch.float16 if kind == torch.float16 else torch.bfloat16
    clean = maps.isfinite()
    inside = maps.clamp(-BF16_MAX, BF16_MAX)
    down, across = -(-rows // 4), -(-columns // 4)

    def over(values, beyond, reduce):
        """Reduce each patch and spread the result over it."""
        whole = F.pad(values, (0, -columns % 4, 0, -rows % 4), value=beyond)
        each = reduce(whole.view(-1, down, 4, across, 4), (2, 4))
        spread = each.repeat_interleave(4, 1).repeat_interleave(4, 2)
        return spread[:, :rows, :columns]

    some = over(clean.double(), 0.0, torch.amax) > 0
    lo, hi = (
        over(inside.where(clean, end), end, reduce)
        for end, reduce in ((math.inf, torch.amin), (-math.inf, torch.amax))
    )
    target = inside.nan_to_num(-math.inf).maximum(lo).minimum(hi)
    share = 0.5 if compressor.rounding == "nearest" else 1.0
    error = range_error(lo, hi, 3, share, kind, ends if kind == torch.float32 else torch.float32)
    # both levels around a value were rounded
    error = error + 2 * last_place(kind, torch.maximum(lo.abs(), hi.abs()))
    # what is not finite decodes to a bound, which was rounded outwards
    error = torch.where(clean, error, error + outward_error(lo, hi, torch.bfloat16))
    return torch.where(some, target, torch.nan), error


def coded(x, scale, compressor, lost=0.0, sign=1.0):
    """The values of a map times `scale` and `sign`: the nearest one, or one of the two around."""
    values = codebook(compressor.map, bits=compressor.bits, signed=compressor.signed)
    book = torch.tensor(values, dtype=torch.float64)
    middle = torch.tensor([(a + b) / 2 for a, b in pairwise(values)], dtype=torch.float64)
    target = x.float().double() * sign
    at = (target / scale.where(scale > 0, 1)).contiguous()
    error = (target - book[torch.searchsorted(middle, at)] * scale).abs()
    if getattr(compressor, "rounding", "nearest") == "stochastic":
        above = torch.searchsorted(book, at).clamp(max=len(book) - 1)
        below = (above - 1).clamp(min=0)
        both = torch.stack([book[above] * scale, book[below] * scale])
        error = (target - both).abs().amax(0)
    # Reciprocals are rounded, and 0 for subnormal maxima.
    error = error + 16 * U * scale + 2 * torch.finfo(torch.float32).tiny + lost
    error = error + last_place(x.dtype, scale)
    return target * sign, torch.where(scale.isfinite(), error, math.inf)


def block(compressor, x, packed, key, size=None):
    size, flat = size or compressor.block_size, x.reshape(-1)
    blocks = F.pad(flat.float(), (0, -flat.numel() % size)).view(-1, size)
    scale = blocks.abs().amax(1) if len(blocks) else blocks.new_zeros(0)
    # The first element of the largest magnitude is the scale, with its sign.
    first = (blocks.abs() == scale.unsqueeze(1)).byte()
    first = blocks.gather(1, first.argmax(1, keepdim=True)).squeeze(1) if len(blocks) else scale
    sign = 1.0 - 2.0 * (first < 0).double() * compressor.signed
    scale, sign = (each.double().repeat_interleave(size)[: flat.numel()] for each in (scale, sign))
    return coded(flat, scale, compressor, sign=sign)


def rank1(compressor, x, packed, key):
    if x.dim() < 2:
        return block(compressor, x, packed, key, size=128)
    if not x.numel():
        return x, x
    magnitude = x.float().abs().double()
    least = torch.full_like(magnitude, math.nan)
    for dim in range(x.dim()):
        least = torch.fmin(least, finite(along(magnitude, dim)))
    return coded(x, least, compressor)


def along(magnitude, dim):
    """The maxima at each index of a dimension, over all others."""
    return magnitude.amax([d for d in range(magnitude.dim()) if d != dim], keepdim=True)


def finite(scale):
    return torch.where(scale.isfinite(), scale, math.nan)


def factored(compressor, x, packed, key):
    matrix = x.double().reshape(x.shape[0], -1) if x.numel() else x.reshape(-1)
    if not x.numel() or not matrix.isfinite().all():
        return x, torch.full_like(x, math.inf, dtype=torch.float64)
    row, col, mean = matrix.mean(1, keepdim=True), matrix.mean(0, keepdim=True), matrix.mean()
    target = row * col / mean.where(mean > 0, 1)
    least = 2.0**-149  # a mean that is subnormal has lost its last places
    lost = sum(torch.where(m > 0, least / m, 0) for m in (row, col, mean))
    error = target * (2 * U * (sum(matrix.shape) + 8) + 4 * lost) + 2 * least
    return target, error + last_place(x.dtype, target)


def derivative(compressor, x, packed, key):
    step = compressor.table()
    flushed = [0.0 if abs(b) < torch.finfo(torch.float32).tiny else b for b in step.boundaries]
    table = torch.tensor(flushed, dtype=torch.float32)
    at = x.float() - torch.tensor(step.shift, dtype=torch.float32)
    at = at.abs() if step.parity == "even" else at
    if step.parity == "band":
        code = ((at > table[0]) & (at <= table[1])).long()
    else:
        code = (at.unsqueeze(-1) > table).sum(-1)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    levels = torch.tensor(step.levels, dtype=wide)
    return levels[code].to(x.dtype).double(), torch.zeros(x.shape, dtype=torch.float64)


def exact(compressor, x, packed, key):
    return x.double(), torch.zeros(x.shape, dtype=torch.float64)


def lloyd_max(compressor, x, packed, key):
    """The sign, and a magnitude of two for a block; over rows and columns no longer than `x`."""
    row, col = packed.tensors["row"].double(), packed.tensors["col"].double()
    if not x.numel() or not x.isfinite().all():
        return x, torch.full_like(x, math.inf, dtype=torch.float64)
    size, y = row.unsqueeze(1) * col, compressor.decompress(packed).double()
    least = y.abs() - last_place(x.dtype, y.abs())  # before it was rounded to the dtype
    pair = (x.double(), least.clamp_min(0))
    before, after = (t.reshape(size.shape) / size.where(size > 0, 1) for t in pair)
    before, after = before.where(size > 0, 0.0), after.where(size > 0, 0.0)
    blocks = [F.pad(t.flatten(), (0, -t.numel() % 128)).view(-1, 128) for t in (before, after)]
    one, other = (t.square().sum(1) for t in blocks)
    assert (other <= one * (1 + 256 * U) + 2.0**-60).all()
    scale = packed.tensors["scale"].double().repeat_interleave(128)[: x.numel()].view(size.shape)
    error = torch.maximum(x.double().abs().reshape(size.shape), lloyd.LARGE * scale * size)
    return x, error * (1 + 8 * U) + last_place(x.dtype, error) + 2.0**-149


def float_(compressor, x, packed, key):
    with backend("reference"):
        target = compressor.form.round(x.contiguous(), seed=key.bits()).double()
    if compressor.form.specials == "none":
        target = torch.where(target.isinf(), torch.nan, target)
    return target, torch.zeros_like(target)


def host(compressor, x, packed, key):
    inner = compressor.inner
    name = type(inner).__name__.lower()
    return STATED[name](inner, x, inner.compress(x, key=key), key)


STATED = {
    "identity": exact,
    "mask": exact,
    "integers": exact,
    "host": host,
    "derivative": derivative,
    "group": group,
    "samples": samples,
    "block": block,
    "patch": patch,
    "rank1": rank1,
    "factored": factored,
    "lloyd_max": lloyd_max,
    "float": float_,
}

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
    with backend("reference"):
        twin = case.compressor.compress(x, key=key)
        assert payloads(equal, twin, packed)
        assert equal(case.compressor.decompress(packed), y)


EVERY = pytest.mark.parametrize("name", COMPRESSORS)
QUIET = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate, Phase.shrink),
}


def test_every_compressor_has_fields_and_a_stated_error():
    assert COMPRESSORS.keys() <= FIELDS.keys() == STATED.keys()


@EVERY
def test_cases_that_nobody_thought_of(name):
    settings(max_examples=50, derandomize=True, **QUIET)(
        given(cases(name))(lambda case: check(name, case))
    )()


@pytest.mark.nightly
@EVERY
def test_many_cases_that_nobody_thought_of(name):
    # Other ones each night; a failure prints the case.
    settings(max_examples=2500, **QUIET)(given(cases(name))(lambda case: check(name, case)))()


# -- what it found ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("bounds", ["bf16", "fp32"])
def test_groups_of_float16_stay_finite_where_their_bounds_round_beyond_its_range(name, bounds):
    x = torch.tensor([65504.0, -65504, 65500, 0] * 2, dtype=torch.float16)
    compressor = Group(bits=8, group_size=8, rounding="nearest", bounds=bounds)
    with backend(name):
        y = compressor.decompress(compressor.compress(x, key=Key()))
    assert y[:3].tolist() == [65504.0, -65504.0, 65504.0]
    assert float(y[3].abs()) <= 65536 / 255


@pytest.mark.parametrize("shape", [(0, 1), (1, 0), (0, 0, 1, 4), (3, 1, 0)])
def test_patches_of_no_elements(shape):
    packed = Patch().compress(torch.empty(shape), key=Key())
    assert packed.nbytes == 0
    assert Patch().decompress(packed).shape == shape
