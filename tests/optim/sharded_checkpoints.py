"""What processes that share parameters save and load; `distributed.py` runs it."""

import copy
import dataclasses
import json
import math
import os
import signal
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded import (
    KERNELS,
    OPTIMIZERS,
    SHORT,
    STEPS,
    any_split,
    distance,
    full,
    losses,
    mesh_of,
    model_of,
    pair,
    run,
    states,
    whole_blocks,
)
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import memtrain
from memtrain import optim
from memtrain.optim.states import layout, shards


def uneven_model(preset, seed):
    """A wrapped FSDP2 model with layers of 1 and 2 rows, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(300, 2), nn.GELU(), nn.Linear(2, 64), nn.Linear(64, 1))
    if preset.startswith("all_four"):
        model.to(torch.bfloat16)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    cfg = {"preset": preset, "optim": {"min_elements": 0}, "activations": {"min_elements": 0}}
    return memtrain.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), cfg)


def train(model, optimizer, steps):
    """Each step's loss on this process."""
    got = []
    for step in steps:
        x = torch.randn(6, 300, generator=torch.Generator().manual_seed(step))
        x = x.chunk(dist.get_world_size())[dist.get_rank()]
        out = model(x.to(next(model.parameters()).dtype)).float()
        loss = (out - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        got.append(loss.item())
    return got


def resumed(preset, path=None):
    """Whether such a model goes on as saved (in memory without a path), in finite numbers."""
    first, second = uneven_model(preset, 0), uneven_model(preset, 1)
    losses = train(*first, range(2))
    if path is None:
        place = copy.deepcopy(_whole_state(first))
    else:
        dcp.save(_whole_state(first), checkpoint_id=path)
        place = _whole_state(second)
        dcp.load(place, checkpoint_id=path)
    second[0].load_state_dict(place["model"])
    set_optimizer_state_dict(*second, place["optim"])
    more = train(*first, range(2, 5))
    same = train(*second, range(2, 5)) == more
    return [same, all(map(math.isfinite, losses + more))]


def _whole_state(started):
    return {"model": started[0].state_dict(), "optim": get_optimizer_state_dict(*started)}


def dies_in_step(rank, world, path):
    """Save after two steps, record two more, then lose a process in the middle of a backward."""

    def hook(started, die):
        started[0][1].register_forward_hook(
            lambda module, args, out: out.register_hook(die) and None
        )

    return doomed(rank, world, path, hook)


def dies_in_save(rank, world, path):
    """The same, but a process is lost when it has written half of its part of a checkpoint."""

    def save(started, die):
        write = FileSystemWriter.write_data

        def half(writer, plan, planner):
            items = plan.items if rank == 0 else plan.items[: len(plan.items) // 2]
            write(writer, dataclasses.replace(plan, items=items), planner).wait()
            die() if rank else None
            return write(writer, plan, planner)

        FileSystemWriter.write_data = half
        dcp.save(_whole_state(started), checkpoint_id=f"{path}/later")

    return doomed(rank, world, path, save)


def doomed(rank, world, path, last):
    started = uneven_model("all_four", 0)
    train(*started, range(2))
    dcp.save(_whole_state(started), checkpoint_id=f"{path}/kept")
    losses = train(*started, range(2, 4))
    with open(f"{path}/losses{rank}.json", "w") as file:
        json.dump(losses, file)

    def die(*_):
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    last(started, die)
    train(*started, range(4, 6))


def survives(rank, world, path):
    """Whether the checkpoint before a process was lost goes on as that run did."""
    started = uneven_model("all_four", 1)
    place = _whole_state(started)
    dcp.load(place, checkpoint_id=f"{path}/kept")
    started[0].load_state_dict(place["model"])
    set_optimizer_state_dict(*started, place["optim"])
    losses = train(*started, range(2, 4))
    with open(f"{path}/losses{rank}.json") as file:
        return {"equal": losses == json.load(file)}


def continued(rank, world):
    """Runs that `get_optimizer_state_dict` saved and another loads, under whole presets."""
    return {preset: resumed(preset) for preset in ("balanced", "all_four")}


def checkpoint_of_columns(rank, world):
    """A parameter split along its second dimension: saved in float32, and within a step."""
    part = pair((6, 262), [Shard(1)], mesh_of(world))[1]
    optimizer = OPTIMIZERS["AdamW4bit"]([part])
    run(optimizer)
    before = states(optimizer, part)
    saved = optimizer.state_dict()
    found = [type(saved["state"][0][key]).__name__ for key in before]
    optimizer.load_state_dict(saved)
    after = states(optimizer, part)
    moved = [
        distance(before[key], after[key]) / full(before[key]).abs().max().item() for key in before
    ]
    run(optimizer, 1, STEPS)
    return {"types": found, "moved": moved}


SHAPES = [(5, 77), (6, 256), (8, 176), (1, 300), (259,)]


def parameters(world):
    mesh = mesh_of(world)
    return [pair(shape, [Shard(0)], mesh, k)[1] for k, shape in enumerate(SHAPES)]


def checkpoint(rank, world, names=SHORT):
    """Saved by `torch.distributed.checkpoint` and loaded by as many processes: bit for bit."""
    path = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(path)
    found = {}
    for name in names:
        make = OPTIMIZERS[name]
        a = make(parameters(world))
        run(a)
        dcp.save({"optim": a.state_dict()}, checkpoint_id=f"{path[0]}/{name}")
        b = make(parameters(world))
        run(b, 1)  # states to load into
        target = {"optim": b.state_dict()}
        dcp.load(target, checkpoint_id=f"{path[0]}/{name}")
        b.load_state_dict(target["optim"])
        with torch.no_grad():
            for p, q in zip(parameters_of(a), parameters_of(b), strict=True):
                q.copy_(p)
        equal = [
            same(a.state[p], b.state[q]) for p, q in zip(*map(parameters_of, (a, b)), strict=True)
        ]
        run(a, 1, STEPS), run(b, 1, STEPS)
        equal += [
            torch.equal(full(p), full(q)) for p, q in zip(*map(parameters_of, (a, b)), strict=True)
        ]
        found[name] = all(equal)
    return found


MOVED = [
    "AdamW4bit",
    "AdamW4bitFactor 2 bits",
    "AdamW4bitFactor",
    "AdamW8bit",
    "SGD4bit",
    "Lion4bit",
    "NAdam",
]


def save(rank, world, path):
    """A checkpoint for other numbers of processes, and what its states are worth."""
    for name in MOVED:
        optimizer = OPTIMIZERS[name](parameters(world))
        run(optimizer)
        dcp.save({"optim": optimizer.state_dict()}, checkpoint_id=f"{path}/{name}")
        worth = [
            {key: full(x) for key, x in states(optimizer, p).items()}
            for p in parameters_of(optimizer)
        ]
        if rank == 0:
            torch.save(worth, f"{path}/{name}.pt")
    return {}


def load(rank, world, path):
    """How far states that another number of processes has saved move."""
    found = {}
    for name in MOVED:
        optimizer = OPTIMIZERS[name](parameters(world))
        run(optimizer, 1)
        target = {"optim": optimizer.state_dict()}
        dcp.load(target, checkpoint_id=f"{path}/{name}")
        optimizer.load_state_dict(target["optim"])
        worth = torch.load(f"{path}/{name}.pt")
        for p, saved in zip(parameters_of(optimizer), worth, strict=True):
            for key, x in states(optimizer, p).items():
                first, count = shards.local_rows(p)
                was, now = saved[key][first : first + count], shards.local(x)
                moved = now.sub(was).abs().max().item() if now.numel() else 0.0
                found[f"{name} {tuple(p.shape)} {key}"] = moved
        run(optimizer, 1, STEPS)
    return found


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def same(a, b):
    """Whether two parameters' states are equal, bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        a, b = shards.local(a), shards.local(b)
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b


def checkpoint_by_names(rank, world):
    """The form of `get_optimizer_state_dict`, into an optimizer that has no states yet."""
    path = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(path)
    model = model_of(True)
    optimizer = OPTIMIZERS["AdamW4bit"](model.parameters())
    losses(model, optimizer, rank, world, 3)
    optimizer.zero_grad()  # else torch makes no first states for `other`
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path[0])
    other = OPTIMIZERS["AdamW4bit"](model.parameters())
    target = {"optim": get_optimizer_state_dict(model, other)}
    dcp.load(target, checkpoint_id=path[0])
    set_optimizer_state_dict(model, other, target["optim"])
    equal = [same(optimizer.state[p], other.state[p]) for p in model.parameters()]
    return {"equal": all(equal)}


def plain_checkpoints(rank, world):
    """Whole plain states of torch's AdamW load into parts; portable ones into torch's AdamW."""
    whole, part = pair((7, 256), [Shard(0)], mesh_of(world))
    plain = torch.optim.AdamW([whole], lr=1e-2)
    run(plain)
    ours = OPTIMIZERS["AdamW4bit"]([part])
    ours.load_state_dict(plain.state_dict())
    expected = optim.compress(
        torch.optim.AdamW([nn.Parameter(whole.detach().clone())], lr=1e-2),
        layout.Choice(),
        min_elements=0,
    )
    expected.load_state_dict(plain.state_dict())
    (twin,) = parameters_of(expected)
    equal = [
        torch.equal(full(states(ours, part)[key]), states(expected, twin)[key])
        for key in ("exp_avg", "exp_avg_sq")
    ]
    back = torch.optim.AdamW([part], lr=1e-2)
    back.load_state_dict(optim.portable_state_dict(ours))
    equal += [torch.equal(full(back.state[part]["exp_avg"]), states(expected, twin)["exp_avg"])]
    saved, refused = ours.state_dict(), []
    for spoil in (lambda payload: payload.pop("scale"), cut_codes):
        payload = dict(saved["state"][0]["exp_avg"])
        spoil(payload)
        wrong = {**saved, "state": {0: {**saved["state"][0], "exp_avg": payload}}}
        before = dict(ours.state[part])
        try:
            ours.load_state_dict(wrong)
            refused.append(False)
        except ValueError:
            refused.append(all(ours.state[part][key] is x for key, x in before.items()))
    return {"equal": all(equal), "refused": refused}


def cut_codes(payload):
    payload["codes"] = payload["codes"].to_local()[..., :8]


def all_optimizers(rank, world, path):
    """The scenarios that every run tries with some optimizers and presets, with all."""
    presets = ("balanced", "all_four", "all_four_2bit", "actnn_l3")
    return {
        "whole_blocks": whole_blocks(rank, world, OPTIMIZERS),
        "any_split": any_split(rank, world, (*OPTIMIZERS, *KERNELS)),
        "checkpoint": checkpoint(rank, world, OPTIMIZERS),
        "continued": {preset: resumed(preset, f"{path}/{preset}") for preset in presets},
    }


SCENARIOS = [
    continued,
    checkpoint,
    checkpoint_by_names,
    checkpoint_of_columns,
    plain_checkpoints,
]
