import pytest
import torch

from memtrain.kernels.dispatch import backend
from memtrain.kernels.packing import bits as bit_codes
from memtrain.kernels.packing import pack

SHAPES = [(0,), (), (1,), (255,), (256,), (257,), (3, 85, 7), (20, 256)]
BACKENDS = ["reference", "cpu", "triton"]
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


def test_two_bits_and_the_mask_agree_on_the_layout():
    x = codes((256,), 1)
    assert torch.equal(pack.pack_codes(x, 1), bit_codes.pack(x.view(1, 256), 1).view(-1))


@pytest.mark.parametrize("name", BACKENDS)
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


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("bits", [1, 3, 5, 8])
def test_high_bits_do_not_reach_neighbours_and_strides_do_not_matter(name, bits):
    x = torch.randint(0, 256, (30, 20), dtype=torch.uint8).t()[::3]
    with backend(name):
        restored = pack.unpack_codes(pack.pack_codes(x, bits), bits, x.numel())
        expanded = pack.unpack_codes(pack.pack_codes(x[:1].expand(4, 30), bits), bits, 120)
    assert torch.equal(restored.view(x.shape), x & (2**bits - 1))
    assert torch.equal(expanded.view(4, 30), (x[:1] & (2**bits - 1)).expand(4, 30))


@pytest.mark.parametrize("name", BACKENDS)
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
