"""Gradient release over several backward passes: the sums that wait, beside exact ones."""

import copy

import pytest
import torch
from torch import nn

from memtrain.audit.live_storages import LiveStorages
from memtrain.config.sources import Config, load
from memtrain.optim.wrappers.accumulate import GradientSums, sum_bytes
from memtrain.optim.wrappers.release import ReleaseGradients
from memtrain.plan.predicted_bytes import predict_gradients

FINEST = 1 / 31  # of a block's largest: the widest gap of the sums' map


def sgd(params, **options):
    return ReleaseGradients(torch.optim.SGD(params, lr=1.0), **options)


def test_a_worked_case():
    weight = nn.Parameter(torch.zeros(4))
    optimizer = sgd([weight], accumulate=3)
    for grad in ([1.0, 0.5, 0.0, -1.0], [1.0, 0.5, 0.0, -1.0], [0.5, 8.0, 0.0, 3.0]):
        assert weight.tolist() == [0.0] * 4
        (weight * torch.tensor(grad)).sum().backward()
    assert weight.tolist() == [-2.5, -9.0, 0.0, -1.0]  # the sums have codes of their own: exact
    optimizer.step()
    assert weight.tolist() == [-2.5, -9.0, 0.0, -1.0]


def totals(grads, seed, passes):
    sums, param = GradientSums(passes, seed), torch.zeros(grads.shape[1:])
    return [sums.add(param, 0, grad) for grad in grads][-1]


def test_each_pass_moves_an_element_by_less_than_a_gap():
    grads = torch.randn(5, 1000) * torch.randn(1000).exp()
    exact, largest = grads.sum(0), grads.cumsum(0)[:-1].abs().view(4, -1).amax(1)
    # Block by block would be less: the largest of the tensor bounds every block's.
    room = (largest * (1 + 4 * FINEST) * FINEST).sum()
    total = totals(grads, 0, 5)
    assert 0 < (total - exact).abs().max() <= room
    assert torch.equal(total, totals(grads, 0, 5))
    assert not torch.equal(total, totals(grads, 1, 5))


def test_sums_have_no_bias():
    grads = torch.randn(2, 256)
    n = 400
    mean = torch.stack([totals(grads, seed, 2) for seed in range(n)]).mean(0)
    # One rounding between two neighbours: a standard deviation of half their gap at most.
    deviation = grads[0].abs().max() * FINEST / 2 / n**0.5
    assert (mean - grads.sum(0)).abs().max() <= 5 * deviation


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 1))


def train(model, optimizer, passes, steps=20):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for k in range(passes):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(passes * step + k))
            loss = (model(x) - x[:, :1]).square().mean()
            (loss / passes).backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_training_follows_exact_accumulation():
    exact, model = make(), make()
    expected = train(exact, adamw(exact), 4)
    losses = train(model, ReleaseGradients(adamw(model), accumulate=4), 4)
    assert losses != expected
    distance = torch.tensor(losses).sub(torch.tensor(expected)).abs().mean()
    assert distance < 0.02 * expected[0]
    assert losses[-1] < 0.3 * losses[0]


def test_sums_take_a_byte_an_element():
    weight = nn.Parameter(torch.zeros(256, 1000))
    optimizer = sgd([weight], accumulate=2)
    x = torch.randn(256, 1000)
    with LiveStorages() as live:
        (weight * x).sum().backward()
        waiting = live.nbytes()
    assert sum_bytes(weight) <= waiting <= 1.02 * weight.numel() + 1024
    assert sum_bytes(weight) == weight.numel() * (1 + 4 / 256)
    del optimizer


def test_what_step_finds_of_fewer_passes_is_applied():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = sgd([weight], accumulate=3)
    for _ in range(2):
        weight.sum().backward()
    optimizer.step()
    assert weight.tolist() == [-2.0, -2.0]
    for _ in range(3):
        weight.sum().backward()
    with pytest.raises(RuntimeError, match=r"release\.accumulate"):
        weight.sum().backward()
    assert weight.tolist() == [-5.0, -5.0]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_throws_a_half_made_sum_away(set_to_none):
    weight = nn.Parameter(torch.zeros(2))
    optimizer = sgd([weight], accumulate=2)
    (100 * weight.sum()).backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    optimizer.step()
    assert weight.tolist() == [0.0, 0.0]
    (100 * weight.sum()).backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    for _ in range(2):
        weight.sum().backward()
    optimizer.step()
    assert weight.tolist() == [-2.0, -2.0]


