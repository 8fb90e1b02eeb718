"""Bytes asked of the allocator: those of the storages that ops make, and compiled code's too."""

import pytest
import torch
from torch import nn

from memtrain.audit.allocations import Allocations
from memtrain.audit.live_storages import LiveStorages

CPU = torch.device("cpu")


def counted(meter, run, model, x):
    with meter as live:
        live.adopt(model.parameters())
        loss = run(x).square().mean()
        held = live.nbytes(exclude=[loss, *model.parameters()])
        loss.backward()
        model.zero_grad()
    return held, live.nbytes(), live.peak_nbytes


def test_what_an_eager_step_allocates_is_what_its_storages_hold():
    model, x = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)), torch.randn(8, 64)
    model(x).sum().backward()
    model.zero_grad()
    found = [counted(meter, model, model, x) for meter in (LiveStorages(), Allocations(CPU))]
    assert found[0][:2] == found[1][:2]
    assert found[0][2] <= found[1][2]  # temporaries inside ops too


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_is_counted_too():
    torch.compiler.reset()
    model, x = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)), torch.randn(8, 64)
    run = torch.compile(model)
    run(x).square().mean().backward()
    model.zero_grad()
    held, after, peak = counted(Allocations(CPU), run, model, x)
    weights = sum(p.nbytes for p in model.parameters())
    # the tanh, and the output for the square outside, which eagerly is all too
    assert held == 8 * 256 * 4 + 8 * 64 * 4
    assert weights <= after <= weights + 4
    assert peak >= 2 * weights + 8 * 64 * 4
