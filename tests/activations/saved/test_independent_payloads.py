"""Factors that the backward multiplies have independent errors, so that gradients are unbiased."""

import copy
import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memtrain.config.sources import load
from tests.activations.proof.comparison import (
    flat,
    in_thread,
    parameter_gradients,
    unbiased,
    wrapped,
)

TWO_BITS = load(
    {
        "preset": "activations_only",
        "activations": {
            "min_elements": 0,
            "rules": [
                {"op": "@nonlinear", "compressor": "keep"},
                {"compressor": {"name": "group", "bits": 2}},
            ],
        },
    }
)

WIDE_QUERIES = load(
    {
        "preset": "activations_only",
        "activations": {
            "min_elements": 0,
            "rules": [
                {"op": "*attention", "compressor": {"name": "group", "bits": 8}},
                {"op": "*norm", "compressor": {"name": "group", "bits": 4}},
                {"compressor": "keep"},
            ],
        },
    }
)


class Chain(nn.Module):
    """A random product of sums and products, whose factors are used more than once."""

    def __init__(self, seed):
        super().__init__()
        self.seed, self.first, self.second = seed, nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        rng, h = random.Random(self.seed), self.first(x)
        pool = [h, self.second(h)]
        for _ in range(4):
            a, b = pool[-1], rng.choice(pool)
            kind = rng.choice(("mul", "mul", "mm", "linear", "exp", "conv"))
            if kind == "mul":
                y = a * b / 2
            elif kind == "mm":
                y = a @ b.T @ b / 32
            elif kind == "linear":
                y = self.second(a)
            elif kind == "exp":
                y = torch.exp(a.clamp(-2.0, 1.0))
            else:
                y = F.conv1d(a.view(1, 32, 32), b.view(32, 32, 1)).view(32, 32) / 8
            pool.append(y)
        return pool[-1]


class ThroughThread(nn.Linear):
    """Multiplies by what another thread has made of its factor."""

    def forward(self, x):
        h = super().forward(x)
        return in_thread(lambda squared: 2 * squared, h * h) * h


class Cube(nn.Linear):
    def forward(self, x):
        h = super().forward(x)
        return h * h * h


MODELS = {
    **{f"chain {seed}": partial(Chain, seed) for seed in range(8)},
    "through a thread": partial(ThroughThread, 32, 32),
    "compiled": partial(Cube, 32, 32),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_tensor_that_multiplies_twice_has_an_unbiased_gradient(name):
    torch.manual_seed(int(name[-1]) if name.startswith("chain") else 0)
    model, x = MODELS[name](), torch.randn(32, 32)
    exact = flat(parameter_gradients(copy.deepcopy(model), x).grads)
    mine = wrapped(copy.deepcopy(model), "balanced", cfg=TWO_BITS)
    if name == "compiled":
        mine.compile(backend="aot_eager")
    right, found = unbiased(lambda: flat(parameter_gradients(mine, x).grads), exact, 0.0)
    assert right, found


class QueryKeyNorm(nn.Module):
    """Attention whose queries and keys are outputs of norms."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)
        self.query_norm, self.key_norm = nn.LayerNorm(32), nn.LayerNorm(32)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(self.query_norm(q), self.key_norm(k), v)


def test_normalized_queries_and_keys_have_the_bits_of_their_rule():
    torch.manual_seed(0)
    model, x = QueryKeyNorm(), torch.randn(4, 32, 64)
    exact = flat(parameter_gradients(copy.deepcopy(model), x).grads)
    mine = wrapped(copy.deepcopy(model), "balanced", cfg=WIDE_QUERIES)
    own = flat(parameter_gradients(mine, x).grads)
    assert float(F.cosine_similarity(own, exact, dim=0)) > 0.99
