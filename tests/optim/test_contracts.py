"""Contracts that no other file holds: peers' checkpoints, rules by name, single numbers, pauses."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import memtrain
from memtrain.compressors import Block, Factored, Identity
from memtrain.optim import (
    AdamW8bit,
    AdamW8bitFactor,
    CompressedOptimizer,
    FusedStates,
    compress,
    describe,
    state_bytes,
)
from memtrain.optim.states import layout


def test_a_weight_too_small_for_factors_leaves_the_others_their_kernels():
    rules = {"exp_avg": Block(block_size=256, map="DE", bits=8), "exp_avg_sq": Factored()}
    shapes = [(128, 128), (10, 512), (5000,)]  # the last two in blocks of 8 and of 4 bits

    def stepped(make):
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        optimizer = make(params)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()
        return params, optimizer

    def choose(param, state):
        return rules[state]

    params, optimizer = stepped(lambda p: compress(torch.optim.AdamW(p), choose))
    assert type(optimizer) is AdamW8bit
    alone, _ = stepped(AdamW8bitFactor)
    assert torch.equal(params[0], alone[0])
    general, other = stepped(lambda p: CompressedOptimizer(torch.optim.AdamW(p), choose))
    for one, its in zip(params[1:], general[1:], strict=True):
        # three roundings of a weight, and ten of each update, which is at most about lr
        eps = torch.finfo(torch.float32).eps
        assert torch.allclose(one, its, rtol=3 * eps, atol=3 * 10 * eps * 1e-3)
    assert state_bytes(optimizer) == state_bytes(other)


def test_rules_by_name_keep_embeddings_norms_and_biases():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(100, 64)
            self.norm = nn.LayerNorm(64)
            self.out = nn.Linear(64, 100)

    model = Model()
    kept = [
        {"parameter": "embed*", "compressor": "keep"},
        {"parameter": "*norm*", "compressor": "identity"},
        {"parameter": "*.bias", "compressor": "keep"},
    ]
    cfg = {"preset": "optimizer_only", "optim": {"min_elements": 0, "exceptions": kept}}
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), cfg)
    names: dict[Any, str] = {param: name for name, param in model.named_parameters()}
    rows = {(names[row.param], row.state): row for row in describe(optimizer)}
    exact = {name for (name, _), row in rows.items() if isinstance(row.compressor, Identity)}
    assert exact == {"embed.weight", "norm.weight", "norm.bias", "out.bias"}
    assert rows["embed.weight", "exp_avg"].reason == "its rule says keep"


@pytest.mark.parametrize("name", ["Adam", "NAdam", "Adagrad", "ASGD", "Adadelta"])
def test_single_numbers_are_never_compressed(name):
    """A parameter of one number has the shape of its `step`, which must stay a count."""
    kind = getattr(torch.optim, name)
    params = [nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.randn(40, 40))]
    choose = layout.Choice()
    optimizer = CompressedOptimizer(kind(params), choose, min_elements=0)
    plain = kind([nn.Parameter(params[0].detach().clone())])
    (twin,) = plain.param_groups[0]["params"]
    for step in range(4):
        for param in (*params, twin):
            param.grad = torch.full_like(param, 0.5 + step)
        optimizer.step()
        plain.step()
        if step == 1:  # a checkpoint in between
            optimizer.load_state_dict(optimizer.state_dict())
            saved = plain.state_dict()["state"][0]
            assert all(
                torch.equal(optimizer.state[params[0]][k], torch.as_tensor(x))
                for k, x in saved.items()
            )
    assert torch.equal(params[0], twin)
    assert optimizer.state[params[0]]["step"] == 4
    assert any(isinstance(value, dict) for value in optimizer.state[params[1]].values())


@pytest.fixture
def one_process():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.nightly  # the first import of fully_shard takes seconds
def test_audits_of_ddp_and_of_sharded_models(one_process):
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    batch, nbytes = torch.randn(32, 64), sum(p.nbytes for p in net.parameters())

    def of(report, kind):
        return sum(row.plain for row in report.rows if row.kind == kind)

    alone = memtrain.audit(net, batch)
    ddp = nn.parallel.DistributedDataParallel(net)
    report = memtrain.audit(ddp, batch, measure=True)
    assert of(report, "gradient") == 2 * nbytes  # and its buckets
    assert of(report, "activation") == of(alone, "activation")
    assert report.measured is not None
    sharded: Any = fully_shard(copy.deepcopy(net))
    optimizer = torch.optim.AdamW(sharded.parameters())
    for measure in (False, True):
        with pytest.raises(ValueError, match="is sharded by fully_shard"):
            memtrain.audit(sharded, batch, optimizer=optimizer, measure=measure)
    with pytest.raises(ValueError, match="is sharded by fully_shard"):
        memtrain.wrap(sharded, optimizer, batch=batch)
    sharded(batch).sum().backward()  # nothing was changed
    optimizer.step()


def test_a_state_whose_sign_is_not_known_is_refused():
    with pytest.raises(TypeError, match="state 'variance' of Odd is in no list"):
        type("Odd", (FusedStates,), {"names": ("exp_avg", "variance")})
