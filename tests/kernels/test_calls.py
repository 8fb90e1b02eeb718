"""Calls of the C++ library: by the compiled module and by ctypes alike."""

import pytest
import torch

from memtrain.compressors import Key
from memtrain.compressors.base import _mixed_here
from memtrain.kernels import cpu
from memtrain.kernels.group import group

compiled = pytest.mark.skipif(cpu.calls is None, reason="the module was not built")
KEYS = [Key(), Key(1, 2, 3, 4, 5, 6), Key(2**63, 2**32 - 1, 10**6), Key(seed=-1), Key(seed=2**70)]


@compiled
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_keys_are_mixed_as_in_python(key):
    assert key.bits() == cpu.calls.mixed(*key) == _mixed_here(*key)


@compiled
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_both_ways_pass_the_same_arguments(bits, monkeypatch):
    x, seed = torch.randn(3, 128), -(2**62)
    payloads = []
    for way in (cpu.calls, None):
        monkeypatch.setattr(cpu, "calls", way)
        cpu.function.cache_clear()
        quantize, dequantize, _ = group.kernels_of(x, bits, 128, True, False, x.shape)
        codes, bounds = quantize(x, seed)
        payloads.append((codes, bounds, dequantize(codes, bounds)))
    cpu.function.cache_clear()
    assert all(map(torch.equal, *payloads))


@compiled
def test_an_integer_is_passed_by_its_64_bits(monkeypatch):
    x, codes = torch.randn(3, 128), []
    for way in (cpu.calls, None):
        monkeypatch.setattr(cpu, "calls", way)
        cpu.function.cache_clear()
        quantize, _, _ = group.kernels_of(x, 4, 128, True, False, x.shape)
        codes += [quantize(x, seed)[0] for seed in (2**63 + 5, 5 - 2**63, 2**64 - 1, -1)]
    cpu.function.cache_clear()
    assert all(torch.equal(codes[0], same) for same in (codes[1], codes[4], codes[5]))
    assert all(torch.equal(codes[2], same) for same in (codes[3], codes[6], codes[7]))


@compiled
def test_calls_with_other_arguments_are_refused():
    call = cpu.calls.function(0, 2)
    with pytest.raises(TypeError, match="3 arguments; allowed: 2"):
        call(1, 2, 3)
    with pytest.raises(TypeError):
        call(1.5, 2)
    for more in (2**64, -(2**63) - 1):
        with pytest.raises(OverflowError, match=f"{more}; allowed: integers of 64 bits"):
            call(more, 0)
    with pytest.raises(ValueError, match="21 arguments; allowed: up to 20"):
        cpu.calls.function(0, 21)
