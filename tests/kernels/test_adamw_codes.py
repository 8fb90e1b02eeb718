"""The AdamW step's codes at the very bounds between them, at every size of scale, for every map."""

import pytest
import torch

from memtrain.kernels.codebook import rank1
from memtrain.kernels.codebook.quantize import quantize_blocks_reference
from memtrain.kernels.codebook.values import Codebook
from memtrain.kernels.step.codecs import Codec
from memtrain.kernels.step.step import Entry
from memtrain.kernels.step.update_rules import AdamWScalars
from tests.kernels.steps import instructions, run

CPU = torch.device("cpu")
# No old moments count: the new ones are g and g * g.
NUMBERS = AdamWScalars(
    decay=1.0, l2=0.0, sign=1.0, w1=1.0, b2=0.0, w2=1.0, step_size=0.5, eps=0.1, residual_size=0.0
)
FIRST = [0.0, 0.2, 2.0**-125, 2.0**-95, 3e-20, 0.7, 1.3, 2.0**45, 2.0**100, 3e38]
SECOND = [0.0, 2.0**-126, 2.0**-122, 2.0**-95, 3e-20, 1.0, 1.7, 2.0**95, 2.0**126]


def near(x, steps):
    """Each value and the floats around it."""
    bits = x.float().view(torch.int32)[:, None] + torch.arange(-steps, steps + 1, dtype=torch.int32)
    return bits.view(torch.float32).flatten()


def first_moments(map, scale):
    """Values at, just below and just above each bound, in rows of 128 that hold the scale."""
    scale = torch.tensor(scale)
    bounds = Codebook(map, 4, True).midpoints(CPU)
    bounds = bounds[bounds > 0]
    values = near(torch.cat([bounds, -bounds]) * scale, 2)
    values = torch.cat([values[values.abs() <= scale], torch.tensor([0.0, -0.0])])
    row = torch.cat([values.repeat(2)[:126], scale.view(1), -scale.view(1)])
    return torch.stack([row, row.flip(0)])


def second_moments(map, scale):
    """Values whose squares are at, just below and just above each bound."""
    root = torch.tensor(scale).sqrt()
    values = near((Codebook(map, 4, False).midpoints(CPU).double() * scale).sqrt(), 4)
    values = torch.cat([values[values <= root], root.view(1)])
    return torch.cat([values, values.new_zeros(-len(values) % 128)]).view(-1, 128)


def entry(g, kind, first_map, second_map):
    zeros = torch.zeros_like(g)
    first = quantize_blocks_reference(zeros, Codebook(first_map, 4, True), 128)
    if kind == "rank1":
        second = rank1.quantize(zeros, Codebook(second_map, 4, False))
    else:
        second = quantize_blocks_reference(zeros, Codebook(second_map, 4, False), 128)
    states = tuple({"codes": codes, "scale": scale} for codes, scale in (first, second))
    codecs = (Codec("block", 4, first_map), Codec(kind, 4, second_map, signed=False))
    return Entry(zeros + 1, g, states, codecs, "adamw", NUMBERS)


def same(a, b):
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def check(before, level):
    with instructions(level):
        after = run("cpu", before)
    for a, b in zip(after, run("reference", before), strict=True):
        for name in ("codes", "scale"):
            for mine, theirs, codec in zip(a.states, b.states, a.codecs, strict=True):
                assert same(mine[name], theirs[name]), (name, codec, a.grad.max())


# AVX-512 has shortcuts for some maps; the others search the bounds of every map.
@pytest.mark.parametrize(
    ("map", "level"),
    [("DE", 0), ("DE", 1), ("DE", 2), ("Linear", 2), ("Power-2", 2), ("E2M1", 2)],
)
def test_first_moment(map, level):
    check([entry(first_moments(map, scale), "block", map, "Linear") for scale in FIRST], level)


@pytest.mark.parametrize(
    ("map", "level"),
    [("Linear", 0), ("Linear", 1), ("Linear", 2), ("DE", 2), ("DE-0", 2), ("Power-2", 2)],
)
@pytest.mark.parametrize("kind", ["block", "rank1"])
def test_second_moment(kind, map, level):
    check([entry(second_moments(map, scale), kind, "DE", map) for scale in SECOND], level)


@pytest.mark.parametrize("kind", ["block", "rank1"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_not_finite(bad, kind):
    g = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    g[2, 130] = bad
    check([entry(g, kind, "DE", "Linear")], 2)
