"""Recurrent layers: fused ops that the known-op table does not list, and so exact."""

import pytest
import torch
from torch import nn

import memtrain


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.head = kind(64, 64, num_layers=2, batch_first=True), nn.Linear(64, 8)

    def forward(self, x):
        return self.head(self.layer(x)[0])


@pytest.mark.filterwarnings("ignore:the plan compresses saved activations")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_trains_as_ever(kind):
    torch.manual_seed(0)
    model, x = Net(kind), torch.randn(8, 32, 64)
    model(x).square().mean().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), "balanced")
    model(x).square().mean().backward()
    for p, grad in zip(model.parameters(), plain, strict=True):
        # A step of 4-bit groups is 1/15 of about 5 deviations: an element is off by 0.17 at most.
        assert (p.grad - grad).norm() <= 0.2 * grad.norm()
    optimizer.step()
