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
