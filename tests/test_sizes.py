"""The benchmark of sizes: the largest model and the largest batch that fit, and nothing larger."""

import pytest

from benchmarks.sizes import FAMILIES, GIB, MEMORIES, MOST, Sizes


def bent(name, batch):
    """A peak that rises with the model, at first slowly with the batch, then at a steady pace."""
    place = list(FAMILIES["ViT"]).index(name)
    return (place + 1) ** 2 * GIB + max(0, batch - 3) * (place + 1) * GIB // 7


@pytest.fixture
def sizes():
    made = Sizes("ViT", "balanced, fp32")
    made.peak = bent
    made.parameters = lambda name: 0 if name == "none" else len(name)
    return made


@pytest.mark.parametrize("gib", [*MEMORIES, 1, 3, 4, 5])
def test_what_is_told_fits_and_the_next_does_not(sizes, gib):
    row = sizes.row(gib)
    names = list(FAMILIES["ViT"])
    assert row["peak_nbytes"] == bent(row["largest"], 1) <= gib * GIB
    following = names[names.index(row["largest"]) + 1 :]
    assert all(bent(name, 1) > gib * GIB for name in following)
    assert row["reference"] == names[1]
    batch = row["batch"]
    if batch:
        assert bent(names[1], batch) <= gib * GIB
    assert batch == MOST or bent(names[1], batch + 1) > gib * GIB


def test_more_memory_never_holds_less(sizes):
    rows = [sizes.row(gib) for gib in range(1, 90, 4)]
    assert [row["peak_nbytes"] for row in rows] == sorted(row["peak_nbytes"] for row in rows)
    batches = [row["batch"] for row in rows]
    assert batches == sorted(batches)
    assert len(set(batches)) > 10


def test_nothing_fits_a_memory_that_is_too_small(sizes):
    sizes.peak = lambda name, batch: 2 * bent(name, batch)
    row = sizes.row(1)
    assert (row["largest"], row["peak_nbytes"], row["batch"]) == ("none", 0, 0)


def test_what_cannot_hold_its_weights_is_not_simulated(sizes):
    asked = []
    sizes.peak = lambda name, batch: asked.append(name) or GIB
    sizes.parameters = lambda name: GIB  # in float32
    name = next(iter(FAMILIES["ViT"]))
    assert (sizes.fits(name, 1, 4 * GIB - 1), asked) == (0, [])
    assert (sizes.fits(name, 1, 4 * GIB), asked) == (GIB, [name])
