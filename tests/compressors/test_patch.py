import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memtrain.compressors import Key, Patch

CHANNELS_LAST = torch.channels_last


def roundtrip(x, **fields):
    compressor = Patch(**fields)
    return compressor.decompress(compressor.compress(x, key=Key(seed=1)))


def test_another_rounding_is_refused():
    with pytest.raises(ValueError, match="rounding='up'; allowed: 'nearest', 'stochastic'"):
        Patch(rounding="up")


@pytest.mark.parametrize(
    ("shape", "patches"),
    [
        ((2, 3, 8, 8), 2 * 3 * 4),
        ((2, 3, 7, 9), 2 * 3 * 2 * 3),
        ((3, 56, 14), 3 * 14 * 4),
        ((2, 3, 1, 1), 6),
        ((2, 2, 3, 5, 4), 12 * 2),
        ((9,), 3),
        ((), 1),
        ((2, 0, 4, 4), 0),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_docstring(shape, patches):
    packed = Patch().compress(torch.randn(shape), key=Key())
    assert packed.nbytes == 8 * patches


ORDERS = [(0, 1, 2, 3), (0, 2, 3, 1), (2, 3, 0, 1), (1, 2, 3, 0), (0, 3, 2, 1), (2, 0, 3, 1)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_memory_order_comes_back_and_values_do_not_depend_on_it(order, dtype):
    x = torch.randn(3, 5, 7, 6).to(dtype)
    inverse = [order.index(dim) for dim in range(4)]
    other = x.permute(order).contiguous().permute(inverse)
    y = roundtrip(other)
    assert y.stride() == other.stride()
    assert torch.equal(y, roundtrip(x))


@pytest.mark.parametrize(
    "shape", [(2, 1, 5, 6), (1, 4, 5, 6), (2, 3, 1, 6), (2, 3, 6, 1), (2, 3, 1, 1)], ids=str
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, CHANNELS_LAST], ids=str)
def test_dimensions_of_one_element(shape, memory_format):
    x = torch.randn(shape).contiguous(memory_format=memory_format)
    y = roundtrip(x)
    assert y.is_contiguous(memory_format=memory_format)
    assert torch.equal(y, roundtrip(x.contiguous()))


@pytest.mark.parametrize("shape", [(6, 8, 9), (2, 3, 4, 8, 9)], ids=str)
def test_three_and_five_dimensions_are_maps_in_the_last_two(shape):
    x = torch.randn(shape)
    assert torch.equal(roundtrip(x), roundtrip(x.view(-1, 1, 8, 9)).view(shape))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, CHANNELS_LAST], ids=str)
def test_both_formats_are_read_without_a_copy(memory_format, monkeypatch):
    from memtrain.kernels.patch import patch

    seen = []
    quantize = patch.patch_quantize
    monkeypatch.setattr(
        patch, "patch_quantize", lambda x, *options: seen.append(x) or quantize(x, *options)
    )
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=memory_format)
    Patch().compress(x, key=Key())
    assert seen[0].data_ptr() == x.data_ptr()
    assert seen[0].is_contiguous()


def test_fake_tensors_keep_the_memory_order():
    with FakeTensorMode():
        x = torch.empty(2, 3, 9, 10).contiguous(memory_format=CHANNELS_LAST)
        y = roundtrip(x)
    assert (y.shape, y.stride()) == (x.shape, x.stride())
