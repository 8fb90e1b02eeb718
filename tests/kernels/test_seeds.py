"""Seeds of every op that draws: 64 bits, signed or not, the same on every backend."""

import pytest
import torch

from memtrain.kernels.codebook import quantize, rank1
from memtrain.kernels.codebook.values import Codebook
from memtrain.kernels.dispatch import BACKENDS, backend
from memtrain.kernels.floats import rounding
from memtrain.kernels.floats.formats import named_format
from memtrain.kernels.group import group
from memtrain.kernels.norm import norm
from memtrain.kernels.patch import patch
from memtrain.kernels.random import philox
from memtrain.kernels.step import split

LAYOUT = named_format("fp8_forward:stochastic").layout
BOOK = Codebook("DE", 4)


def split_once(x, seed):
    split.split(x, weight := torch.empty_like(x, dtype=torch.bfloat16), seed=seed, stochastic=True)
    return weight


OPS = {
    "group_quantize": lambda x, seed: group.group_quantize(x, 4, 16, seed),
    "its op": lambda x, seed: group.group_quantize(x.clone().requires_grad_(), 4, 16, seed),
    "of float16": lambda x, seed: group.group_quantize(x.half(), 4, 16, seed),
    "norm_quantize": lambda x, seed: norm.norm_quantize(x, 16, codes=(4, 16, seed, True, False)),
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
def test_a_seed_is_its_64_bits(op, name):
    if name == "triton":
        pytest.importorskip("triton")
    x = torch.randn(4, 16)
    with backend(name):
        found, expected = (tensors(op(x, seed)) for seed in (2**63 + 5, 5 - 2**63))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@every_backend
@every_op
def test_a_seed_of_more_bits_is_named(op, name):
    if name == "triton":
        pytest.importorskip("triton")
    x = torch.randn(4, 16)
    with backend(name):
        for seed in (2**64, -(2**63) - 1):
            with pytest.raises(ValueError, match=rf"seed={seed}; allowed: integers of 64 bits"):
                op(x, seed)
