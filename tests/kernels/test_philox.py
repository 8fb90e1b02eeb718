"""Random numbers of kernels, and the seeds of every op that draws: the same on every backend."""

import pytest
import torch
import triton
import triton.language as tl

from memtrain.kernels import device_guard
from memtrain.kernels.codebook import quantize, rank1
from memtrain.kernels.codebook.values import Codebook
from memtrain.kernels.dispatch import BACKENDS, backend
from memtrain.kernels.floats import rounding
from memtrain.kernels.floats.formats import named_format
from memtrain.kernels.group import group
from memtrain.kernels.norm import norm
from memtrain.kernels.patch import patch
from memtrain.kernels.random import philox, philox_triton
from memtrain.kernels.step import split

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), -12345678901234]


@triton.jit(do_not_specialize=["seed"])
def _words_kernel(out_ptr, seed, OURS: tl.constexpr):
    at = tl.arange(0, 64)
    if OURS:
        w0, w1, w2, w3 = philox_triton.philox(seed, at)
    else:
        w0, w1, w2, w3 = tl.randint4x(seed, at.to(tl.uint32))
    tl.store(out_ptr + at, w0.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 64 + at, w1.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 128 + at, w2.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 192 + at, w3.to(tl.int32, bitcast=True))


def scalar(counter, seed):
    """Philox4x32-10 in Python's own integers, as the paper writes it."""
    c, k = [counter, 0, 0, 0], [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 % 2**32, (p0 >> 32) ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def test_philox_gives_the_published_answer():
    # Random123's known-answer file: philox4x32 10, counter and key all 0.
    words = [int(word) for word in philox.philox(torch.tensor(0), 0)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("seed", SEEDS)
def test_philox_matches_python_integers(seed):
    counters = [0, 1, 2, 65535, 2**31 - 1, 2**31, 2**32 - 1]
    words = torch.stack(philox.philox(torch.tensor(counters), seed), dim=1)
    assert words.tolist() == [scalar(counter, seed) for counter in counters]


@pytest.mark.parametrize("backend", ["triton"])  # on a GPU where there is one
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_philox_is_the_stream_of_triton(seed, ours, backend):
    expected = torch.stack(philox.philox(torch.arange(64), seed))
    words = torch.empty(4, 64, dtype=torch.int32)
    device_guard.launch(_words_kernel, (1,), words, seed, OURS=ours)
    assert torch.equal(words.long() & 0xFFFFFFFF, expected)


def test_uniform_blocks_gives_each_slice_its_half_word():
    u = philox.uniform_blocks(2, 16, 7, torch.device("cpu"))
    for block in range(2):
        for column in range(2):
            words = scalar(block * 2 + column, 7)
            for s in range(8):
                half = words[s // 2] >> (16 * (s % 2)) & 0xFFFF
                assert u[block, s * 2 + column] == (half + 0.5) / 65536


def test_uniform_pairs_turns_the_words_of_odd_blocks():
    u = philox.uniform_pairs(3, 16, 7, torch.device("cpu"))
    for block in range(3):
        for column in range(2):
            words = scalar(block // 2 * 2 + column, 7)
            for s in range(8):
                word = words[s // 2]
                if block % 2:
                    word = word >> 8 | (word & 0xFF) << 24
                assert u[block, s * 2 + column] == ((word >> 16 * (s % 2) & 0xFFFF) + 0.5) / 65536


LAYOUT = named_format("fp8_forward:stochastic").layout
BOOK = Codebook("DE", 4)


def split_once(x, seed):
    split.split(x, weight := torch.empty_like(x, dtype=torch.bfloat16), seed=seed, stochastic=True)
    return weight


OPS = {
    "group_quantize": lambda x, seed: group.group_quantize(x, 4, 16, seed),
    "its op": lambda x, seed: group.group_quantize(x.clone().requires_grad_(), 4, 16, seed),
    "of float16": lambda x, seed: group.group_quantize(x.half(), 4, 16, seed),
    "norm_quantize": lambda x, seed: norm.norm_quantize(x, 16, codes=(4, 16, seed, True)),
    "patch_quantize": lambda x, seed: patch.patch_quantize(x.view(1, 4, 16, 1), seed, True),
    "round_count": lambda x, seed: rounding.round_count(x, LAYOUT, seed),
    "round_count_": lambda x, seed: rounding.round_count_(x.clone(), LAYOUT, seed),
    "encode": lambda x, seed: rounding.encode(x, LAYOUT, seed),
    "quantize_blocks": lambda x, seed: quantize.quantize_blocks(x, BOOK, block_size=16, seed=seed),
    "rank1": lambda x, seed: rank1.quantize(x, BOOK, seed=seed),
    "split": split_once,
    "philox": lambda x, seed: philox.philox(torch.arange(4), seed),
}
every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
every_backend = pytest.mark.parametrize("name", BACKENDS)


def tensors(found):
    return [found] if isinstance(found, torch.Tensor) else list(found)


@every_backend
@every_op
def test_a_seed_is_its_64_bits_and_one_of_more_is_named(op, name):
    x = torch.randn(4, 16)
    with backend(name):
        found, expected = (tensors(op(x, seed)) for seed in (2**63 + 5, 5 - 2**63))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        for seed in (2**64, -(2**63) - 1):
            with pytest.raises(ValueError, match=rf"seed={seed}; allowed: integers of 64 bits"):
                op(x, seed)
