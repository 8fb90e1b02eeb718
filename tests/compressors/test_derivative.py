from itertools import pairwise

import pytest
import torch

from memtrain.compressors import COMPRESSORS, Compressor, DerivativeCode, Key
from memtrain.compressors.fewbit_solver import table

KEY = Key(seed=1)


@pytest.mark.parametrize("function", ["gelu", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (257,), (3, 100)], ids=str)
def test_decompress_gives_the_derivatives_level(function, dtype, shape):
    x = (torch.randn(shape) * 2).to(dtype)
    before = x.clone()
    code = DerivativeCode(bits=3, function=function)
    level = code.decompress(code.compress(x, key=KEY))
    step = table(function, 3)
    expected = torch.from_numpy(step(x.double().numpy().reshape(-1))).view(shape)
    assert level.shape == x.shape
    assert level.dtype == dtype
    assert torch.equal(level, expected.float().to(dtype))
    assert torch.equal(x, before)


def test_compress_takes_elements_in_logical_order():
    x = torch.randn(20, 30).t()[:, ::2]
    code = DerivativeCode(bits=2, function="silu")
    assert torch.equal(
        code.compress(x, key=KEY).tensors["codes"],
        code.compress(x.contiguous(), key=KEY).tensors["codes"],
    )


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_payload_has_bits_per_element_and_survives_saving(bits, tmp_path):
    code = DerivativeCode(bits=bits)
    x = torch.randn(1000)
    packed = code.compress(x, key=KEY)
    assert packed.nbytes == 1024 * bits // 8
    torch.save(packed.tensors, tmp_path / "payload.pt")
    loaded = torch.load(tmp_path / "payload.pt", weights_only=True)
    again = code.decompress(packed._replace(tensors=loaded))
    assert torch.equal(again, code.decompress(packed))
    meta = code.compress(x.to("meta"), key=KEY)
    assert meta.nbytes == packed.nbytes


def test_more_bits_come_nearer_to_the_derivative():
    x = torch.randn(4096, dtype=torch.float64, requires_grad=True)
    torch.nn.functional.gelu(x).sum().backward()
    errors = []
    for bits in (1, 2, 3, 4):
        code = DerivativeCode(bits=bits)
        errors.append((code.decompress(code.compress(x, key=KEY)) - x.grad).pow(2).mean().item())
    # each bit quarters the squared error of a smooth function's best step function, at the limit
    assert all(finer < 0.5 * coarser for coarser, finer in pairwise(errors))


def test_relu_codes_are_the_same_from_input_and_output():
    x = torch.tensor([-2.0, -0.0, 0.0, 1e-38, 3.0])
    code = DerivativeCode(bits=1, function="relu")
    from_input, from_output = code.compress(x, key=KEY), code.compress(x.relu(), key=KEY)
    assert torch.equal(from_input.tensors["codes"], from_output.tensors["codes"])
    assert code.decompress(from_input).tolist() == [0, 0, 0, 1, 1]


def test_it_is_a_registered_frozen_value():
    assert COMPRESSORS["derivative"] is DerivativeCode
    assert isinstance(DerivativeCode(), Compressor)
    assert DerivativeCode() == DerivativeCode(bits=3, function="gelu")
    assert hash(DerivativeCode(bits=2)) == hash(DerivativeCode(bits=2))
    with pytest.raises(AttributeError):
        DerivativeCode().bits = 2


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"bits": 0}, "bits 0 is out of range; allowed: 1 to 4"),
        ({"bits": 5}, "bits 5"),
        ({"bits": 2.5}, "bits 2.5"),
        ({"bits": True}, "bits True"),
        ({"function": "gelo"}, "'gelo' is unknown; allowed: gelu"),
    ],
)
def test_wrong_fields_are_named(fields, word):
    with pytest.raises(ValueError, match=word):
        DerivativeCode(**fields)
