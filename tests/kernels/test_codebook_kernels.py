"""Codebooks of 2 to 8 bits, in blocks and rank-1: worked cases, kernels equal to the reference."""

import math

import pytest
import torch

from memtrain.kernels.codebook import quantize, rank1
from memtrain.kernels.codebook.quantize import (
    dequantize_blocks,
    dequantize_blocks_reference,
    quantize_blocks,
    quantize_blocks_reference,
    quantize_scaled,
    quantize_scaled_reference,
)
from memtrain.kernels.codebook.values import Codebook, codebook
from memtrain.kernels.dispatch import backend
from memtrain.kernels.packing import bits as bitpack
from tests.kernels.steps import every_level, instructions

KERNELS = ["cpu", "triton"]
BOOKS = [
    Codebook("DE", 4, True),
    Codebook("Linear", 4, False),
    Codebook("DE", 2, True),
    Codebook("Power-3", 3, True),
    Codebook("Linear", 4, True),
    Codebook("DE-0", 5, False),
    Codebook("E3M2", 6, True),
    Codebook("Power-2", 7, False),
    Codebook("DE", 8, True),
    Codebook("DE", 8, False),
]
every_backend = pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
every_book = pytest.mark.parametrize("case", BOOKS, ids=lambda b: f"{b.name}-{b.bits}")


def sample(case, shape):
    """Wide-spread values with zeros and, at scale 1, values of the book themselves."""
    x = torch.randn(shape) * torch.rand(shape) ** 3
    flat = x.view(-1)
    flat[::7] = 0.0
    values = case.values(x.device)
    flat[1::5] = values[torch.randint(0, len(values), flat[1::5].shape)]
    return x if case.signed else x.abs()


def test_nearest_by_hand():
    # 2 bits unsigned DE: 0, 0.325, 0.775, 1; bounds 0.1625, 0.55, 0.8875
    x = torch.tensor([[0.1625, 0.1626, 0.55, 0.8, 0.9, 1.0]])
    codes = quantize.encode(x, torch.ones(1, 1), Codebook("DE", 2, False))
    assert codes.tolist() == [[0, 1, 1, 2, 3, 3]]


def test_stochastic_by_hand(monkeypatch):
    u = torch.tensor([[0.25, 0.75, 0.25, 0.75, 0.25, 0.25, 0.25, 0.75]])
    monkeypatch.setattr(quantize, "uniform_blocks", lambda *_: u)
    # Linear of 2 bits: 1/4, 1/2, 3/4, 1. 0.375 * 2 lies half way between the lower two.
    x = 2 * torch.tensor([[0.375, 0.375, 0.25, 0.5, 1.0, 0.1, 0.0, 0.99]])
    codes = quantize.encode(x, torch.full((1, 1), 2.0), Codebook("Linear", 2, False), seed=0)
    assert codes.tolist() == [[1, 0, 0, 1, 3, 0, 0, 3]]


@pytest.mark.parametrize("seed", [None, -(2**62)])
@pytest.mark.parametrize(
    ("name", "size"),
    [("cpu", 8), ("cpu", 24), ("cpu", 256), ("cpu", 2048), ("triton", 24), ("triton", 256)],
)
@every_book
def test_blocks_equal_the_reference(name, seed, size, case):
    for n in (0, 1, 777) if name == "cpu" else (333,):
        x = sample(case, (n,))
        want = quantize_blocks_reference(x, case, size, seed)
        back = dequantize_blocks_reference(*want, case, n)
        with backend(name):
            codes, scale = quantize_blocks(x, case, block_size=size, seed=seed)
            decoded = dequantize_blocks(*want, case, numel=n)
        assert torch.equal(scale, want[1])
        assert torch.equal(codes, want[0])
        assert torch.equal(decoded, back)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("seed", [None, 5])
