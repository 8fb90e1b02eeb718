"""Models and plans that the planner's tests share."""

import itertools

import torch
from torch import nn

from memtrain.config.sources import Activations, Config
from memtrain.plan.compressor_specs import compressor_spec
from memtrain.planner.knapsack import Sums


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(width), nn.Linear(width, 256), nn.GELU()
        self.down, self.drop = nn.Linear(256, width), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, depth=3, width=64):
        super().__init__()
        self.first, self.last = nn.Linear(32, width), nn.Linear(width, 8)
        self.h = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        x = self.first(x)
        for block in self.h:
            x = block(x)
        return self.last(x)


X = torch.randn(512, 32, generator=torch.Generator().manual_seed(1))


def make(depth=3):
    torch.manual_seed(0)
    model = Net(depth)
    return model, torch.optim.AdamW(model.parameters())


def config_with(options):
    choices = [choice for one in options for choice in one.choices.items()]
    sites = {site.name: compressor_spec(own) for site, own in choices}
    return Config(activations=Activations(sites=sites))


def everything(segments, max_error):
    """All plans, by brute force."""
    ways = [
        [*itertools.product(*(range(len(item.options)) for item in segment.items))]
        + ([None] if segment.recompute is not None else [])
        for segment in segments
    ]
    plans = [Sums(segments).evaluate(own) for own in itertools.product(*ways)]
    return [plan for plan in plans if plan.error <= max_error]
