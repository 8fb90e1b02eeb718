"""Mixtures of experts by grouped matrix products, predicted in float32."""

import torch
from torch import nn

import memtrain


class Experts(nn.Module):
    """Eight experts, each for a run of rows: as mixtures of experts do with sorted tokens."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(8, 64, 96) / 8)
        self.down = nn.Parameter(torch.randn(8, 96, 64) / 8)

    def forward(self, x):
        ends = torch.arange(1, 9, dtype=torch.int32, device=x.device) * (len(x) // 8)
        hidden = nn.functional.silu(nn.functional.grouped_mm(x, self.up, offs=ends))
        return nn.functional.grouped_mm(hidden, self.down, offs=ends).square().mean()


def test_saved_tensors_and_peaks_are_predicted_as_they_are():
    model, x = nn.Sequential(nn.Linear(64, 64), Experts()), torch.randn(256, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    report = memtrain.audit(model, x, "balanced", optimizer=optimizer, peak=True, measure=True)
    predicted = memtrain.make_plan(model, optimizer, "balanced", batch=x).entries("activation")
    model, optimizer = memtrain.wrap(model, optimizer, "balanced")
    model(x).backward()
    assert predicted == memtrain.plan_of(model).entries("activation")
    for reported, seen in (
        (report.timeline, report.measured),
        (report.planned_timeline, report.planned_measured),
    ):
        assert abs(reported.peak.nbytes - seen.peak.nbytes) <= 0.03 * seen.peak.nbytes
