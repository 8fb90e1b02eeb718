import pytest
import torch

from memtrain.kernels.dispatch import backend
from memtrain.kernels.packing import pack

SHAPES = [(0,), (), (257,)]
BACKENDS = ["reference", "cpu", "triton"]


def test_reference_matches_a_worked_case():
    x = torch.zeros(300, dtype=torch.bool)
    x[[0, 32, 33, 255, 256, 299]] = True
    expected = torch.zeros(64, dtype=torch.uint8)
    expected[0], expected[1], expected[31] = 0b11, 0b10, 0b1000_0000
    expected[32], expected[32 + 11] = 1, 0b10  # 299 = 256 + 32 + 11
    assert torch.equal(pack.pack_reference(x.view(torch.uint8), 1), expected)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pack_and_unpack_match_reference(name, shape):
    x = torch.rand(shape) < 0.3
    expected = pack.pack_reference(x.view(torch.uint8), 1)
    with backend(name):
        packed = pack.pack_mask(x)
        restored = pack.unpack_mask(packed, x.numel())
    assert torch.equal(packed, expected)
    assert packed.numel() == (x.numel() + 255) // 256 * 32
    assert restored.dtype == torch.bool
    assert torch.equal(restored, x.flatten())


@pytest.mark.parametrize("name", BACKENDS)
def test_pack_takes_every_nonzero_byte_as_true_and_any_strides(name):
    x = torch.randint(0, 256, (30, 20), dtype=torch.uint8).t()[::3]
    with backend(name):
        restored = pack.unpack_mask(pack.pack_mask(x), x.numel())
    assert torch.equal(restored.view(x.shape), x != 0)


def test_wrong_input_is_refused():
    with pytest.raises(TypeError, match=r"float32.*bool"):
        pack.pack_mask(torch.zeros(3))
    with pytest.raises(ValueError, match=r"\(32,\).*300 elements of 1 bits need.*\(64,\)"):
        pack.unpack_mask(torch.zeros(32, dtype=torch.uint8), 300)
