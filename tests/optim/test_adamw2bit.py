"""AdamW with a first moment of 2 bits: bytes, checkpoints, refusals, all of memtrain at once."""

import copy

import pytest
import torch
from torch import nn

import memtrain
from memtrain.compressors import LloydMax
from memtrain.optim import AdamW4bit, Lion, compress, describe, portable_state_dict, state_bytes

CONFIG = ["preset=optimizer_only", "optim=factored_2bit"]
OPTIONS = {"first": "Lloyd-Max", "second": "factored"}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))


def train(net, optimizer, steps=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(16, 64, generator=generator).to(net[0].weight.dtype)
        loss = (net(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_bytes():
    weight = nn.Parameter(torch.randn(1024, 1024))
    weight.grad = torch.randn(1024, 1024)
    optimizer = AdamW4bit([weight], **OPTIONS)
    optimizer.step()
    vectors = 2 * 4 * (1024 + 1024)  # of both moments
    step = 4
    assert state_bytes(optimizer) == 1024**2 // 4 + 1024**2 // 128 * 2 + vectors + step
    assert sum(row.nbytes for row in describe(optimizer)) == state_bytes(optimizer) - step


def test_one_dimension_and_small_ones_stay_as_with_4_bits():
    long, small = nn.Parameter(torch.zeros(5000)), nn.Parameter(torch.zeros(8, 8))
    thin = nn.Parameter(torch.zeros(2, 5000))
    rows = describe(AdamW4bit([long, small, thin], **OPTIONS))
    four = describe(AdamW4bit([long, small, thin], second="factored"))
    assert [(row.compressor, row.nbytes) for row in rows] == [
        (row.compressor, row.nbytes) for row in four
    ]
    assert "Lloyd-Max vectors would cost 2.00 bytes per parameter" in rows[4].reason


def test_learns_as_4_bits_do():
    losses = {}
    for name in ("Lloyd-Max", "B128/DE"):
        net = model()
        optimizer = AdamW4bit(net.parameters(), lr=1e-2, first=name, second="factored")
        losses[name] = train(net, optimizer, 60)
    first = train(model(), AdamW4bit([nn.Parameter(torch.zeros(1))]), 1)
    assert losses["Lloyd-Max"] < 0.5 * first
    assert losses["Lloyd-Max"] < 1.25 * losses["B128/DE"]


def test_steady_gradients_do_not_run_away():
    # all elements of one size: a scale of the root mean square would multiply the moment by 1.36
    weight = nn.Parameter(torch.zeros(128, 256))
    sign = torch.randn(128, 256).sign()
    optimizer = AdamW4bit([weight], lr=1.0, weight_decay=0.0, **OPTIONS)
    for _ in range(50):
        weight.grad = sign.clone()
        optimizer.step()
    # 50 steps of 1, and at most what the scale's rounding (2**-7) loses of them nine times over
    assert (weight + 50 * sign).abs().max() < 1


def test_plain_checkpoints_both_ways():
    net = model()
    optimizer = AdamW4bit(net.parameters(), lr=1e-2, **OPTIONS)
    train(net, optimizer)
    plain = torch.optim.AdamW(net.parameters())
    plain.load_state_dict(copy.deepcopy(portable_state_dict(optimizer)))
    m = plain.state[net[0].weight]["exp_avg"]
    assert m.dtype == torch.float32
    again = AdamW4bit(net.parameters(), lr=1e-2, **OPTIONS)
    again.load_state_dict(plain.state_dict())
    # quantised again, by rows and columns of its own: a third of it may go, its signs may not
    back = again.unpacked(net[0].weight)["exp_avg"]
    assert torch.equal(back.sign(), m.sign())
    assert (back - m).norm() < 0.5 * m.norm()
    train(net, again)


@pytest.mark.parametrize("kind", [torch.optim.RAdam, torch.optim.NAdam, Lion])
def test_other_optimizers_are_refused(kind):
    net = model()
    plain = kind(net.parameters(), lr=1e-3)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=rf"LloydMax.*{kind.__name__}.*factored_4bit"):
        memtrain.wrap(net, plain, CONFIG)
    plain.zero_grad()  # still the user's own
    assert all(torch.equal(a, b) for a, b in zip(before.values(), net.parameters(), strict=True))


def test_refused_without_a_factored_second_moment():
    with pytest.raises(ValueError, match=r"LloydMax.*AdamW4bit.*factored second moment"):
        AdamW4bit([nn.Parameter(torch.zeros(128, 128))], first="Lloyd-Max")
    plain = torch.optim.AdamW([nn.Parameter(torch.zeros(128, 128))], amsgrad=True)
    with pytest.raises(ValueError, match="LloydMax"):
        compress(plain, lambda param, state: LloydMax())


def test_momentum_takes_4_bits_where_no_second_moment_goes_with_it():
    net = model()
    plain = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    _, optimizer = memtrain.wrap(net, plain, CONFIG)
    assert {row.compressor.bits for row in describe(optimizer)} == {4, None}


@pytest.mark.parametrize("released", [False, True])
def test_with_stochastically_rounded_weights_and_released_gradients(released):
    config = [*CONFIG, "weights=bf16+sr", *(["gradients=release"] if released else [])]
    net = model()
    net, optimizer = memtrain.wrap(net, torch.optim.AdamW(net.parameters(), lr=1e-2), config)
    first = train(net, optimizer, 1)
    assert train(net, optimizer, 60) < 0.6 * first
