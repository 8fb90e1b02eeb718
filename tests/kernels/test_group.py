"""All three backends compute the same operations in the same order, so they are bit-equal."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from memtrain.audit.live_storages import LiveStorages
from memtrain.kernels import cpu
from memtrain.kernels.dispatch import backend
from memtrain.kernels.group import group
from memtrain.kernels.packing import bits as bit_codes
from tests.kernels.steps import by_threads, every_level, instructions

# NumPy warns of Inf times 0, where the interpreter of Triton meets a group with no range.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
BACKENDS = ["reference", "cpu", "triton"]
TWINS = ["cpu", "triton"]
SEED = -12345678901234
FLOAT_MAX = torch.finfo(torch.float32).max
BF16_MAX = torch.finfo(torch.bfloat16).max


def equal(a, b):
    """Equal dtypes, shapes and bits, NaN equal to NaN."""
    return (
        a.dtype == b.dtype
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(0, 1e30, -1e30), b.nan_to_num(0, 1e30, -1e30))
    )


def roundtrip(x, **options):
    options = {"bits": 4, "group_size": 8, "seed": SEED, "stochastic": False} | options
    codes, bounds = group.group_quantize(x, **options)
    sizes = (options["bits"], options["group_size"], x.numel())
    return group.group_dequantize(codes, bounds, *sizes, x.dtype).view(x.shape)


# Worked cases


def test_reference_matches_a_worked_case():
    # lo 0, hi 3, so step 1: codes 0 1 2 3 0 1 2 2; byte c holds codes c, c+2, c+4, c+6.
    x = torch.tensor([0.0, 1.0, 2.0, 3.0, 0.4, 0.6, 1.5, 2.49])
    codes, bounds = group.quantize_reference(x, 2, 8, 0, False)
    assert codes.tolist() == [[0b10_00_10_00, 0b10_01_11_01]]
    assert bounds.tolist() == [[0.0, 3.0]]
    values = group.dequantize_reference(codes, bounds, 2, 8, 8, torch.float32)
    assert values.tolist() == [0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("name", BACKENDS)
def test_bounds_are_rounded_outwards(name):
    # bfloat16 near 1 has steps of 2**-7, just below 2 too.
    x = torch.tensor([[1.001, 1.999], [-1.999, -1.001], [-1e-3, 3e-3], [-0.5, 0.5]])
    with backend(name):
        _, bounds = group.group_quantize(x.repeat_interleave(4, 1), 4, 8, 0, False)
    assert bounds[0].tolist() == [1.0, 2.0]
    assert bounds[1].tolist() == [-2.0, -1.0]
    assert bounds[3].tolist() == [-0.5, 0.5]
    lo, hi = bounds.float().T
    assert (lo <= x[:, 0]).all()
    assert (hi >= x[:, 1]).all()
    assert ((x[:, 0] - lo) <= 2.0**-7 * x[:, 0].abs()).all()
    assert ((hi - x[:, 1]) <= 2.0**-7 * x[:, 1].abs()).all()


@pytest.mark.parametrize("name", BACKENDS)
def test_stochastic_codes_follow_the_definition(name):
    x = torch.rand(64) * 3
    x[0], x[1] = 0.0, 3.0
    from memtrain.kernels.random.philox import uniform_blocks

    u = uniform_blocks(1, 64, 9, x.device)[0]
    with backend(name):
        codes, _ = group.group_quantize(x, 2, 64, 9, True)
    expected = (x.double() + u.double()).floor().long()  # lo 0, step 1
    assert torch.equal(bit_codes.unpack(codes, 2)[0], expected)


# The twins against the reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("name", TWINS)
def test_twin_equals_reference(name, bits, dtype):
    stochastic = bits % 2 == 0
    for size in (256, 24) if name == "triton" else (8, 24, 64, 128, 256, 1000):
        x = (torch.randn(2 * size + 5) * 10.0 ** (bits - 4)).to(dtype)
        codes, bounds = group.quantize_reference(x, bits, size, SEED, stochastic)
        values = group.dequantize_reference(codes, bounds, bits, size, x.numel(), dtype)
        with backend(name):
            twin = group.group_quantize(x, bits, size, SEED, stochastic)
            twin_values = group.group_dequantize(codes, bounds, bits, size, x.numel(), dtype)
        assert torch.equal(twin[0], codes)
        assert equal(twin[1], bounds)
        assert equal(twin_values, values)


class NumbersReciprocal(TorchFunctionMode):
    """A division by a number as torch's CUDA kernel computes it: times the number's reciprocal."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("div", "true_divide", "__truediv__") and not torch.is_tensor(args[1]):
            return args[0] * (1 / torch.tensor(args[1], dtype=torch.float32))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("name", TWINS)
