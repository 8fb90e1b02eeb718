"""Pages that were freed and kept."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memtrain.audit import process_memory
from memtrain.audit.process_memory import hand_back_freed_pages

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's /proc")
MIB = 2**20


def resident():
    """Bytes of this process in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])


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
from pathlib import Path
own = runpy.run_path({process_memory.__file__!r})
kept, nbytes = [], 8 * 2**20
{inspect.getsource(resident)}
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
    reported = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (int(reported) > 8) is stay
