"""Resident memory, and pages that were freed and kept."""

import sys

import pytest
import torch

from memtrain.audit.process_memory import (
    hand_back_freed_pages,
    resident_nbytes,
    restart_resident_peak,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's /proc")
MIB = 2**20


def resident(*, peak=False):
    return resident_nbytes(peak=peak) or 0


def test_the_peak_is_that_since_it_was_restarted():
    assert restart_resident_peak()
    before = resident(peak=True)
    x = torch.ones(64 * MIB, dtype=torch.uint8)
    assert resident() - before > 60 * MIB
    del x
    assert 60 * MIB < resident(peak=True) - before < 80 * MIB


def test_freed_pages_of_the_heap_are_handed_back():
    held = [torch.ones(2**16, dtype=torch.uint8) for _ in range(1600)]
    behind = torch.ones(2**16, dtype=torch.uint8)  # the heap cannot shrink past it by itself
    held.clear()
    before = resident()
    if not hand_back_freed_pages():
        pytest.skip("not glibc's malloc")
    assert before - resident() > 80 * MIB
    assert behind.sum() == 2**16
