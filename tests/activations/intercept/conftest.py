"""A fixture of tests that compile."""

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture
def fresh_compiler():
    """Let a test begin without the graphs and counts of others, and leave none."""
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()
