import pytest
import torch

from memtrain.kernels.packing import bits as bit_codes

WIDTHS = range(1, 9)


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


def test_four_bits_are_the_nibble_layout():
    codes = torch.randint(0, 16, (1, 128))
    assert torch.equal(bit_codes.pack(codes, 4)[0].long(), codes[0, :64] | codes[0, 64:] << 4)


def test_three_bits_are_three_little_endian_bytes_of_eight_codes():
    # 1 + 2*8 + 3*64 + 4*512 + 5*4096 + 6*32768 + 7*262144 = 0b111_110_101_100_011_010_001_000
    codes = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]])
    word = 0b111_110_101_100_011_010_001_000
    assert bit_codes.pack(codes, 3).tolist() == [[word & 255, word >> 8 & 255, word >> 16]]
