import itertools
import math

import pytest
import torch

from memtrain.kernels.dct import dct, idct
from memtrain.kernels.random import draws, philox

CPU = torch.device("cpu")


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 30, 31])
def test_dct_is_the_matrix_of_its_definition(n):
    k, j = torch.arange(n).double()[:, None], torch.arange(n).double()
    matrix = torch.cos(math.pi * (2 * j + 1) * k / (2 * n)) * math.sqrt(2 / n)
    matrix[0] = math.sqrt(1 / n)
    x = torch.randn(3, n, dtype=torch.float64)
    torch.testing.assert_close(dct(x), x @ matrix.t(), rtol=0, atol=1e-13)
    torch.testing.assert_close(idct(x), x @ matrix, rtol=0, atol=1e-13)


def test_dct_keeps_bad_numbers_in_their_row():
    x = torch.randn(5, 30)
    clean, back = dct(x), idct(x)
    x[2, 7] = torch.inf
    others = [0, 1, 3, 4]
    assert torch.equal(dct(x)[others], clean[others])
    assert torch.equal(idct(x)[others], back[others])


def test_signs_are_the_bits_of_the_words():
    words = [int(word) for word in philox.philox(torch.tensor(0), 5)]
    bits = [word >> at & 1 for word in words for at in range(32)]
    assert draws.signs(128, 5, CPU).tolist() == [2.0 * bit - 1 for bit in bits]
    assert torch.equal(draws.signs(77, 5, CPU), draws.signs(300, 5, CPU)[:77])


def test_normals_have_variance_one_exactly(monkeypatch):
    # Every value of the radius' 16 bits, with eight equally spaced angles in turn.
    radius = (torch.arange(65536.0) + 0.5) / 65536
    squares = []
    for turn in range(8):
        both = torch.stack([radius, torch.full_like(radius, (turn + 0.5) / 8)])
        monkeypatch.setattr(philox, "uniform_blocks", lambda *_, both=both: both.clone())
        squares.append(draws.normals(2 * 65536, 0, CPU).double().square().mean())
    # Without the correction it would be 5.3e-6 less than 1; float32 rounds to 6e-8.
    assert float(sum(squares) / 8) == pytest.approx(1, abs=2e-7)


def test_normals_are_normal():
    x = draws.normals(1 << 20, 3, CPU).double()
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float(x.pow(power).mean()) - moment) < 5 * math.sqrt(spread / (1 << 20))
    first, second = x.view(2, -1)  # the cosines and the sines of the same angles
    assert abs(float((first * second).mean())) < 5 / math.sqrt(1 << 19)


def test_integers_have_62_bits():
    x = draws.integers(10001, 9, CPU)
    assert x.shape == (10001,)
    assert len(x.unique()) == 10001
    for bit in range(62):
        assert abs(float((x >> bit & 1).double().mean()) - 0.5) < 5 * 0.5 / 100
    assert int((x >> 62).abs().max()) == 0


def test_choose_takes_every_subset_equally_often(monkeypatch):
    seen = []
    for order in itertools.permutations(range(4)):
        monkeypatch.setattr(draws, "integers", lambda *_, order=order: torch.tensor(order))
        seen.append(tuple(draws.choose(4, 2, 0, CPU).tolist()))
    assert {subset: seen.count(subset) for subset in set(seen)} == dict.fromkeys(
        itertools.combinations(range(4), 2), 4
    )


def test_draw_weighs_each_draw_by_its_probability(monkeypatch):
    # Shares 1/8, 0, 5/8 and 2/8, exact in binary; every pair of draws in eighths.
    weights = torch.tensor([1.0, 0.0, 5.0, 2.0], dtype=torch.float64)
    mean = torch.zeros(4, dtype=torch.float64)
    for pair in itertools.product(range(8), repeat=2):
        numbers = torch.tensor(pair) * 2**37 + 5
        monkeypatch.setattr(draws, "integers", lambda *_, numbers=numbers: numbers)
        index, factor = draws.draw(weights, 2, 0)
        mean.index_copy_(0, index, mean[index] + factor)  # once for an index drawn twice
    assert (mean / 64).tolist() == pytest.approx([1, 0, 1, 1], rel=1e-14)


@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf])
def test_draw_is_uniform_where_weights_say_nothing(bad):
    weights = torch.full((4,), bad, dtype=torch.float64)
    index, factor = draws.draw(weights, 100_000, 3)
    counts = index.bincount(minlength=4)
    assert float((counts - 25_000).abs().max()) < 5 * math.sqrt(100_000 * 3 / 16)
    torch.testing.assert_close(factor, counts[index].double() / 25_000)


@pytest.mark.gpu
def test_bits_are_the_same_on_the_gpu():
    for f in (draws.signs, draws.integers):
        assert torch.equal(f(1001, 5, torch.device("cuda")).cpu(), f(1001, 5, CPU))
    torch.testing.assert_close(
        draws.normals(1001, 5, torch.device("cuda")).cpu(), draws.normals(1001, 5, CPU)
    )
    chosen = [draws.choose(1001, 99, 5, torch.device(name)).cpu() for name in ("cpu", "cuda")]
    assert torch.equal(*chosen)
