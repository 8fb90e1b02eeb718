"""Shared fixtures. The interpreter switch must be set before triton is first imported.

Kernels run in the interpreter, also where there is a GPU; `MEMTRAIN_GPU=1` runs them natively, for
the tests marked `gpu`.
"""

import os

import torch

if not os.environ.get("MEMTRAIN_GPU"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

# Workers side by side share the cores: more threads than cores would wait for each other.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, torch.get_num_threads() // _WORKERS))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
