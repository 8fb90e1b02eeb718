"""AdamW4bit: the contracts of torch.optim.AdamW, with moments in 4 bits."""

import copy

import pytest
import torch
from torch import nn

from memtrain.optim import (
    AdamW4bit,
    AdamW8bitFactor,
    Choice,
    compress,
    describe,
    predict,
    restore,
    state_bytes,
)

SECONDS = ["Rank-1/Linear", "B128/Linear", "factored"]
BLOCKS = 12


def gpt2_shapes():
    block = [(768,)] * 6 + [(768, 2304), (2304,), (768, 768), (768, 3072), (3072,), (3072, 768)]
    return [(50257, 768), (1024, 768), *block * BLOCKS, (768,), (768,)]


def parameter(*shape, scale=0.1):
    param = nn.Parameter(torch.randn(shape) * scale)
    param.grad = torch.randn(shape)
    return param


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(name, marks=() if name == "Rank-1/Linear" else pytest.mark.nightly)
        for name in SECONDS
    ],
)
def test_converges_as_torchs_adamw(second):
    def run(make):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
        x = torch.randn(256, 64)
        y = torch.sin(x @ torch.randn(64, 64) / 8)
        optimizer = make(net.parameters())
        losses = []
        for _ in range(150):
            optimizer.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses[0], losses[-1]

    start, plain = run(lambda p: torch.optim.AdamW(p, lr=3e-3))
    same_start, ours = run(lambda p: AdamW4bit(p, lr=3e-3, second=second))
    assert start == same_start
    assert plain < start / 20
    assert start - ours >= 0.95 * (start - plain)


@pytest.mark.parametrize("second", SECONDS)
def test_bytes_per_parameter_on_gpt2_shapes(second):
    params = [nn.Parameter(torch.empty(s, device="meta")) for s in gpt2_shapes()]
    rows = describe(AdamW4bit(params, second=second))
    per_param = sum(row.nbytes for row in rows) / sum(p.numel() for p in params)
    assert per_param <= (0.56 if second == "factored" else 1.10)


def test_side_vectors_that_cost_too_much_are_named():
    rows = describe(AdamW4bit([parameter(5000, 3)], second="Rank-1/Linear"))
    assert "1.33 bytes per parameter" in rows[1].reason
    assert rows[0].reason == ""


def test_plain_checkpoint_of_other_dtype_and_strides_loads_as_float32():
    param = nn.Parameter(torch.ones(20, 30, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    plain = torch.optim.AdamW([param])
    plain.step()
    saved = plain.state_dict()
    moments = saved["state"][0]
    moments["exp_avg"] = torch.randn(30, 20).bfloat16().t()
    ours = AdamW4bit([param])
    ours.load_state_dict(saved)
    assert ours.state[param]["exp_avg"].is_contiguous()
    assert ours.state[param]["exp_avg"].dtype == torch.float32
    assert torch.equal(ours.state[param]["exp_avg"], moments["exp_avg"].float())


def test_compress_carries_state_and_predicts_what_it_makes():
    params = [parameter(128, 128), parameter(30)]
    original = torch.optim.AdamW(params, lr=0.25, betas=(0.8, 0.95), weight_decay=0.3)
    predicted = predict(original)
    original.step()
    optimizer = compress(original)
    assert isinstance(optimizer, AdamW4bit)
    assert optimizer.param_groups is original.param_groups
    assert not original.state
    assert optimizer.state[params[0]]["step"] == 1
    rows = describe(optimizer)
    assert [(r.state, r.nbytes, r.compressor) for r in rows] == [
        (r.state, r.nbytes, r.compressor) for r in predicted
    ]
    assert "30 elements <= min_elements 4096" in rows[2].reason
    optimizer.step()
    assert restore(optimizer) is original
    assert original.state[params[0]]["step"] == 2


def test_amsgrad_goes_to_the_general_wrapper():
    param = parameter(100, 100)
    optimizer = compress(torch.optim.AdamW([param], amsgrad=True))
    optimizer.step()
    assert not isinstance(optimizer, AdamW4bit)
    assert sorted(optimizer.state[param]["max_exp_avg_sq"]) == ["codes", "scale"]


@pytest.mark.parametrize("kind", ["exact", "block", "rank1", "factored", "B64/Linear"])
def test_a_parameter_that_grew_is_refused_before_anything_is_written(kind):
    first_weight, weight = nn.Parameter(torch.ones(64, 100)), nn.Parameter(torch.ones(64, 100))
    second = {"exact": "identity", "block": "B128/Linear", "rank1": "Rank-1/Linear"}
    first = "identity" if kind == "exact" else "B128/DE"
    optimizer = AdamW4bit(
        [first_weight, weight], first=first, second=second.get(kind, kind), min_elements=0
    )
    for param in (first_weight, weight):
        param.grad = torch.ones_like(param)
    optimizer.step()
    weight.data = torch.ones(110, 64)  # as resize_token_embeddings does
    weight.grad = torch.ones(110, 64)
    before = copy.deepcopy([first_weight.detach(), [*optimizer.state.values()]])
    with pytest.raises(ValueError, match=r"elements|needs"):
        optimizer.step()
    assert torch.equal(weight, torch.ones(110, 64))
    assert str(before) == str([first_weight.detach(), [*optimizer.state.values()]])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("density", [0.01, 0.03, 1.0])
def test_rank_one_and_not_8_bits_makes_steps_larger(seed, density):
    """Beside the same factors in float32, whose weights go as far."""
    generator, weight = torch.Generator().manual_seed(seed), nn.Parameter(torch.zeros(64, 256))
    optimizer = AdamW8bitFactor([weight], lr=1e-3, weight_decay=0.0)
    m, square, other = torch.zeros(3, 64, 256)
    for step in range(1, 21):
        weight.grad = torch.randn(64, 256, generator=generator)
        weight.grad *= torch.rand(64, 256, generator=generator) < density
        optimizer.step()
        m = 0.9 * m + 0.1 * weight.grad
        square = 0.999 * square + 0.001 * weight.grad**2
        v = square.mean(1, keepdim=True) * square.mean(0) / square.mean()
        other -= 1e-3 * m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    assert float(weight.detach().abs().max() / other.abs().max()) == pytest.approx(1, rel=0.02)


EIGHT = Choice(first="B256/DE", second="B256/DE-0", bits=8)


@pytest.mark.parametrize(
    ("choose", "nbytes", "share"), [(None, 0.53125, 0.9), (EIGHT, 1.015625, 0.99)]
)
def test_muon_follows_its_float32_form_with_compressed_momentum(choose, nbytes, share):
    """torch's Muon takes each momentum whole for its step, and leaves it in 4 or 8 bits."""

    def trained(pack):
        torch.manual_seed(0)
        weight, target = nn.Parameter(torch.randn(96, 128) / 10), torch.randn(96, 128) / 10
        optimizer = pack(torch.optim.Muon([weight], lr=3e-3, weight_decay=0.0))
        losses = []
        for _ in range(60):
            loss = (torch.randn(256, 128) @ (weight - target).T).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses[0] - losses[-1], state_bytes(optimizer) / weight.numel()

    fall, whole = trained(lambda optimizer: optimizer)
    ours, kept = trained(lambda optimizer: compress(optimizer, choose))
    assert (whole, kept) == (4.0, nbytes)
    assert share * fall < ours < fall / share
