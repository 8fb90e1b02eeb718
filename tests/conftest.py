"""Shared fixtures. The interpreter switch must be set before triton is first imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