@every_book
def test_rank1_equals_the_reference(name, seed, case):
    shapes = ((30, 17), (4, 3, 5, 5))
    if name == "cpu":
        shapes += ((1, 1), (0, 5), (300, 2), (2, 301), (5, 150))
    for shape in shapes:
        x = sample(case, shape)
        with backend("reference"):
            want = rank1.quantize(x, case, seed=seed)
            decoded = rank1.dequantize(*want, case, shape=shape)
        with backend(name):
            codes, scale = rank1.quantize(x, case, seed=seed)
            back = rank1.dequantize(*want, case, shape=shape)
        assert torch.equal(codes, want[0])
        assert torch.equal(scale, want[1])
        assert torch.equal(back, decoded)


@every_level
@pytest.mark.parametrize("seed", [None, 5])
def test_instruction_sets_equal_the_reference(level, seed):
    case, x = Codebook("DE", 8, True), sample(Codebook("DE", 8, True), (4099,))
    want = quantize_blocks_reference(x, case, 128, seed)
    with instructions(level), backend("cpu"):
        got = quantize_blocks(x, case, block_size=128, seed=seed)
        back = dequantize_blocks(*want, case, numel=4099)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert torch.equal(back, dequantize_blocks_reference(*want, case, 4099))


@pytest.mark.parametrize(("name", "bits", "signed"), [("DE", 4, True), ("Power-2", 3, False)])
def test_stochastic_rounding_is_unbiased(name, bits, signed):
    """The mean of n draws is within 5 standard deviations of the value."""
    case = Codebook(name, bits, signed)
    values = case.values(torch.device("cpu"))
    x = torch.linspace(values[0].item(), 1.0, 257)[:256]
    x[0] = 1.0  # the block's scale
    draws = 400
    total = torch.zeros(256, dtype=torch.float64)
    for seed in range(draws):
        codes, scale = quantize_blocks(x, case, block_size=256, seed=seed)
        total += dequantize_blocks(codes, scale, case, numel=256).double()
    low = torch.searchsorted(values, x, right=True).clamp(1, len(values) - 1) - 1
    gap = (values[low + 1] - values[low]).double()
    p = (x - values[low]).double() / gap
    deviation = gap * (p * (1 - p) / draws).sqrt()
    # random bits: 16, and a draw stands in the middle of its interval
    assert ((total / draws - x).abs() <= 5 * deviation + gap * 2.0**-17 + 1e-6).all()
    assert torch.equal(total[0], torch.tensor(float(draws), dtype=torch.float64))


def test_triton_makes_its_tables_once(monkeypatch):
    """A list that becomes a tensor of a GPU is a copy that the host waits for."""
    pytest.importorskip("triton")
    case, x = Codebook("DE", 4, True), torch.randn(64)
    with backend("triton"):
        codes, _ = quantize_blocks(x, case, block_size=64, seed=3)
        monkeypatch.setattr(torch, "tensor", None)
        again, _ = quantize_blocks(x, case, block_size=64, seed=3)
    assert torch.equal(codes, again)


@every_backend
@pytest.mark.parametrize("case", [Codebook("DE", 4, True), Codebook("E4M3", 8, True)], ids=str)
def test_what_is_beyond_all_values_is_the_last_one(name, case):
    x = torch.rand(2, 128) / 2
    x[0, 3], x[0, 5], x[1, 7], x[1, 9] = math.inf, -math.inf, 3.0, -3.0
    with backend(name):
        codes = quantize_scaled(x, case, 5)
    assert torch.equal(codes, quantize_scaled_reference(x, case, 5))
    values, found = case.values(torch.device("cpu")), bitpack.unpack(codes, case.bits).view(2, 128)
    assert found[0, 3] == found[1, 7] == len(values) - 1
    assert found[0, 5] == found[1, 9] == 0


def test_linear_codebooks_have_the_published_values():
    assert codebook("Linear", signed=False) == tuple(k / 16 for k in range(1, 17))
    linear = codebook("Linear", signed=True)
    assert linear == pytest.approx(torch.linspace(-1, 1, 16, dtype=torch.float64).tolist())


