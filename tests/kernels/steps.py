"""Steps of entries, prepared and run; what kernels of the CPU may use while they run."""

import copy
from contextlib import contextmanager

import pytest
import torch

from memtrain.kernels import cpu
from memtrain.kernels.dispatch import backend
from memtrain.kernels.step.prepared import PreparedStep

every_level = pytest.mark.parametrize("level", [0, 1, 2], ids=["portable", "avx2", "avx512"])


def fused_step(entries):
    PreparedStep(entries).run()


def run(name, before):
    """Copies of entries after a step by a backend."""
    after = copy.deepcopy(before)
    with backend(name):
        fused_step(after)
    return after


@contextmanager
def instructions(level):
    """Let C++ kernels use the instructions of a level at most."""
    try:
        cpu.call("mt_limit_isa", level)
        yield
    finally:
        cpu.call("mt_limit_isa", 2)


def by_threads(run):
    """The results of a function with one thread and with three."""
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(run())
    finally:
        torch.set_num_threads(threads)
    return results
