import copy
import pickle
from dataclasses import replace

import pytest
import torch

from memtrain.compressors import DerivativeCode, Key, derivative
from memtrain.compressors.fewbit import register as fewbit_register
from memtrain.compressors.fewbit.register import register
from memtrain.plan.compressor_specs import build_compressor

KEY = Key(seed=1)


def test_relu_codes_are_the_same_from_input_and_output():
    x = torch.tensor([-2.0, -0.0, 0.0, 1e-38, 3.0])
    code = DerivativeCode(bits=1, function="relu")
    from_input, from_output = code.compress(x, key=KEY), code.compress(x.relu(), key=KEY)
    assert torch.equal(from_input.tensors["codes"], from_output.tensors["codes"])
    assert code.decompress(from_input).tolist() == [0, 0, 0, 1, 1]


@pytest.fixture
def names(monkeypatch):
    """A registry of its own."""
    monkeypatch.setattr(derivative, "REGISTERED", {})
    monkeypatch.setattr(fewbit_register, "REGISTERED", derivative.REGISTERED)


def test_parameters_choose_the_table():
    x = torch.linspace(-3, 3, 1000)
    code = DerivativeCode(bits=4, function="elu", parameters=(5.0,))
    twin = x.clone().requires_grad_()
    torch.nn.functional.elu(twin, 5.0).sum().backward()
    level = code.decompress(code.compress(x, key=KEY))
    plain = DerivativeCode(bits=4, function="elu")
    other = plain.decompress(plain.compress(x, key=KEY))
    error = (level - twin.grad).pow(2).mean()
    assert error < (other - twin.grad).pow(2).mean() / 50


def test_every_parity_goes_through_the_kernel():
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 3.0])
    for function, expected in (
        ("relu6", [0, 0, 0, 1, 1]),
        ("hardshrink", [1, 1, 0, 1, 1]),
        ("leaky_relu", [0.01, 0.01, 0.01, 1, 1]),
    ):
        code = DerivativeCode(bits=3, function=function)
        packed = code.compress(x, key=KEY)
        assert packed.nbytes == 32  # one bit, whatever `bits` says
        assert torch.equal(code.decompress(packed), torch.tensor(expected, dtype=torch.float32))


def test_eight_bits_pack_to_a_byte():
    code = DerivativeCode(bits=8)
    x = torch.randn(512)
    packed = code.compress(x, key=KEY)
    assert packed.nbytes == 512
    step = code.table()
    expected = torch.from_numpy(step(x.double().numpy())).float()
    near = torch.tensor(step.boundaries)
    clear = (x[:, None] - near).abs().amin(1) > 1e-6  # float32 compares elsewhere
    assert torch.equal(code.decompress(packed)[clear], expected[clear])


def test_it_is_a_value_in_configs_pickles_and_reprs():
    spec = {"name": "derivative", "function": "softplus", "parameters": [2, 20], "bits": 2}
    code = build_compressor(spec)
    assert code == DerivativeCode(function="softplus", parameters=(2.0, 20.0), bits=2)
    assert code.parameters == (2.0, 20.0)
    for again in (pickle.loads(pickle.dumps(code)), copy.deepcopy(code), eval(repr(code))):
        assert again == code
        assert hash(again) == hash(code)
        assert again.table() == code.table()


def test_a_process_that_does_not_know_a_name_says_so(names):
    register(torch.sin, "sine")
    kept = pickle.dumps(DerivativeCode(function="sine"))
    del derivative.REGISTERED["sine"]
    with pytest.raises(ValueError, match="'sine' is not registered in this process"):
        pickle.loads(kept).table()
    with pytest.raises(ValueError, match="'sine' is unknown"):
        DerivativeCode(function="sine")


def test_a_registered_function_is_one_more_function(names):
    register(torch.sin, "sine", bits=2, interval=(-3.0, 3.0))
    code = replace(DerivativeCode(bits=4), function="sine")
    x = torch.linspace(-3, 3, 500)
    assert (code.decompress(code.compress(x, key=KEY)) - x.cos()).abs().max() < 0.1
    with pytest.raises(ValueError, match="parameters"):
        replace(code, parameters=(1.0,))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"bits": 0}, "bits 0 is out of range; allowed: 1 to 8"),
        ({"bits": 9}, "bits 9"),
        ({"bits": 2.5}, "bits 2.5"),
        ({"bits": True}, "bits True"),
        ({"function": "threshold"}, "threshold, value"),
        ({"function": "gelu", "parameters": (1.0,)}, "no parameters"),
        ({"function": "celu", "parameters": (-1.0,)}, "alpha > 0"),
        ({"function": "gelo"}, "'gelo' is unknown; did you mean 'gelu'.* allowed: gelu"),
    ],
)
def test_wrong_fields_are_named(fields, word):
    with pytest.raises(ValueError, match=word):
        DerivativeCode(**fields)
