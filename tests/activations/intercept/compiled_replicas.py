"""One of two processes under gloo that train a compiled model. Prints what came of it as JSON."""

import copy
import json
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import memtrain

BACKEND = "aot_eager_decomp_partition"
WIDTH = 192  # a block has more bytes than DistributedDataParallel's first bucket


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.ln(x))))


def gradients(model):
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in found]


def train(rank, how):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    x = torch.randn(2, 32, WIDTH, generator=torch.Generator().manual_seed(rank))
    plain = copy.deepcopy(model)
    plain(x).square().mean().backward()
    expected = torch.cat([grad.flatten() for grad in gradients(plain)])
    dist.all_reduce(expected)
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (2,))
        for block in model:
            block.compile(backend=BACKEND)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = memtrain.wrap(model, optimizer, "balanced")
    run = model
    if how == "ddp":
        replica = DistributedDataParallel(model, bucket_cap_mb=1)
        run = torch.compile(replica, backend=BACKEND)
    close, graphs = 0.0, set()
    for step in range(4):
        run(x).square().mean().backward()
        if step == 0:
            found = torch.cat([grad.flatten() for grad in gradients(model)])
            close = F.cosine_similarity(found, expected, dim=0).item()
        optimizer.step()
        optimizer.zero_grad()
        graphs.add(counters["stats"]["unique_graphs"])
    rows = memtrain.plan_of(model).entries("activation")
    return {
        "cosine": close,
        "graphs": len(graphs),
        "bytes": sum(row.nbytes for row in rows),
        "planned": sum(row.planned for row in rows),
        "kept": sorted({row.reason for row in rows if row.reason}),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    sys.stdout.write(json.dumps(train(rank, sys.argv[3])) + "\n")
    dist.destroy_process_group()
