"""Live bytes stay flat over many steps, whatever becomes of what a forward saved."""

import pytest
import torch
from torch import nn

import memtrain
from memtrain.audit.live_storages import LiveStorages


class Experts(nn.Module):
    """One of four experts serves a step; another runs for nothing, and is never unpacked."""

    def __init__(self):
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))  # noqa: E731
        self.experts, self.step, self.aside = nn.ModuleList([make() for _ in range(4)]), 0, None

    def forward(self, x):
        y = self.experts[self.step % 4](x)
        self.aside = self.experts[(self.step + 1) % 4](x)
        if self.step % 7 == 3:
            raise ValueError("broken off")
        return y


@pytest.mark.parametrize(
    "preset",
    ["all_four", *(pytest.param(p, marks=pytest.mark.nightly) for p in ("balanced", "smallest"))],
)
def test_200_steps_of_experts_exceptions_and_dropped_losses_keep_bytes_flat(preset):
    torch.manual_seed(0)
    model = Experts()
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), preset)
    seen = []
    with LiveStorages() as live:
        for model.step in range(201):
            loss = None
            try:
                loss = model(torch.randn(32, 64)).float().square().mean()
            except ValueError:
                model.aside = None
            if loss is not None and model.step % 5:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            del loss
            if model.step % 40 == 0:
                model.aside = None
                seen.append(live.nbytes())
    assert len(set(seen[1:])) == 1, seen