def test_twin_equals_the_reference_where_numbers_divide_by_their_reciprocal(name, bits):
    x = torch.randn(40, 24)
    with NumbersReciprocal():
        codes, bounds = group.quantize_reference(x, bits, 24, SEED, True)
        values = group.dequantize_reference(codes, bounds, bits, 24, x.numel(), x.dtype)
    with backend(name):
        assert torch.equal(group.group_quantize(x, bits, 24, SEED, True)[0], codes)
        assert equal(group.group_dequantize(codes, bounds, bits, 24, x.numel()), values)


@every_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_instruction_set_equals_the_reference(level, dtype, bits):
    # From 1368 on fewer than three groups are quantised together, from 2056 on fewer than two.
    for size in (128, 384, 8, 40, 136, 1368, 2048, 2056, 3880, 4096, 4104):
        x = (torch.randn(9 * size + 5) * 3).to(dtype)
        x[size + 3], x[3 * size], x[5 * size : 6 * size] = torch.nan, torch.inf, -0.0
        x[6 * size : 7 * size] *= 5e-40  # subnormal
        largest = torch.finfo(dtype).max
        x[7 * size : 8 * size] = (x[7 * size : 8 * size] * 2e38).clamp(-largest, largest)
        for stochastic in (True, False):
            results = []
            for choice in ("reference", "cpu"):
                with instructions(level), backend(choice):
                    packed = group.group_quantize(x, bits, size, SEED, stochastic)
                    y = group.group_dequantize(*packed, bits, size, x.numel(), dtype)
                    results.append((*packed, y))
            for reference, kernel in zip(*results, strict=True):
                assert equal(reference, kernel)


@pytest.mark.parametrize("name", TWINS)
def test_twin_equals_reference_on_hard_numbers(name):
    nan, inf = torch.nan, torch.inf
    hard = [
        [0.0] * 8,
        [-0.0] * 4 + [0.0] * 4,
        [1.5] * 8,
        [3.3] * 8,
        [FLOAT_MAX, -FLOAT_MAX] * 4,
        [FLOAT_MAX] * 8,
        [-FLOAT_MAX, BF16_MAX, 0.0, 1e38, -1e38, 2e38, -2e38, 1.0],
        [1e-45, 3e-45, 0.0, -1e-45] * 2,
        [1e-38, 2e-38, 1e-30, 0.0] * 2,
        [1e-30, 2e-30, 3e-30, 4e-30] * 2,
        [1000.0, 1000.001] * 4,
        [nan] * 8,
        [0.0] * 7 + [nan],
        [inf] + [0.0] * 7,
        [-inf, inf] * 4,
    ]
    x = torch.tensor(hard)
    for bits in (1, 3, 8):
        codes, bounds = group.quantize_reference(x, bits, 8, SEED, True)
        values = group.dequantize_reference(codes, bounds, bits, 8, x.numel(), x.dtype)
        with backend(name):
            twin = group.group_quantize(x, bits, 8, SEED, True)
            twin_values = group.group_dequantize(codes, bounds, bits, 8, x.numel(), x.dtype)
        assert torch.equal(twin[0], codes)
        assert equal(twin[1], bounds)
        assert equal(twin_values, values)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("name", TWINS)
def test_twin_equals_reference_for_every_seed(name, seed):
    x = torch.randn(300)
    expected, _ = group.quantize_reference(x, 4, 256, seed, True)
    with backend(name):
        codes, _ = group.group_quantize(x, 4, 256, seed, True)
    assert torch.equal(codes, expected)


@pytest.mark.skipif(cpu.library() is None, reason="of the C++ library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [2, 5])
# More groups than are brought together at a time; groups of parts of rows; a last one not whole.
@pytest.mark.parametrize(("rows", "columns", "size"), [(101, 96, 8), (33, 64, 128), (7, 100, 64)])
def test_rows_with_gaps_between_them_are_as_their_copy(rows, columns, size, bits, dtype):
    whole = torch.randn(rows, 3 * columns).to(dtype)
    for x in (whole[:, :columns], whole[:, columns : 2 * columns]):
        quantize, _ = group.kernel_of(x, bits, size, True)
        packed = group.group_quantize(x.contiguous(), bits, size, 3)
        assert all(map(torch.equal, quantize(x, 3), packed))
    assert group.kernel_of(whole.t(), bits, size, True) is None


def test_threads_do_not_change_the_result():
    x = torch.randn(300_000)

    def packed():
        codes, bounds = group.group_quantize(x, 3, 256, SEED)
        return codes, bounds, group.group_dequantize(codes, bounds, 3, 256, x.numel())

    assert all(map(torch.equal, *by_threads(packed)))


# What the docstring promises


@pytest.mark.parametrize("name", BACKENDS)
def test_ranges_that_count_as_zero_decode_to_lo(name):
    x = torch.tensor([0.0, 2.0**-102] * 4)
    with backend(name):
        assert roundtrip(x).eq(0).all()
        assert torch.equal(roundtrip(x * 8), x * 8)


# Refusals, fake tensors, registration


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0}, "bits=0; allowed: 1 to 8"),
        ({"bits": 9}, "bits=9; allowed: 1 to 8"),
        ({"group_size": 12}, "group_size=12; allowed: multiples of 8"),
        ({"group_size": 0}, "group_size=0; allowed: multiples of 8"),
        ({"group_size": 32768}, "group_size=32768; allowed: .* to 16384"),
    ],
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        group.group_quantize(torch.zeros(8), **options)


