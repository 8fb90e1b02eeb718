"""Classes that are masked (-inf, -1e9) leave the gradients of the others as they are."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memtrain import wrap
from memtrain.compressors.log_group import SPAN

ROWS, CLASSES = 128, 96
LOSSES = {
    "cross_entropy": F.cross_entropy,
    "weighted": lambda x, y: F.cross_entropy(x, y, torch.ones(CLASSES)),
    "log_softmax": lambda x, y: F.nll_loss(x.log_softmax(-1), y),
    "logsumexp": lambda x, y: x.logsumexp(-1).square().mean(),
    "categorical": lambda x, y: -torch.distributions.Categorical(logits=x).log_prob(y).mean(),
}


class Policy(nn.Module):
    def __init__(self, name, fill):
        super().__init__()
        self.head, self.loss, self.fill = nn.Linear(48, CLASSES), LOSSES[name], fill
        generator = torch.Generator().manual_seed(1)
        masked = torch.rand(ROWS, CLASSES, generator=generator) < 0.2
        self.register_buffer("masked", masked)
        masked[:, 0] = False

    def forward(self, x, y):
        return self.loss(self.head(x).masked_fill(self.masked, self.fill), y)


def given():
    torch.manual_seed(0)
    return 2 * torch.randn(ROWS, 48), torch.zeros(ROWS, dtype=torch.long)


def gradient(name, fill, preset, compiled):
    x, y = given()
    model = Policy(name, fill)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    if preset is not None:
        run, _ = wrap(run, torch.optim.SGD(model.parameters(), lr=0.1), preset)
    grads = []
    for _ in range(3):  # settled choices, too
        model.zero_grad()
        run(x, y).backward()
        grads.append(model.head.weight.grad.clone())
    return torch.stack(grads)


def narrowest():
    """The least range of a group of 256 logarithms, none of which is masked."""
    logits = Policy("cross_entropy", 0.0).head(given()[0])
    groups = logits.log_softmax(-1).reshape(-1, 256)
    return (groups.amax(1) - groups.amin(1)).min().item()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_err_no_more_than_without_a_mask(name, compiled):
    def error(fill, preset):
        exact = gradient(name, fill, None, compiled=False)
        return ((gradient(name, fill, preset, compiled) - exact).norm() / exact.norm()).item()

    # Steps, and so errors, are in proportion to a group's range.
    most = SPAN / narrowest() * error(0.0, "balanced")
    for fill in (-math.inf, -1e9, -1e4):
        assert error(fill, "balanced") < most
