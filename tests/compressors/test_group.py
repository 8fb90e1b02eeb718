import pytest
import torch

from memtrain.compressors import Group, Key


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 0}, "bits=0; allowed: 1 to 8"),
        ({"bits": 9}, "bits=9; allowed: 1 to 8"),
        ({"bits": 2.5}, r"bits=2\.5; allowed: integers"),
        ({"bits": True}, "bits=True; allowed: integers"),
        ({"group_size": 0}, "group_size=0; allowed: multiples of 8 from 8 to 16384"),
        ({"group_size": 12}, "group_size=12; allowed: multiples of 8"),
        ({"group_size": 16392}, "group_size=16392; allowed: multiples of 8"),
        ({"rounding": "up"}, "rounding='up'; allowed: 'stochastic', 'nearest'"),
        ({"bounds": "fp16"}, "bounds='fp16'; allowed: 'bf16', 'fp32'"),
    ],
)
def test_wrong_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Group(**fields)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_only_floats_are_taken(dtype):
    with pytest.raises(TypeError, match=r"allowed: torch\.float32"):
        Group().compress(torch.zeros(8, dtype=dtype), key=Key())


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("bounds", "extra"), [("bf16", 4), ("fp32", 8)])
def test_bytes_are_those_of_the_docstring(bits, bounds, extra):
    compressor = Group(bits=bits, group_size=64, bounds=bounds)
    packed = compressor.compress(torch.randn(10, 100), key=Key())
    assert packed.nbytes == 16 * (64 * bits // 8 + extra)


def test_the_key_feeds_stochastic_rounding_only():
    x = torch.randn(1000)
    for rounding, differs in (("stochastic", True), ("nearest", False)):
        compressor = Group(rounding=rounding)
        codes = [compressor.compress(x, key=Key(step=step)).tensors["codes"] for step in (1, 2)]
        assert torch.equal(*codes) != differs


def test_mean_over_keys_is_the_tensor():
    x = torch.linspace(-1.0037, 2.0091, 512)
    compressor, count = Group(bits=2), 4000
    total = torch.zeros(512, dtype=torch.float64)
    for step in range(count):
        total += compressor.decompress(compressor.compress(x, key=Key(step=step))).double()
    lo, hi = (
        compressor.compress(x, key=Key()).tensors["bounds"].double().T.repeat_interleave(256, 1)
    )
    step = (hi - lo) / 3
    chance = ((x.double() - lo) / step).frac()
    error = step * (chance * (1 - chance) / count).sqrt() + 1e-12
    # |z| > 6 has probability 2e-9, any of 512 1e-6; 16 random bits may shift a mean by 2**-17 step.
    off = ((total / count - x.double()).abs() - 2.0**-17 * step).clamp(min=0)
    assert (off / error).max() < 6
    assert (off / error).max() > 1
