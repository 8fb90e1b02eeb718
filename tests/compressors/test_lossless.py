import pytest
import torch

from memtrain.compressors import Integers, Key


@pytest.mark.parametrize("shape", [(), (0,), (1,), (256,), (3, 100)], ids=str)
def test_a_mask_is_exact_at_one_bit(shape):
    x, bits = torch.rand(shape) < 0.5, Integers(limit=2)
    packed = bits.compress(x, key=Key())
    assert torch.equal(bits.decompress(packed), x)
    assert packed.nbytes == (x.numel() + 255) // 256 * 32


def test_integers_take_only_integers():
    with pytest.raises(TypeError, match=r"allowed: torch\.bool, torch\.uint8"):
        Integers(limit=9).compress(torch.zeros(3), key=Key())


@pytest.mark.parametrize(
    ("limit", "dtype"),
    [(1, torch.uint8), (256, torch.uint8), (257, torch.int16), (32768, torch.int16),
     (32769, torch.int32), (2**31 + 1, torch.int64)],
)  # fmt: skip
def test_a_limit_decides_the_width_without_reading(limit, dtype):
    x = torch.tensor([0, min(limit, 200) - 1])
    packed = Integers(limit=limit).compress(x, key=Key())
    assert packed.tensors["values"].dtype == dtype
    assert torch.equal(Integers(limit=limit).decompress(packed), x)
    fake = Integers(limit=limit).compress(x.to("meta"), key=Key())
    assert fake.nbytes == packed.nbytes


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize(("limit", "bits"), [(1, 1), (4, 2), (9, 4), (128, 7), (129, 8)])
def test_bytes_below_a_limit_are_packed_to_the_bit(limit, bits, dtype):
    x = torch.arange(1024).remainder(min(limit, 128)).to(dtype).view(8, 128).t()
    packed = Integers(limit=limit).compress(x, key=Key())
    assert packed.nbytes == 1024 * bits / 8
    restored = Integers(limit=limit).decompress(packed)
    assert restored.dtype == dtype
    assert torch.equal(restored, x)
    assert Integers(limit=limit).compress(x.to("meta"), key=Key()).nbytes == packed.nbytes


def test_a_wrong_limit_is_refused():
    with pytest.raises(ValueError, match="limit=0; allowed: 1 or more"):
        Integers(limit=0)
