"""One of several processes that share the compilers' caches: prints what its graph holds."""

import json
import sys

import torch
from torch import nn
from torch._dynamo.utils import counters

import memtrain
from memtrain.audit.live_storages import storage_nbytes
from memtrain.audit.live_tensors import graph_nodes


def told(preset):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(64, 64)
    optimizer = torch.optim.SGD(model.parameters())
    if preset != "plain":
        memtrain.wrap(model, optimizer, preset)
    y = torch.compile(model)(x)
    saved = [t for node in graph_nodes(y) for t in getattr(node, "saved_tensors", ())]
    held = storage_nbytes(saved, exclude=[y, x, *model.parameters()])
    y.square().mean().backward()
    planned = held
    if preset != "plain":
        planned = sum(row.planned for row in memtrain.plan_of(model).entries("activation"))
    return {
        "held": held,
        "planned": planned,
        "gradient": torch.cat([p.grad.flatten() for p in model.parameters()]).tolist(),
        "generated": counters["inductor"]["fxgraph_cache_miss"],
        "served": counters["inductor"]["fxgraph_cache_hit"],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(told(sys.argv[1])) + "\n")
