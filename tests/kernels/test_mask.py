import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memtrain.kernels.dispatch import backend
from memtrain.kernels.packing import mask

SHAPES = [(0,), (), (1,), (255,), (256,), (257,), (3, 85, 7), (40, 256)]
BACKENDS = ["reference", "cpu", "triton"]


def test_reference_matches_a_worked_case():
    x = torch.zeros(300, dtype=torch.bool)
    x[[0, 32, 33, 255, 256, 299]] = True
    expected = torch.zeros(64, dtype=torch.uint8)
    expected[0], expected[1], expected[31] = 0b11, 0b10, 0b1000_0000
    expected[32], expected[32 + 11] = 1, 0b10  # 299 = 256 + 32 + 11
    assert torch.equal(mask.pack_reference(x), expected)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pack_and_unpack_match_reference(name, shape):
    x = torch.rand(shape) < 0.3
    expected = mask.pack_reference(x)
    with backend(name):
        packed = mask.pack_mask(x)
        restored = mask.unpack_mask(packed, x.numel())
    assert torch.equal(packed, expected)
    assert packed.numel() == (x.numel() + 255) // 256 * 32
    assert restored.dtype == torch.bool
    assert torch.equal(restored, x.flatten())


@pytest.mark.parametrize("name", BACKENDS)
def test_pack_takes_every_nonzero_byte_as_true_and_any_strides(name):
    x = torch.randint(0, 256, (30, 20), dtype=torch.uint8).t()[::3]
    with backend(name):
        restored = mask.unpack_mask(mask.pack_mask(x), x.numel())
    assert torch.equal(restored.view(x.shape), x != 0)


def test_wrong_input_is_refused():
    with pytest.raises(TypeError, match=r"float32.*bool"):
        mask.pack_mask(torch.zeros(3))
    with pytest.raises(ValueError, match=r"\(32,\).*300 elements need.*\(64,\)"):
        mask.unpack_mask(torch.zeros(32, dtype=torch.uint8), 300)


def test_fake_tensors_have_the_real_shapes():
    with FakeTensorMode() as mode:
        packed = mask.pack_mask(mode.from_tensor(torch.zeros(300, dtype=torch.bool)))
        restored = mask.unpack_mask(packed, 300)
    assert (packed.shape, packed.dtype) == ((64,), torch.uint8)
    assert (restored.shape, restored.dtype) == ((300,), torch.bool)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("pack_mask", (torch.ones(300, dtype=torch.bool),)),
        ("unpack_mask", (torch.ones(64, dtype=torch.uint8), 300)),
    ],
)
def test_op_is_registered_soundly(op, arguments):
    torch.library.opcheck(getattr(torch.ops.memtrain, op).default, arguments)
