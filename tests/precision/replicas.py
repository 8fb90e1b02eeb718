"""One of two processes under gloo: an overflow on one rank. Prints what came of it as JSON."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memtrain


def train(rank, steps=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    cfg = {"preset": "precision_only", "precision": {"assignment": "uniform", "promotion": 0.01}}
    model, optimizer = memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), cfg)
    replica = DistributedDataParallel(model)
    changed = []
    for step in range(steps):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        x[0] *= 100 if step == 2 and rank == 0 else 1  # promoted
        optimizer.zero_grad()
        before = model[0].weight.detach().clone()
        loss = replica(x).square().mean()
        (loss * (1e12 if step == 1 and rank == 1 else 1)).backward()  # overflows
        optimizer.step()
        changed.append(not torch.equal(before, model[0].weight))
    state = memtrain.precision_state(model)
    return {
        "changed": changed,
        "scale": state.scale.value,
        "overflows": state.scale.overflows,
        "promoted": [[step, site, ratio] for site, (step, ratio) in state.promotions.items()],
        "weights": [p.tolist() for p in model.parameters()],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    sys.stdout.write(json.dumps(train(rank)) + "\n")
    dist.destroy_process_group()
