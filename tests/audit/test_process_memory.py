"""Resident memory, and pages that were freed and kept."""

import os
import subprocess
import sys

import pytest
import torch

from memtrain.audit import process_memory
from memtrain.audit.process_memory import (
    hand_back_freed_pages,
    memory_is_short,
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


@pytest.mark.parametrize(("mapped", "stay"), [(False, True), (True, False)])
def test_freed_pieces_leave_memory_between_blocks_that_stay(mapped, stay):
    # Another process: where this one's heap has room, a block is not mapped. It needs no torch.
    script = f"""
import runpy
from contextlib import nullcontext
own = runpy.run_path({process_memory.__file__!r})
resident, kept, nbytes = own["resident_nbytes"], [], 8 * 2**20
bytearray(nbytes)  # freed: from now on glibc has such blocks in its heap
with own["large_blocks_mapped"]() if {mapped} else nullcontext():
    before, pieces = resident(), []
    for _ in range(16):
        pieces.append(bytearray(b"1") * nbytes)
        kept.append(bytearray(2**18))  # no hole of the heap has room for it
    del pieces
    print((resident() - before) // nbytes)
"""
    command = [sys.executable, "-c", script]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (int(told) > 8) is stay


@pytest.mark.parametrize(("machine", "short"), [(4.5, False), (3.5, True)])
def test_memory_is_short_from_a_quarter_of_the_machines_on(monkeypatch, machine, short):
    sizes = {"SC_PHYS_PAGES": int(machine * resident()), "SC_PAGE_SIZE": 1}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert memory_is_short() is short
