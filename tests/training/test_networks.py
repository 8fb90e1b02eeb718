from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from memtrain.training.networks import build_model
from memtrain.training.recipe import build_optimizer, learning_rate
from memtrain.training.settings import OptimizerConfig

GPT = {"name": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 12}


def test_gpt_is_causal():
    model = build_model(GPT, seed=0)
    tokens = torch.randint(256, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_gpt_ties_its_embedding_and_starts_near_uniform():
    model = build_model(GPT, seed=0)
    assert model.head.weight is model.tokens.weight
    tokens = torch.randint(256, (4, 12))
    loss = model(tokens, labels=tokens)
    expected = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)
    assert abs(loss.item() - torch.log(torch.tensor(256.0)).item()) < 0.1


def test_weight_decay_spares_biases_and_norms():
    model = build_model(GPT, seed=0)
    optimizer = build_optimizer(OptimizerConfig(weight_decay=0.3), model)
    decayed, spared = optimizer.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    assert all(p.dim() >= 2 for p in decayed["params"])
    count = len(decayed["params"]) + len(spared["params"])
    assert count == len(list(model.parameters()))


def test_learning_rate_rises_then_falls_to_its_end():
    rates = [learning_rate(s, peak=2.0, warmup=10, steps=110, final=0.1) for s in range(111)]
    assert rates[0] == 0.2
    assert rates[9] == rates[10] == 2.0 == max(rates)
    assert rates[60] == pytest.approx(0.2 + 1.8 / 2)
    assert rates[110] == pytest.approx(0.2)
    assert all(a >= b for a, b in pairwise(rates[10:]))
