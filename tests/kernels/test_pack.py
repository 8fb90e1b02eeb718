"""Codes of 1 to 8 bits and masks in bytes: their layout, and kernels equal to the reference."""

import pytest
import torch

from memtrain.kernels.dispatch import backend
from memtrain.kernels.packing import bits as bit_codes
from memtrain.kernels.packing import pack

SHAPES = [(0,), (), (1,), (255,), (256,), (257,), (3, 85, 7), (20, 256)]
every_backend = pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
WIDTHS = range(1, 9)


def codes(shape, bits):
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8)


def test_reference_matches_a_worked_case():
    x = torch.zeros(300, dtype=torch.uint8)
    x[0], x[32], x[64], x[256] = 5, 6, 7, 3
    packed = pack.pack_reference(x, 3)
    # Lane l holds elements 32 l to 32 l + 31: 5 + 6 * 8 + 7 * 64 = 0b111_110_101.
    expected = torch.zeros(2 * 96, dtype=torch.uint8)
    expected[0], expected[32], expected[96] = 0b11_110_101, 0b1, 3
    assert torch.equal(packed, expected)


@every_backend
@pytest.mark.parametrize("bits", WIDTHS)
def test_pack_and_unpack_match_reference(name, bits):
    for shape in SHAPES:
        x = codes(shape, bits)
        expected = pack.pack_reference(x, bits)
        with backend(name):
            packed = pack.pack_codes(x, bits)
            restored = pack.unpack_codes(packed, bits, x.numel())
        assert torch.equal(packed, expected)
        assert packed.numel() == (x.numel() + 255) // 256 * 32 * bits
        assert restored.dtype == torch.uint8
        assert torch.equal(restored, x.flatten())


@every_backend
@pytest.mark.parametrize("bits", [1, 3, 5, 8])
def test_high_bits_do_not_reach_neighbours_and_strides_do_not_matter(name, bits):
    x = torch.randint(0, 256, (30, 20), dtype=torch.uint8).t()[::3]
    with backend(name):
        restored = pack.unpack_codes(pack.pack_codes(x, bits), bits, x.numel())
        expanded = pack.unpack_codes(pack.pack_codes(x[:1].expand(4, 30), bits), bits, 120)
    assert torch.equal(restored.view(x.shape), x & (2**bits - 1))
    assert torch.equal(expanded.view(4, 30), (x[:1] & (2**bits - 1)).expand(4, 30))


@every_backend
def test_packed_codes_need_not_be_contiguous(name):
    x = codes((300,), 3)
    packed = pack.pack_codes(x, 3)
    with backend(name):
        restored = pack.unpack_codes(packed.repeat_interleave(2)[::2], 3, 300)
    assert torch.equal(restored, x)


def test_wrong_input_is_refused():
    with pytest.raises(TypeError, match=r"int64.*uint8"):
        pack.pack_codes(torch.zeros(3, dtype=torch.int64), 2)
    for bits in (0, 9):
        with pytest.raises(ValueError, match=rf"bits={bits}; allowed: 1 to 8"):
            pack.pack_codes(codes((3,), 1), bits)
    with pytest.raises(ValueError, match=r"\(64,\).*300 elements of 2 bits need.*\(128,\)"):
        pack.unpack_codes(torch.zeros(64, dtype=torch.uint8), 2, 300)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("shape", [(1, 8), (3, 24), (2, 256), (0, 8)])
def test_unpack_inverts_pack(bits, shape):
    codes = torch.randint(0, 2**bits, shape)
    packed = bit_codes.pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (shape[0], shape[1] * bits // 8)
    assert torch.equal(bit_codes.unpack(packed, bits), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_pack_matches_the_layout_computed_bit_by_bit(bits):
    codes = torch.randint(0, 2**bits, (2, 48))
    count = bit_codes.lanes(bits)
    width = 48 // count
    expected = []
    for block in codes.tolist():
        row = [0] * (48 * bits // 8)
        for position in range(width):
            word = sum(block[lane * width + position] << (lane * bits) for lane in range(count))
            for k in range(count * bits // 8):
                row[k * width + position] = word >> (8 * k) & 0xFF
        expected.append(row)
    assert bit_codes.pack(codes, bits).tolist() == expected


@pytest.mark.parametrize(
    ("numel", "rows"), [(0, 0), (1, 1), (8, 1), (9, 2)], ids=["empty", "one", "whole", "tail"]
)
def test_blocks_pads_with_zeros(numel, rows):
    padded = bit_codes.blocks(torch.ones(numel), 8)
    assert padded.shape == (rows, 8)
    assert padded.sum() == numel
