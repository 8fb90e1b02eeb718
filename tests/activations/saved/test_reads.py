"""A forward reads no saved tensor once hooks are on it: each such read is a decompression."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memtrain
from memtrain.activations.saved.store import Entry

OPS = {
    "attention": lambda h: F.scaled_dot_product_attention(*[h.view(4, 1, 16, 64)] * 3),
    "conv2d": lambda h: F.conv2d(h.view(4, 4, 16, 16), torch.ones(4, 4, 3, 3)),
    "gather": lambda h: h.gather(1, torch.zeros(64, 32, dtype=torch.long)),
    "matmul": lambda h: h @ h.mT,
    "max_pool2d": lambda h: torch.ops.aten.max_pool2d.default(h.view(4, 4, 16, 16), [2, 2]),
    "nll_loss": lambda h: F.nll_loss(h.log_softmax(1), torch.zeros(64, dtype=torch.long)),
    "softmax": lambda h: h.softmax(1) * h,
}


class Model(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.first, self.op = nn.Linear(64, 64), op

    def forward(self, x):
        return self.op(self.first(x)) + 0


@pytest.mark.parametrize("op", OPS)
def test_a_forward_decompresses_nothing(op, monkeypatch):
    read, reads = Entry.read, []
    monkeypatch.setattr(Entry, "read", lambda *args: reads.append(1) or read(*args))
    model = Model(OPS[op])
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), "activations_only")
    for _ in range(2):
        loss = model(torch.randn(64, 64)).sum()
        assert not reads
        loss.backward()
        reads.clear()
