"""Code books of 2 to 8 bits, nearest and stochastic: kernels equal to the reference."""

import math

import pytest
import torch

from memtrain.kernels import cpu
from memtrain.kernels.codebook import block as codebook
from memtrain.kernels.codebook import codes as book
from memtrain.kernels.codebook import rank1, row_column
from memtrain.kernels.codebook.codes import Book
from memtrain.kernels.codebook.row_column import Sides
from memtrain.kernels.dispatch import backend
from memtrain.kernels.packing import bits as bitpack

KERNELS = ["cpu", "triton"]
BOOKS = [
    Book("DE", 2, True),
    Book("Power-3", 3, True),
    Book("Linear", 4, True),
    Book("DE-0", 5, False),
    Book("E3M2", 6, True),
    Book("Power-2", 7, False),
    Book("DE", 8, True),
    Book("DE", 8, False),
]
every_book = pytest.mark.parametrize("case", BOOKS, ids=lambda b: f"{b.map}-{b.bits}")


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
    codes = book.encode(x, torch.ones(1, 1), Book("DE", 2, False))
    assert codes.tolist() == [[0, 1, 1, 2, 3, 3]]


def test_stochastic_by_hand(monkeypatch):
    u = torch.tensor([[0.25, 0.75, 0.25, 0.75, 0.25, 0.25, 0.25, 0.75]])
    monkeypatch.setattr(book, "uniform_blocks", lambda *_: u)
    # Linear of 2 bits: 1/4, 1/2, 3/4, 1. 0.375 * 2 lies half way between the lower two.
    x = 2 * torch.tensor([[0.375, 0.375, 0.25, 0.5, 1.0, 0.1, 0.0, 0.99]])
    codes = book.encode(x, torch.full((1, 1), 2.0), Book("Linear", 2, False), seed=0)
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
        want = codebook.quantize_reference(x, *case, size, seed)
        back = codebook.dequantize_reference(*want, *case, n)
        options = case._asdict()
        with backend(name):
            codes, scale = codebook.quantize(x, **options, block_size=size, seed=seed)
            decoded = codebook.dequantize(*want, **options, numel=n)
        assert torch.equal(scale, want[1])
        assert torch.equal(codes, want[0])
        assert torch.equal(decoded, back)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("seed", [None, 5])
@every_book
def test_rank1_equals_the_reference(name, seed, case):
    shapes = ((30, 17), (4, 3, 5, 5))
    if name == "cpu":
        shapes += ((1, 1), (0, 5), (300, 2), (2, 301))
    for shape in shapes:
        x = sample(case, shape)
        want = rank1.quantize_reference(x, *case, seed)
        options = case._asdict()
        with backend(name):
            codes, scale = rank1.quantize(x, **options, seed=seed)
            back = rank1.dequantize(*want, **options, shape=shape)
        assert torch.equal(codes, want[0])
        assert torch.equal(scale, want[1])
        assert torch.equal(back, rank1.dequantize_reference(*want, *case, shape))


