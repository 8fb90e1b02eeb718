"""Both forms compute the same operations in the same order, so they are bit-equal."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memtrain.kernels.dispatch import backend
from memtrain.kernels.patch import patch

# NumPy warns of Inf times 0, where the interpreter of Triton meets a group with no range.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
BACKENDS = ["reference", "triton"]
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]
SEED = -12345678901234
FLOAT_MAX = torch.finfo(torch.float32).max
BF16_MAX = torch.finfo(torch.bfloat16).max
NAN, INF = torch.nan, torch.inf


def roundtrip(x, seed=SEED, stochastic=False):
    words = patch.patch_quantize(x, seed, stochastic)
    return patch.patch_dequantize(words, x.shape[1], x.shape[2], x.dtype)


def same(a, b):
    """Equal dtypes, shapes and values, NaN equal to NaN."""
    return (
        a.dtype == b.dtype
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a[~a.isnan()], b[~b.isnan()])
    )


def one_patch(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype).view(1, 4, 4, 1)


def levels(words, dtype):
    """The four levels of each patch, as float64: what words with the codes 0 to 3 decode to."""
    ends = words.reshape(1, -1, 1, 1) & 0xFFFFFFFF
    codes = ends | (0b11_10_01_00 << 32)
    return patch.dequantize_reference(codes.transpose(0, 1).contiguous(), 1, 4, dtype).view(-1, 4)


# Worked cases


def test_reference_matches_a_worked_case():
    # Levels 0 3 6 9; thresholds 1.5, 4.5 and 7.5, which go up.
    x = [0, 1, 1.5, 2, 3, 4, 4.5, 5, 6, 7, 7.5, 8, 9, 0, 3, 9]
    words = patch.quantize_reference(one_patch(x), 0, False)
    rows = [0b01_01_00_00, 0b10_10_01_01, 0b11_11_10_10, 0b11_01_00_11]
    ends = 0x0000 | 0x4110 << 16  # 9 as bfloat16
    codes = sum(row << (8 * r) for r, row in enumerate(rows))
    assert int(words) & (2**64 - 1) == ends | codes << 32
    values = patch.dequantize_reference(words, 4, 4, torch.float32)
    assert values.flatten().tolist() == [0, 0, 3, 3, 3, 3, 6, 6, 6, 6, 9, 9, 9, 0, 3, 9]


@pytest.mark.parametrize("name", BACKENDS)
def test_ends_are_rounded_outwards(name):
    # bfloat16 near 1 has steps of 2**-7, just below 2 too.
    x = torch.tensor([[1.001, 1.999], [-1.999, -1.001], [-0.5, 0.5]]).view(3, 1, 2, 1)
    with backend(name):
        values = roundtrip(x).view(3, 2).tolist()
    assert values == [[1.0, 2.0], [-2.0, -1.0], [-0.5, 0.5]]


@pytest.mark.parametrize("name", BACKENDS)
def test_stochastic_codes_follow_the_definition(name):
    from memtrain.kernels.random.philox import philox

    x = one_patch([0, 9, *(torch.rand(14) * 9).tolist()], torch.float32)
    draws = torch.stack(philox(torch.tensor([0, 1]), 5), dim=1)  # one patch: counters 0 and 1
    halves = torch.stack([draws & 0xFFFF, draws >> 16], dim=-1).flatten()
    u = (halves.double() + 0.5) / 65536
    expected = (x.flatten().double() / 3 + 1 - u).floor().clamp(0, 3) * 3
    with backend(name):
        assert roundtrip(x, 5, True).flatten().tolist() == expected.tolist()


# The twins against the reference


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_equals_reference_on_hard_numbers(dtype):
    hard = [
        [0.0] * 16,
        [-0.0] * 8 + [0.0] * 8,
        [3.3] * 16,
        [FLOAT_MAX, -FLOAT_MAX] * 8,
        [-FLOAT_MAX, BF16_MAX, 0.0, 1e38, -1e38, 2e38, -2e38, 1.0] * 2,
        [65504.0, -65504.0, 1.0, 60000.0] * 4,
        [1e-45, 3e-45, 0.0, -1e-45] * 4,
        [6e-8, 1.2e-7, -6e-8, 5e-7, 6e-5, -6.2e-5, 3e-5, 1e-6] * 2,
        [1e-38, 2e-38, 1e-30, 0.0] * 4,
        [2e-40, 3e-40, 4e-40, 5e-40] * 4,
        [1000.0, 1000.001, 1000.5, 1001] * 4,
        [NAN] * 16,
        [0.0] * 15 + [NAN],
        [INF] + [0.0] * 15,
        [-INF, INF] * 8,
        [1.0, NAN, 2.0, -INF, INF, 3.0, 4.0, 5.0] * 2,
    ]
    x = torch.tensor(hard).to(dtype).view(-1, 4, 4, 1)
    for stochastic in (False, True):
        words = patch.quantize_reference(x, SEED, stochastic)
        values = patch.dequantize_reference(words, 4, 4, dtype)
        with backend("triton"):
            assert torch.equal(patch.patch_quantize(x, SEED, stochastic), words)
            assert same(patch.patch_dequantize(words, 4, 4, dtype), values)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, -(2**63)])
def test_triton_equals_reference_for_every_seed(seed):
    x = torch.randn(3, 8, 8, 1)
    expected = patch.quantize_reference(x, seed, True)
    with backend("triton"):
        assert torch.equal(patch.patch_quantize(x, seed, True), expected)


# What the docstring promises


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_minimum_and_maximum_of_16_bits_are_exact(name, dtype):
    # A third of the range away from both, so that no other value rounds to an end.
    x = torch.randn(8, 4, 4, 1).to(torch.bfloat16 if dtype == torch.float32 else dtype).to(dtype)
    for stochastic in (False, True):
        with backend(name):
            y = roundtrip(x, SEED, stochastic).view(8, 16)
        flat = x.view(8, 16)
        for end in (flat.argmin(1, keepdim=True), flat.argmax(1, keepdim=True)):
            assert torch.equal(y.gather(1, end), flat.gather(1, end))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_nearest_takes_the_nearest_level(dtype):
    x = (torch.randn(500, 4, 4, 1) * 10.0 ** torch.randint(-4, 4, (500, 1, 1, 1))).to(dtype)
    words = patch.patch_quantize(x)
    exact = x.double().view(-1, 16)
    least = (exact.unsqueeze(2) - levels(words, dtype).double().view(-1, 1, 4)).abs().amin(2)
    error = (exact - patch.patch_dequantize(words, 4, 4, dtype).double().view(-1, 16)).abs()
    # Four float32 roundings, of numbers up to the largest of the patch or twice that.
    rounding = 4 * 2.0**-23 * exact.abs().amax(1, keepdim=True)
    assert (error - least <= rounding).all()
    assert error.max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("scale", [2.0**-9, 2.0**-16, 2.0**-40, 2.0**-120])
def test_small_ranges_keep_their_four_levels(dtype, scale):
    if dtype == torch.float16 and scale < 2.0**-20:
        scale = 2.0**-24  # float16's least denormal
    x = one_patch([0.0, 3.0, 6.0, 9.0] * 4) * scale
    for name in BACKENDS:
        with backend(name):
            assert torch.equal(roundtrip(x.to(dtype)), x.to(dtype))


@pytest.mark.parametrize("name", BACKENDS)
def test_float32_denormals_keep_their_four_levels(name):
    x = one_patch([0.0, 3.0, 6.0, 9.0] * 4) * 2.0**-133  # bfloat16's least denormal
    with backend(name):
        assert torch.equal(roundtrip(x), x)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(d, marks=pytest.mark.nightly) for d in DTYPES[1:])],
    ids=str,
)
def test_stochastic_mean_is_the_tensor(dtype):
    x = torch.randn(16, 4, 4, 1).to(dtype)
    level = levels(patch.patch_quantize(x), dtype).double().view(-1, 1, 4)
    flat, count = x.view(-1, 16, 1).double(), 2000
    below = (flat >= level).sum(2, keepdim=True).clamp(1, 3) - 1
    low, high = (level.expand(-1, 16, -1).gather(2, below + i).squeeze(2) for i in (0, 1))
    total = torch.zeros(len(x), 16, dtype=torch.float64)
    for seed in range(count):
        total += roundtrip(x, seed, True).view(-1, 16)
    step = high - low
    chance = ((flat.squeeze(2) - low) / step.clamp(min=1e-12)).clamp(0, 1)
    error = step * (chance * (1 - chance) / count).sqrt() + 1e-12
    # |z| > 6 has probability 2e-9, any of 256 5e-7; 16 random bits may shift a mean by 2**-16 step.
    off = ((total / count - flat.squeeze(2)).abs() - 2.0**-16 * step).clamp(min=0)
    assert (off / error).max() < 6
    assert (off / error).max() > 1


@pytest.mark.parametrize(
    ("activation", "expected"), [(torch.nn.Identity(), 0.107), (torch.relu, 0.0143)]
)
def test_error_is_that_of_the_original(activation, expected):
    # What the original code gives on normal patches, and on their positive part; float16 as there.
    x = activation(torch.randn(40_000, 4, 4, 1)).half()
    errors = (roundtrip(x).double() - x.double()).square().mean((1, 2, 3))
    noise = errors.std() / len(errors) ** 0.5
    unit = 10.0 ** (-3 if expected > 0.1 else -4)  # of the last printed digit
    assert abs(errors.mean() - expected) < 4 * noise + unit / 2


# Refusals, fake tensors, registration


def test_wrong_input_is_refused():
    with pytest.raises(TypeError, match=r"int64; allowed: torch\.float32"):
        patch.patch_quantize(torch.zeros(1, 4, 4, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="2 dimensions; allowed: 4"):
        patch.patch_quantize(torch.zeros(4, 4))
    with FakeTensorMode(), pytest.raises(ValueError, match=r"patches; allowed: up to 2\*\*31"):
        patch.patch_quantize(torch.empty(2**16, 1, 1, 2**16))
    words = patch.patch_quantize(torch.zeros(2, 4, 4, 1))
    with pytest.raises(TypeError, match="int32; allowed"):
        patch.patch_dequantize(words, 4, 4, torch.int32)
    with pytest.raises(ValueError, match=r"maps of 5 x 4 need int64 \(outer, 2, 1, inner\)"):
        patch.patch_dequantize(words, 5, 4)
    with pytest.raises(ValueError, match=r"words are torch\.int32"):
        patch.patch_dequantize(words.int(), 4, 4)
