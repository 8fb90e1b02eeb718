"""A process that compiles a model by inductor: prints what its graph holds, and what that took.

Run as `compiled_process.py <preset or plain> <name of a model>`.
"""

import json
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import memtrain
from memtrain.audit.live_storages import storage_nbytes
from tests.graphs import graph_nodes


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.act, self.down = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.norm2(x))))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)),
    "transformer": lambda: nn.Sequential(nn.Linear(64, 64), Block(), Block()),
}


def reported(preset, name):
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(2, 32, 64)
    optimizer = torch.optim.SGD(model.parameters())
    if preset != "plain":
        memtrain.wrap(model, optimizer, preset)
    before = spent()
    y = torch.compile(model)(x)
    saved = [t for node in graph_nodes(y) for t in getattr(node, "saved_tensors", ())]
    held = storage_nbytes(saved, exclude=[y, x, *model.parameters()])
    y.square().mean().backward()
    seconds, planned = spent() - before, held
    if preset != "plain":
        planned = sum(row.planned for row in memtrain.plan_of(model).entries("activation"))
    return {
        "held": held,
        "planned": planned,
        "gradient": torch.cat([p.grad.flatten() for p in model.parameters()]).tolist(),
        "generated": counters["inductor"]["fxgraph_cache_miss"],
        "served": counters["inductor"]["fxgraph_cache_hit"],
        "seconds": seconds,
    }


def spent():
    """Seconds of the processor, those of the C++ compilers that it ran too."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(reported(*sys.argv[1:])) + "\n")
