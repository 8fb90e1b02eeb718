"""The tracker sees every byte that a process asks of malloc, to the byte."""

import pytest

tracker = pytest.importorskip("benchmarks.tracker")

PROGRAM = """
import torch
from benchmarks import tracker

mib = 2**20
held = []
tracker.peak_of(lambda: torch.empty(1))  # what is made once, at first
noise = 4096  # Python's own objects
assert 0 <= tracker.peak_of(lambda: torch.empty(mib, dtype=torch.uint8)) - mib < noise
held.append(torch.empty(3 * mib, dtype=torch.uint8))
before = tracker.live()
held.clear()
assert 0 <= before - tracker.live() - 3 * mib < noise
grown = bytearray(mib)
assert mib <= tracker.peak_of(lambda: grown.extend(bytes(2 * mib))) < 8 * mib
"""


def test_the_tracker_counts_what_is_allocated_and_freed():
    done = tracker.run(["-c", PROGRAM], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_process_without_the_tracker_is_refused_with_the_command():
    if tracker.is_tracked():
        pytest.skip("this run is tracked")
    with pytest.raises(RuntimeError, match=r"python -m benchmarks\.tracker"):
        tracker.peak_of(lambda: None)
