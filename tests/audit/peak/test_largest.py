"""The largest size that fits is found, in a few simulated steps."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memtrain.audit.peak.largest import largest, resized, search


@settings(max_examples=60, deadline=None)
@given(
    fixed=st.integers(0, 10**6),
    slope=st.integers(0, 1000),
    bend=st.integers(0, 20),
    memory=st.integers(1, 10**7),
    most=st.integers(1, 5000),
)
def test_search_finds_the_largest_size(fixed, slope, bend, memory, most):
    tried = set()

    def peak(size):
        assert 1 <= size <= most
        tried.add(size)
        return fixed + slope * size + bend * size * size

    fits = [size for size in range(1, most + 1) if peak_of(fixed, slope, bend, size) <= memory]
    assert search(peak, memory, most) == max(fits, default=0)
    assert len(tried) <= 4 + 3 * math.ceil(math.log2(most + 1))


def peak_of(fixed, slope, bend, size):
    return fixed + slope * size + bend * size * size


def test_the_largest_batch_by_hand():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters())
    found = largest(model, torch.ones(3, 64), None, 100_000, optimizer=optimizer)
    # 16,640 bytes of weights and 16,384 of one's gradient, the loss and its gradient; a sample
    # takes 256 of input and 256 of the output's gradient, which the weight's product copies
    fixed = 16_640 + 16_384 + 8
    assert found.size == (100_000 - fixed) // 512
    assert found.timeline.peak.nbytes == fixed + 512 * found.size
    assert found.peaks[found.size + 1] > 100_000
    assert len(found.peaks) <= 8
    assert largest(model, torch.ones(3, 64), None, 1000, optimizer=optimizer).size == 0
    assert largest(model, torch.ones(3, 64), None, 1000, optimizer=optimizer).timeline is None
    assert largest(model, torch.ones(3, 64), None, 100_000, optimizer=optimizer, most=7).size == 7


def test_resized_batches():
    batch = {"input_ids": torch.zeros(2, 9, dtype=torch.long), "mask": torch.ones(2, 1, 9, 9)}
    longer = resized(batch, "seq", 30)
    assert {name: tuple(x.shape) for name, x in longer.items()} == {
        "input_ids": (2, 30),
        "mask": (2, 1, 30, 30),
    }
    assert longer["input_ids"].dtype == torch.long
    assert resized(batch, "batch", 5)["mask"].shape == (5, 1, 9, 9)
    assert resized((torch.zeros(2, 2),), "batch", 5)[0].shape == (5, 2)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"what": "width"}, "allowed: batch, seq"),
        ({"memory": 0}, "memory=0 is out of range"),
        ({"most": 0}, "most=0 is out of range"),
        ({"what": "seq", "batch": torch.ones(3)}, "no tensor of the batch has 2 dimensions"),
    ],
)
def test_largest_refuses(change, match):
    model = nn.Linear(64, 64)
    arguments = {"batch": torch.ones(3, 64), "cfg": None, "memory": 1000, **change}
    with pytest.raises(ValueError, match=match):
        largest(model, **arguments)


def test_search_does_not_leap_where_the_peak_does_not_grow_yet():
    tried = []

    def peak(size):
        tried.append(size)
        return max(1000, 100 * size)

    assert search(peak, 2000, 4096) == 20
    assert max(tried) <= 9 * 20