@pytest.mark.parametrize("level", [0, 1, 2], ids=["portable", "avx2", "avx512"])
@pytest.mark.parametrize("seed", [None, 5])
def test_instruction_sets_equal_the_reference(level, seed):
    case, x = Book("DE", 8, True), sample(Book("DE", 8, True), (4099,))
    want = codebook.quantize_reference(x, *case, 128, seed)
    try:
        cpu.call("mt_limit_isa", level)
        with backend("cpu"):
            got = codebook.quantize(x, **case._asdict(), block_size=128, seed=seed)
            back = codebook.dequantize(*want, **case._asdict(), numel=4099)
    finally:
        cpu.call("mt_limit_isa", 2)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert torch.equal(back, codebook.dequantize_reference(*want, *case, 4099))


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("power", [-149, -130, -61, 61, 127])
def test_scales_at_the_ends_of_the_range(name, seed, power):
    case = Book("Power-2", 5, True)
    x = sample(case, (128,)).double() * 2.0**power
    x = (x / x.abs().max() * 2.0**power).float()
    want = codebook.quantize_reference(x, *case, 64, seed)
    with backend(name):
        codes, scale = codebook.quantize(x, **case._asdict(), block_size=64, seed=seed)
    assert torch.equal(codes, want[0])
    back = codebook.dequantize(codes, scale, **case._asdict(), numel=128)
    # the widest gap, 1 - (29 / 31)**2, and a rounding of subnormals
    room = scale.double().repeat_interleave(64) * 0.13 + 2.0**-149
    assert ((back - x).abs().double() <= room).all()


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")  # numpy, interpreted
@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_numbers_stay_in_their_block(name, seed, bad):
    options = {"map": "E4M3", "bits": 8, "signed": True}
    x = torch.randn(384)
    spoilt = x.clone()
    spoilt[130] = bad
    with backend(name):
        clean = codebook.quantize(x, **options, block_size=128, seed=seed)
        codes, scale = codebook.quantize(spoilt, **options, block_size=128, seed=seed)
        back = codebook.dequantize(codes, scale, **options, numel=384)
    assert not back[128:256].isfinite().any()
    for block in (0, 2):
        assert torch.equal(codes[block], clean[0][block])
        assert torch.equal(scale[block], clean[1][block])


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("seed", [None, 5])
def test_zero_blocks_have_code_zero_and_decode_to_zero(name, seed):
    x = torch.zeros(64)
    x[32:] = 1.0
    options = {"map": "Linear", "bits": 8, "signed": False}
    with backend(name):
        codes, scale = codebook.quantize(x, **options, block_size=32, seed=seed)
        back = codebook.dequantize(codes, scale, **options, numel=64)
    assert not codes[0].any()
    assert torch.equal(back, x)


@pytest.mark.parametrize(("map", "bits", "signed"), [("DE", 4, True), ("Power-2", 3, False)])
def test_stochastic_rounding_is_unbiased(map, bits, signed):
    """The mean of n draws is within 5 standard deviations of the value."""
    values = codebook.qmap(map, bits, signed, torch.device("cpu"))
    x = torch.linspace(values[0].item(), 1.0, 257)[:256]
    x[0] = 1.0  # the block's scale
    draws = 400
    total = torch.zeros(256, dtype=torch.float64)
    options = {"map": map, "bits": bits, "signed": signed}
    for seed in range(draws):
        codes, scale = codebook.quantize(x, **options, block_size=256, seed=seed)
        total += codebook.dequantize(codes, scale, **options, numel=256).double()
    low = torch.searchsorted(values, x, right=True).clamp(1, len(values) - 1) - 1
    gap = (values[low + 1] - values[low]).double()
    p = (x - values[low]).double() / gap
    deviation = gap * (p * (1 - p) / draws).sqrt()
    # random bits: 16, and a draw stands in the middle of its interval
    assert ((total / draws - x).abs() <= 5 * deviation + gap * 2.0**-17 + 1e-6).all()
    assert torch.equal(total[0], torch.tensor(float(draws), dtype=torch.float64))


def test_seeds_repeat_and_differ():
    x = torch.randn(1000)
    options = {"map": "DE", "bits": 4, "signed": True, "block_size": 128}
    codes = [codebook.quantize(x, **options, seed=seed)[0] for seed in (1, 1, 2)]
    assert torch.equal(codes[0], codes[1])
    assert (bitpack.unpack(codes[0], 4) != bitpack.unpack(codes[2], 4)).float().mean() > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_other_dtypes_and_strides_are_converted(name, dtype):
    x = torch.randn(20, 30).to(dtype).t()
    case = Book("DE", 8, True)
    want = codebook.quantize_reference(x.float().contiguous(), *case, 128, 3)
    side = Sides(torch.full((30,), 0.25), torch.zeros(20))
    also = row_column.quantize_reference(x.float(), side, case, 3)
    with backend(name):
        got = codebook.quantize(x, **case._asdict(), block_size=128, seed=3)
        same = row_column.quantize(x, side, case, 3)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert torch.equal(same, also)


def test_ops_have_right_fakes():
    check = ("test_schema", "test_faketensor")
    ops, case, x = torch.ops.memtrain, Book("DE", 5, True), torch.randn(20, 30)
    torch.library.opcheck(ops.codebook_quantize, (x, *case, 128, 7), test_utils=check)
    side = Sides(torch.rand(20), torch.rand(30))
    torch.library.opcheck(ops.sides_quantize, (x, *side, *case, 7), test_utils=check)
    codes = row_column.quantize(x, side, case)
    torch.library.opcheck(ops.sides_dequantize, (codes, *side, *case), test_utils=check)