@every_backend
def test_blocks_worked_case(name):
    # scale 2: the normalised values are 1, -0.8, 0.1, 0 and -1, which has no code of its own;
    # 0.145 is the midpoint of 0.0775 and 0.2125
    x = torch.tensor([2.0, -1.6, 0.2, 0.0, -2.0, 0.28])
    with backend(name):
        codes, scale = quantize_blocks(x, Codebook("DE", 4, True), block_size=128)
    assert scale.tolist() == [2.0]
    assert bitpack.unpack(codes, 4)[0, :7].tolist() == [15, 0, 10, 7, 0, 10, 7]


@every_backend
def test_the_first_of_the_largest_magnitude_is_the_scale(name):
    x = torch.zeros(4, 128)
    x[0, 5], x[0, 70] = -2.0, 2.0
    x[1, 5], x[1, 70] = 2.0, -2.0
    x[2, 127] = -1e-42
    x[3] = -0.0
    with backend(name):
        codes, scale = quantize_blocks(x, Codebook("DE", 4, True), block_size=128)
        back = dequantize_blocks(codes, scale, Codebook("DE", 4, True), numel=512).view(4, 128)
        unsigned = quantize_blocks(x, Codebook("DE", 4, False), block_size=128)[1]
    assert scale.tolist() == [-2.0, 2.0, x[2, 127].item(), 0.0]
    assert not scale[3].signbit()
    assert unsigned.tolist() == scale.abs().tolist()
    assert back[0, [5, 70]].tolist() == [-2.0, pytest.approx(2 * 0.8875)]
    assert torch.equal(back[1], -back[0])
    assert back[2, 127] == x[2, 127]


@every_backend
def test_ties_go_to_the_lower_index(name):
    # Linear: values k / 16, so the midpoints (2 k + 1) / 32 are exact
    x = torch.tensor([1.0, 3 / 32, 5 / 32, 31 / 32])
    with backend(name):
        codes, _ = quantize_blocks(x, Codebook("Linear", 4, False), block_size=128)
    assert bitpack.unpack(codes, 4)[0, :4].tolist() == [15, 0, 1, 14]


LINEAR = Codebook("Linear", 4, False)


@every_backend
def test_rank1_worked_case(name):
    # row maxima 4 and 1, column maxima 4 and 2: scales [[4, 2], [1, 1]]
    x = torch.tensor([[4.0, 2.0], [0.25, 1.0]])
    with backend(name):
        codes, scale = rank1.quantize(x, LINEAR)
        back = rank1.dequantize(codes, scale, LINEAR, shape=(2, 2))
    assert scale.tolist() == [4, 1, 4, 2]
    # normalised 1, 1, 1/4, 1 on the map (k + 1) / 16
    assert bitpack.unpack(codes, 4)[0, :4].tolist() == [15, 15, 3, 15]
    assert torch.equal(back, x)


def test_three_dimensions_take_the_least_of_three():
    x = torch.arange(1.0, 25.0).view(2, 3, 4)
    scale = rank1.maxima(x)
    assert scale.tolist() == [12, 24, 16, 20, 24, 21, 22, 23, 24]
    want = torch.stack(
        [torch.minimum(torch.tensor(s), x.amax((0, 2)).view(3, 1)) for s in (12.0, 24.0)]
    )
    want = torch.minimum(want, x.amax((0, 1)).view(1, 1, 4))
    least = torch.minimum(scale[:2, None], rank1.columns(scale, (2, 3, 4))[None])
    assert torch.equal(least.view(2, 3, 4), want)


@pytest.mark.parametrize("level", [0, 1], ids=["portable", "avx2"])
def test_rank1_by_other_instruction_sets_equals_the_reference(level):
    x = torch.rand(50, 77)
    with backend("reference"):
        want = rank1.quantize(x, LINEAR)
        decoded = rank1.dequantize(*want, LINEAR, shape=x.shape)
    with instructions(level), backend("cpu"):
        codes, _ = rank1.quantize(x, LINEAR)
        back = rank1.dequantize(*want, LINEAR, shape=x.shape)
    assert torch.equal(codes, want[0])
    assert torch.equal(back, decoded)


def test_rank1_of_one_dimension_is_refused():
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        rank1.quantize(torch.ones(5), LINEAR)
