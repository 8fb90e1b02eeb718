"""One of a few processes under gloo: prints what every scenario found as JSON."""

import copy
import json
import sys

import sharded
import sharded_checkpoints
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import memtrain
from memtrain.optim.states import shards
from memtrain.optim.wrappers.release import ReleaseGradients
from memtrain.optim.wrappers.weights import SplitWeights

STEPS = 4


def make():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def batch(step, rank, world):
    """A rank's part of the step's batch; all of it for world 1."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, generator=generator).chunk(world)[rank]


def train(model, optimizer, rank, world, dtype=torch.float32):
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step, rank, world).to(dtype)).float().square().mean().backward()
        optimizer.step()


def distance(a, b):
    return max((x.float() - y.float()).abs().max().item() for x, y in zip(a, b, strict=True))


def agree(tensors):
    """Whether all ranks hold the same bits."""
    flat = torch.cat([t.detach().float().flatten() for t in tensors])
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    return all(torch.equal(gathered[0], other) for other in gathered)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def ddp_refuses(rank, world):
    """What `wrap` says of models that are in DDP, and DDP of a model that releases gradients."""
    ddp = DistributedDataParallel(make())
    refused = []
    for change in ({"weights": "bf16+8"}, {"gradients": "release"}):
        for model in (ddp, ddp.module, ddp.module[0]):
            try:
                memtrain.wrap(model, adamw(model.parameters()), {"preset": "balanced", **change})
                refused.append("")
            except ValueError as error:
                refused.append(str(error))
    model = make()
    memtrain.wrap(model, adamw(model.parameters()), "all_four")
    later, start = DistributedDataParallel(model), copy.deepcopy(model.state_dict())
    try:
        later(batch(0, rank, world))
    except RuntimeError as error:
        refused.append(str(error))
    unchanged = all(torch.equal(start[name], value) for name, value in model.state_dict().items())
    return {"refused": refused, "unchanged": unchanged}


def ddp_after_unwrap(rank, world):
    """Whether a DDP refuses to train once `unwrap` has converted its weights."""
    model = make()
    cfg = {"preset": "all_four", "gradients": "keep"}
    model, optimizer = memtrain.wrap(model, adamw(model.parameters()), cfg)
    ddp = DistributedDataParallel(model)
    train(ddp, optimizer, rank, world)
    memtrain.unwrap(model, optimizer)
    with torch.no_grad():
        ddp(batch(0, rank, world))
    try:
        ddp(batch(0, rank, world))
    except RuntimeError as error:
        return str(error)


def ddp_states_and_weights(rank, world):
    cfg = {
        "preset": "optimizer_only", "optim": {"min_elements": 0}, "weights": "bf16+sr",
    }  # fmt: skip
    model = make()
    model, optimizer = memtrain.wrap(model, adamw(model.parameters()), cfg)
    train(DistributedDataParallel(model), optimizer, rank, world)
    return agree(model.parameters())


def sharded_model(dtype):
    model = make().to(dtype)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


def fsdp_released(rank, world):
    plain = sharded_model(torch.float32)
    train(plain, adamw(plain.parameters()), rank, world)
    model = sharded_model(torch.float32)
    optimizer = ReleaseGradients(adamw(model.parameters()))
    train(model, optimizer, rank, world)
    whole = [[p.full_tensor() for p in m.parameters()] for m in (model, plain)]
    return {
        "distance": distance(*whole),
        "freed": all(p.grad is None for p in model.parameters()),
        "norm": optimizer.norm,
        "expected": sum(p.grad.full_tensor().norm().item() ** 2 for p in plain.parameters()) ** 0.5,
        "sharded": type(optimizer.state[next(model.parameters())]["exp_avg"]).__name__,
    }


def fsdp_split(rank, world):
    """bf16+16 over shards: as float32 parameters stepped with the same bfloat16 gradients."""
    model = sharded_model(torch.bfloat16)
    twin = [nn.Parameter(p.full_tensor().detach().float()) for p in model.parameters()]
    whole = adamw(twin)
    optimizer = SplitWeights(adamw(model.parameters()), "bf16+16")
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step, rank, world).bfloat16()).float().square().mean().backward()
        for param, own in zip(model.parameters(), twin, strict=True):
            own.grad = param.grad.full_tensor().float()
        optimizer.step()
        whole.step()
    masters = [optimizer.master(p).full_tensor() for p in model.parameters()]
    both = sharded_model(torch.bfloat16)
    released = ReleaseGradients(SplitWeights(adamw(both.parameters()), "bf16+16"))
    train(both, released, rank, world, torch.bfloat16)
    refused = ""
    try:
        SplitWeights(adamw(sharded_model(torch.float32).parameters()))
    except ValueError as error:
        refused = str(error)
    inner = released.inner
    return {
        "distance": distance(masters, twin),
        "released": distance([inner.master(p).full_tensor() for p in both.parameters()], masters),
        "refused": refused,
        "local": optimizer.corrections[next(model.parameters())].numel(),
    }


def parts_of_a_whole(rank, world):
    """Whether parts on the host, whose mesh is elsewhere, are those that torch makes."""
    mesh, equal = init_device_mesh("cpu", (world,)), []
    for shape in ((5, 3), (1, 7), (6,), ()):
        whole = torch.randn(shape)
        placements = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        for placement in placements:
            theirs = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
            own = shards.local(shards.placed_as(whole, theirs))
            equal.append(torch.equal(own, theirs.to_local()))
    return equal


SCENARIOS = [
    ddp_refuses,
    ddp_after_unwrap,
    ddp_states_and_weights,
    fsdp_released,
    fsdp_split,
    parts_of_a_whole,
    *sharded.SCENARIOS,
    *sharded_checkpoints.SCENARIOS,
]


def run(scenario, rank, world):
    torch.manual_seed(0)
    return scenario(rank, world)


def main(rank, world, path, name="", directory=""):
    """All scenarios, or one of `sharded_checkpoints` that works on a directory."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    if name:
        found = getattr(sharded_checkpoints, name)(rank, world, directory)
    else:
        found = {scenario.__name__: run(scenario, rank, world) for scenario in SCENARIOS}
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
