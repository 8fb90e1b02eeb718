"""The codebook quantiser: published codebooks, worked cases, kernels equal to the reference."""

import math

import pytest
import torch

from memtrain.kernels import cpu
from memtrain.kernels.codebook.quantize import (
    dequantize_blocks,
    dequantize_blocks_reference,
    quantize_blocks,
    quantize_blocks_reference,
)
from memtrain.kernels.codebook.values import Codebook, codebook
from memtrain.kernels.dispatch import backend
from memtrain.kernels.packing import bits as bitpack

# fmt: off
SIGNED_DE = [
    -0.8875, -0.6625, -0.4375, -0.2125, -0.0775, -0.0325, -0.0055, 0,
    0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0,
]
UNSIGNED_DE = [
    0, 0.00325, 0.00775, 0.02125, 0.04375, 0.06625, 0.08875, 0.15625,
    0.26875, 0.38125, 0.49375, 0.60625, 0.71875, 0.83125, 0.94375, 1.0,
]
# fmt: on
MAPS = [("DE", True), ("DE", False), ("DE-0", False), ("Linear", False), ("Linear", True)]


def test_codebooks_have_the_published_values():
    assert codebook("DE", signed=True) == pytest.approx(SIGNED_DE, abs=1e-15)
    assert codebook("DE", signed=False) == pytest.approx(UNSIGNED_DE, abs=1e-15)
    assert codebook("DE-0", signed=False) == pytest.approx([0.00325, *UNSIGNED_DE[1:]], abs=1e-15)
    assert codebook("Linear", signed=False) == tuple(k / 16 for k in range(1, 17))
    linear = codebook("Linear", signed=True)
    assert linear == pytest.approx(torch.linspace(-1, 1, 16, dtype=torch.float64).tolist())


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(("name", "signed"), MAPS)
def test_codebooks_fill_their_bits_and_ascend(name, signed, bits):
    values = codebook(name, bits=bits, signed=signed)
    assert len(values) == 2**bits
    assert list(values) == sorted(values)
    assert values[-1] == 1.0
    assert len(set(values)) == 2**bits - (name == "DE-0")


@pytest.mark.parametrize(
    ("name", "bits", "signed"), [("de", 4, True), ("DE", 1, True), ("DE-0", 4, True)]
)
def test_bad_codebooks_raise(name, bits, signed):
    with pytest.raises(ValueError, match=r"allowed|must be 2 to 8"):
        codebook(name, bits=bits, signed=signed)


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_worked_case(name):
    # scale 2: the normalised values are 1, -0.8, 0.1, 0 and -1, which has no code of its own;
    # 0.145 is the midpoint of 0.0775 and 0.2125
    x = torch.tensor([2.0, -1.6, 0.2, 0.0, -2.0, 0.28])
    with backend(name):
        codes, scale = quantize_blocks(x, Codebook("DE", 4, True), block_size=128)
    assert scale.tolist() == [2.0]
    assert bitpack.unpack(codes, 4)[0, :7].tolist() == [15, 0, 10, 7, 0, 10, 7]


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
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


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_ties_go_to_the_lower_index(name):
    # Linear: values k / 16, so the midpoints (2 k + 1) / 32 are exact
    x = torch.tensor([1.0, 3 / 32, 5 / 32, 31 / 32])
    with backend(name):
        codes, _ = quantize_blocks(x, Codebook("Linear", 4, False), block_size=128)
    assert bitpack.unpack(codes, 4)[0, :4].tolist() == [15, 0, 1, 14]


@pytest.mark.parametrize("name", ["cpu", "triton"])
@pytest.mark.parametrize(("map", "signed"), MAPS)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (127,), (4099,), (64, 3, 7, 7), (3, 1000)])
def test_kernels_equal_the_reference(name, map, signed, shape):
    x = torch.randn(shape) * torch.rand(shape) ** 3
    want = quantize_blocks_reference(x, Codebook(map, 4, signed), 128)
    back = dequantize_blocks_reference(*want, Codebook(map, 4, signed), x.numel())
    with backend(name):
        got = quantize_blocks(x, Codebook(map, 4, signed), block_size=128)
        decoded = dequantize_blocks(*want, Codebook(map, 4, signed), numel=x.numel())
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert torch.equal(decoded, back)


@pytest.mark.parametrize("level", [0, 1], ids=["portable", "avx2"])
def test_other_instruction_sets_equal_the_reference(level):
    x = torch.randn(4099)
    want = quantize_blocks_reference(x, Codebook("DE", 4, True), 128)
    try:
        cpu.call("mt_limit_isa", level)
        with backend("cpu"):
            got = quantize_blocks(x, Codebook("DE", 4, True), block_size=128)
            back = dequantize_blocks(*want, Codebook("DE", 4, True), numel=4099)
    finally:
        cpu.call("mt_limit_isa", 2)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert torch.equal(back, dequantize_blocks_reference(*want, Codebook("DE", 4, True), 4099))


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy, in the interpreter
@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_stay_in_their_block(name, bad):
    x = torch.randn(384)
    with backend(name):
        clean = quantize_blocks(x, Codebook("DE"), block_size=128)
        spoilt = x.clone()
        spoilt[130] = bad
        codes, scale = quantize_blocks(spoilt, Codebook("DE"), block_size=128)
        back = dequantize_blocks(codes, scale, Codebook("DE"), numel=384)
    assert not back[128:256].isfinite().any()
    for block in (0, 2):
        assert torch.equal(codes[block], clean[0][block])
        assert torch.equal(scale[block], clean[1][block])


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_zero_and_subnormal_blocks(name):
    x = torch.zeros(256)
    x[128:] = 1e-42
    with backend(name):
        codes, scale = quantize_blocks(x, Codebook("DE", 4, True), block_size=128)
        back = dequantize_blocks(codes, scale, Codebook("DE", 4, True), numel=256)
    assert torch.equal(back[:128], torch.zeros(128))
    assert torch.equal(back[128:], x[128:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_other_dtypes_and_strides_are_converted(name, dtype):
    x = torch.randn(40, 30).to(dtype).t()
    want = quantize_blocks_reference(x.float().contiguous(), Codebook("Linear", 4, True), 128)
    with backend(name):
        got = quantize_blocks(x, Codebook("Linear", 4, True), block_size=128)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_ops_have_right_fakes():
    x = torch.randn(300)
    check = ("test_schema", "test_faketensor")
    quantize, dequantize = (
        torch.ops.memtrain.codebook_quantize_blocks,
        torch.ops.memtrain.codebook_dequantize_blocks,
    )
    torch.library.opcheck(quantize, (x, "DE", 4, True, 128), test_utils=check)
    codes, scale = quantize(x, "DE", 4, True, 128)
    torch.library.opcheck(dequantize, (codes, scale, "DE", 4, True, 300), test_utils=check)
