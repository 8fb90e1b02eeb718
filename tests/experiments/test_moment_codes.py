"""Codes of first moments that are tried before they are built: each formula by hand."""

from functools import partial

import pytest
import torch

import memtrain
from experiments.moment_codes import (
    FORMS,
    Form,
    SimulatedAdamW,
    codebook,
    grid,
    hadamard,
    logarithmic,
    means,
    noise,
    normal,
    polar,
    ring_points,
    rotated,
    through,
    top_pairs,
    with_error,
)
from experiments.optimizer_states import train
from experiments.update_norms import Beside
from memtrain.compressors.base import Key
from memtrain.kernels.dispatch import backend

TWO_BITS = ("normal_2bit", "grasp_2")
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
FOUR_BITS = Form(partial(codebook, name="DE", bits=4, rounding="nearest"), 0.53)


@pytest.mark.parametrize(
    ("fused", "form"),
    [("factored_2bit", FORMS["normal_2bit_framed"]), ("factored_4bit", FOUR_BITS)],
)
def test_a_simulated_step_is_the_fused_one(fused, form):
    def last(simulated):
        torch.manual_seed(0)
        # One whose factors pay, one whose factors do not, and a vector.
        model = torch.nn.ParameterList([torch.randn(128, 256), torch.randn(64, 128)])
        model.append(torch.randn(300))
        groups = [{"params": [model[0], model[1]]}, {"params": [model[2]], "weight_decay": 0.0}]
        if simulated:
            optimizer = SimulatedAdamW(groups, **OPTIONS, form=form)
        else:
            plain = torch.optim.AdamW(groups, **OPTIONS)
            config = ["preset=optimizer_only", f"optim={fused}"]
            _, optimizer = memtrain.wrap(model, plain, config)
        for _ in range(4):
            for param in model:
                param.grad = torch.randn(param.shape) * torch.rand(param.shape[-1])
            optimizer.step()
        return [param.detach() for param in model]

    with backend("reference"):
        pairs = zip(last(True), last(False), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_sign_and_the_sign_of_its_error():
    x = torch.tensor([3.0, -1.0]).repeat(64).view(1, 128)
    assert torch.equal(with_error(x, Key()), x)  # 2 +- 1
    one_more = torch.cat([x[:, 1:], torch.tensor([[0.0]])], 1)
    assert not torch.equal(with_error(one_more, Key()), one_more)


def test_pairs_on_a_ring_come_back_and_others_come_to_the_nearest():
    ring = 2 * ring_points(8)[1:]
    x = ring[torch.arange(64) % 7].view(1, 128)
    assert torch.equal(polar(x, Key(), points=8), x)
    spread = torch.randn(2000, 128, generator=torch.Generator().manual_seed(0))
    lost = {
        points: (polar(spread, Key(), points=points) - spread).square().mean().item()
        for points in (8, 16)
    }
    # A block's own scale lowers the 0.1077 and 0.2033 of a scale of 1.
    assert lost == pytest.approx({8: 0.2, 16: 0.106}, rel=0.02)
    assert lost[16] < (normal(spread, Key()) - spread).square().mean()


def test_noise_is_as_far_off_and_as_long_as_the_code_that_it_stands_for():
    x = torch.randn(2000, 128, generator=torch.Generator().manual_seed(0))
    noisy, coded = noise(x, Key(step=1)), normal(x, Key())
    assert (noisy - x).square().mean().item() == pytest.approx(
        (coded - x).square().mean().item(), rel=0.03
    )
    assert noisy.norm().item() == pytest.approx(coded.norm().item(), rel=0.01)


def test_rotation_spreads_a_spike():
    turn = hadamard(4)
    assert turn[3].tolist() == [0.5, -0.5, -0.5, 0.5]
    assert torch.equal(turn @ turn, torch.eye(4))
    spike = torch.zeros(1, 128)
    spike[0, 0] = 8.0
    assert (rotated(spike, Key()) - spike).abs().max() < 8 / 128  # a bfloat16 scale
    assert (normal(spike, Key()) - spike).abs().max() > 0.1  # no value of it is 0


def test_the_logarithmic_grid_is_from_the_tenth_lowest_to_the_highest():
    x = torch.where(torch.arange(128) % 8 == 0, 0.25, -1.0).view(1, 128)
    assert torch.equal(logarithmic(x, Key(), bits=2), x)  # 1 and 1/4
    x[0, :16] *= 0.5  # below the grid, and on it with 3 bits alone
    low = logarithmic(x, Key(), bits=2)[0, :16].abs()
    assert set(low.tolist()) <= {0.25, 1.0}
    assert low[0] == 0.25


def test_means_with_their_residual_are_the_update_of_foam():
    draw = torch.Generator().manual_seed(0)
    fold = partial(means, key=Key(), fold=16)
    old, g = fold(torch.randn(2, 128, generator=draw)), torch.randn(2, 128, generator=draw)
    m = 0.9 * old + 0.1 * g
    stored = fold(m)
    torch.testing.assert_close(stored, 0.9 * old + 0.1 * fold(g))
    torch.testing.assert_close(m + 0.9 / 0.1 * (m - stored), stored + g - fold(g))


def test_stochastic_codes_are_right_on_average():
    x = torch.linspace(-1, 1, 128).view(1, 128)
    found = [FORMS["sr_2bit"].code(x, Key(step=step)) for step in range(600)]
    assert set((3 * found[0]).round(decimals=3).tolist()[0]) == {-3, -1, 1, 3}
    deviation = (2 / 3) / 2 / 600**0.5  # of a mean, halfway between two values
    assert (torch.stack(found).mean(0) - x).abs().max() < 5 * deviation


def test_the_first_pairs_of_a_matrix_come_back_in_eight_bits():
    draw = torch.Generator().manual_seed(0)
    sides = torch.randn(60, 2, generator=draw), torch.randn(2, 128, generator=draw)
    two = sides[0] @ torch.tensor([[30.0], [10.0]]).mul(sides[1])
    # The widest step of 8 bits is 0.9 / 64 of a block's maximum, which is under 4 deviations.
    each = 4 * 0.9 / 64 / 12**0.5
    assert (top_pairs(two, 2, Key()) - two).norm() < 2**0.5 * each * two.norm()
    first = torch.linalg.svdvals(two)[0].item()
    assert top_pairs(two, 1, Key()).norm() == pytest.approx(first, rel=0.01)
    m, ones = two + torch.randn(60, 128, generator=draw), (torch.ones(60), torch.ones(128))
    lost = [(through(FORMS[f"{name}_framed"], m, *ones, Key()) - m).norm() for name in TWO_BITS]
    assert lost[1] < 0.4 * m.numel() ** 0.5 < 0.1 * lost[0]  # of the rest, not of the whole


def test_a_grid_is_of_the_lesser_maximum():
    assert grid(torch.tensor([[8.0, 1.0], [-2.0, 4.0]])).tolist() == [[8.0, 4.0], [4.0, 4.0]]
    m, ones = torch.randn(60, 128).sign(), (torch.ones(60), torch.ones(128))
    m[:, 5] *= 100
    spread = FORMS["grasp_1"]._replace(top=0)
    assert (through(spread, m, *ones, Key()) / m - 1).abs().max() < 1 / 128  # a bfloat16 scale
    assert (through(FORMS["normal_2bit"], m, *ones, Key()) / m - 1).abs().max() > 1


def test_pairs_and_grids_are_counted_by_row_and_column():
    form = FORMS["grasp_4"]
    assert form.bytes == 0.25 + 2 / 128
    assert form.bytes_per_line == 2 + 4 * (1 + 4 / 256)  # a bfloat16; codes, and a float32 each 256
    assert FORMS["grasp_4_framed"].bytes_per_line == 4 + 4 * (1 + 4 / 256)
    assert (FORMS["normal_2bit"].bytes_per_line, FORMS["foam_16"].bytes_per_line) == (0, 0)


def test_what_is_simulated_tells_the_bytes_of_its_payload():
    held = train("digits", "polar_1.5bit", 0, 1e-3, 1)["bytes_per_parameter"]
    framed = train("digits", "polar_1.5bit_framed", 0, 1e-3, 1)["bytes_per_parameter"]
    two = train("digits", "factored_2bit", 0, 1e-3, 1)["bytes_per_parameter"]
    assert 0.2 < held < framed < two
    coded = 18_432 + 36_864 + 65_536  # the last two convolutions and the first linear layer
    assert (two - framed) * 122_000 == pytest.approx(coded / 16, rel=0.01)


def test_changes_are_measured_from_the_same_weights_and_leave_the_leader_alone():
    torch.manual_seed(0)
    model, plain, other = (torch.nn.Linear(3, 2) for _ in range(3))

    def sgd(of, sign):
        return of, torch.optim.SGD(of.parameters(), lr=0.1, maximize=sign < 0)

    beside = Beside(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        {"plain": sgd(plain, 1), "other": sgd(other, -1)},
        "plain",
    )
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    beside.step()
    assert beside.found[0]["plain"] == pytest.approx((1, 1))
    assert beside.found[0]["other"] == pytest.approx((1, -1))
    torch.testing.assert_close(model.weight, before - 0.1)