def test_zero_grad_takes_no_update_back():
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = sgd(weights, accumulate=2)
    for _ in range(2):
        weights[0].sum().backward()
    weights[1].sum().backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="second gradient"):
        weights[0].sum().backward()
    weights[1].sum().backward()  # a first one again
    optimizer.step()
    assert [weight.tolist() for weight in weights] == [[-2.0, -2.0], [-1.0, -1.0]]


def test_zero_grad_throws_gradients_away_that_wait_for_their_norm():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = sgd([weight], clip="global_norm", limit=1.0)
    (100 * weight.sum()).backward()
    optimizer.zero_grad()
    (0.3 * weight.sum()).backward()
    optimizer.step()
    assert weight.tolist() == pytest.approx([-0.3, -0.3])
    assert optimizer.norm == pytest.approx(0.3 * 2**0.5)


@pytest.mark.filterwarnings("ignore:.*was skipped:RuntimeWarning")
def test_the_sum_is_clipped_and_nan_skips_it():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = sgd([weight], accumulate=2, clip="parameter", limit=1.0)
    for grad in ([3.0, 0.0], [0.0, 4.0]):
        (weight * torch.tensor(grad)).sum().backward()
    optimizer.step()
    assert torch.allclose(weight.detach(), torch.tensor([-0.6, -0.8]))
    assert optimizer.norm == pytest.approx(5.0)
    for grad in ([torch.nan, 0.0], [1.0, 1.0]):
        (weight * torch.tensor(grad)).sum().backward()
    optimizer.step()
    assert optimizer.skipped == 1
    assert torch.allclose(weight.detach(), torch.tensor([-0.6, -0.8]))


def test_a_last_accumulation_of_fewer_passes_is_clipped_by_its_own_norm():
    """Seven batches in threes, as accelerate steps at the end of an epoch: 3, 3 and 1 passes."""
    weight, bias, moves = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1)), []
    optimizer = sgd([weight, bias], clip="previous", limit=1.0, accumulate=3)
    for batch in (*range(7), *range(7)):
        (3 * weight + 4 * bias).sum().backward()
        if batch in (2, 5, 6):
            optimizer.step()
            moves.append((weight**2 + bias**2).sqrt().item())
            for param in (weight, bias):
                param.data.zero_()
    # The first step clips each by its own norm; others all by 15, or by 5 after one pass.
    assert moves == pytest.approx([2**0.5, *[1.0] * 5])
    assert optimizer.norm == 15.0


def test_a_resumed_run_draws_the_same_numbers():
    model = make()
    optimizer = ReleaseGradients(adamw(model), accumulate=2, seed=3)
    train(model, optimizer, 2, 3)
    copied = copy.deepcopy(model)
    resumed = ReleaseGradients(adamw(copied), accumulate=2, seed=3)
    resumed.load_state_dict(optimizer.state_dict())
    assert train(copied, resumed, 2, 3) == train(model, optimizer, 2, 3)


def test_wrong_options_are_refused():
    weight = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(ValueError, match="accumulate=0"):
        sgd(weight, accumulate=0)
    with pytest.raises(ValueError, match="two_pass"):
        sgd(weight, accumulate=2, clip="two_pass")
    with pytest.raises(ValueError, match=r"release\.accumulate=0"):
        load({"release": {"accumulate": 0}})
    with pytest.raises(ValueError, match="two_pass"):
        load({"release": {"accumulate": 2, "clip": "two_pass"}})


def test_the_plan_reports_the_bytes_of_sums():
    model = nn.Linear(256, 10, bias=False)
    config = Config(gradients="release")
    config.release.accumulate = 4
    (entry, workspace) = predict_gradients(model, adamw(model), config)
    assert (entry.nbytes, entry.planned) == (10240, 2560 + 40)
    assert entry.reason == "the sum of up to 3 backward passes"
    assert workspace.planned == 10240