def test_wrong_dtypes_and_sizes_are_refused():
    with pytest.raises(TypeError, match=r"int64; allowed: torch\.float32"):
        group.group_quantize(torch.arange(8))
    codes, bounds = group.group_quantize(torch.zeros(16), 4, 8)
    with pytest.raises(TypeError, match="int32; allowed"):
        group.group_dequantize(codes, bounds, 4, 8, 16, torch.int32)
    with pytest.raises(ValueError, match=r"\(2, 4\); 17 elements of 4 bits need uint8 \(3, 4\)"):
        group.group_dequantize(codes, bounds, 4, 8, 17)
    with pytest.raises(ValueError, match=r"bounds are torch\.float16"):
        group.group_dequantize(codes, bounds.half(), 4, 8, 16)


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_triton_reads_rows_with_gaps_where_they_lie(dtype, stochastic):
    pytest.importorskip("triton")
    wide = torch.randn(7, 3 * 512).to(dtype)
    x = wide[:, 512:1024]
    expected = group.quantize_reference(x.contiguous(), 4, 256, 5, stochastic)
    with backend("triton"), LiveStorages() as live:
        found = group.group_quantize(x, 4, 256, 5, stochastic)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert live.peak_nbytes < sum(t.nbytes for t in found) + 64


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bound_triton_kernels_are_the_ops(dtype, bits):
    pytest.importorskip("triton")
    wide = torch.randn(7, 3 * 512).to(dtype)
    options = (bits, 256, True)
    for x in (wide[:, 512:1024], wide[0, :777], wide):
        with backend("triton"):
            quantize, nbytes = group.kernel_of(x, *options)
            want = group.group_quantize(x, bits, 256, 5)
        found = quantize(x, 5)
        assert all(map(torch.equal, found, want))
        assert nbytes == sum(t.nbytes for t in found)
    flat = wide.flatten()
    with backend("triton"):
        quantize, _ = group.kernel_of(flat, *options)
        strange = (wide[:, 1:1001], wide.t(), wide.double())
        assert [group.kernel_of(x, *options) for x in strange] == [None] * 3
    same = map(torch.equal, quantize(wide.view(7, 3, 512).permute(2, 0, 1), 5), quantize(flat, 5))
    assert all(same)


# No bias, also where bfloat16 is far from the bounds of a group


def z_scores(x, codes, bounds, bits, step):
    """How many standard errors the mean of many decodings of the row `x` is off, [8]."""
    count = codes.shape[0]
    values = group.group_dequantize(codes, bounds, bits, 8, 8 * count).view(count, 8).double()
    place = (x.double() - bounds[0, 0].double()) / step
    chance = place - place.floor()
    error = step * (chance * (1 - chance) / count).sqrt()
    # The random numbers have 16 bits: a mean may be off by 2**-17 of a step.
    return ((values.mean(0) - x.double()).abs() - 2.0**-17 * step).clamp(min=0) / error


AWKWARD = [
    [1.0039, 1.0041, 1.2, 1.3333, 1.5, 1.7, 1.77, 1.8009],
    [-3.0077, -0.1, -0.003, 0.0011, 0.5, 1.1, 2.2, 2.9921],
    [1000.1, 1000.3, 1001.0, 1001.7, 1002.2, 1003.0, 1003.3, 1003.9],
]


@pytest.mark.parametrize("row", AWKWARD, ids=["ones", "signed", "offset"])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_stochastic_rounding_is_unbiased(row, bits):
    # 3 x 3 x 8 means; |z| > 5.5 has probability 3.8e-8, any of them 2.7e-6 (and the seed is fixed).
    x = torch.tensor(row)
    codes, bounds = group.group_quantize(x.repeat(40_000, 1), bits, 8, SEED)
    lo, hi = bounds[0].double()
    assert (z_scores(x, codes, bounds, bits, (hi - lo) / (2**bits - 1)) < 5.5).all()
