"""What processes that share parameters (DTensor, FSDP2) find; `distributed.py` runs it."""

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
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import memtrain
from memtrain import optim
from memtrain.compressors import codebook as blocks
from memtrain.optim.states import layout, shards
from memtrain.plan.plan import make_plan

STEPS = 3
blocks.MAX_VECTOR_BYTES = 1e9  # rank-1 and factored states of small tensors too


def general(name, **options):
    def make(params):
        return optim.CompressedOptimizer(
            getattr(torch.optim, name)(params, lr=1e-2), layout.Choice(min_elements=0, **options),
            min_elements=0,
        )  # fmt: skip

    return make


def fused(name, **options):
    return lambda params: getattr(optim, name)(params, lr=1e-2, min_elements=0, **options)


OPTIMIZERS = {
    "AdamW4bit": fused("AdamW4bit"),
    "AdamW4bit block": fused("AdamW4bit", second="B128/Linear"),
    "AdamW4bitFactor": fused("AdamW4bitFactor"),
    "AdamW8bitFactor": fused("AdamW8bitFactor"),
    "AdamW8bit": fused("AdamW8bit"),
    "SGD4bit": fused("SGD4bit", momentum=0.9),
    "Lion4bit": fused("Lion4bit"),
    "AdamW4bitFactor 2 bits": fused("AdamW4bit", first="Lloyd-Max", second="factored"),
    "not fused": fused("AdamW4bit", first="identity"),
    "NAdam": general("NAdam"),
    "NAdam factored": general("NAdam", second="factored"),
    "Adagrad": general("Adagrad"),
}


SHORT = ("AdamW4bit", "AdamW4bitFactor 2 bits", "AdamW8bit", "not fused", "NAdam factored")
"""What every run tries; the nightly one tries all."""


def mesh_of(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple("ab"[: len(sizes)]))


def pair(shape, placements, mesh, seed=0):
    """A parameter that each process holds, and the same one split."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(shape, generator=generator)
    return nn.Parameter(whole.clone()), nn.Parameter(
        distribute_tensor(whole, mesh, placements, src_data_rank=None)
    )


def give(param, seed):
    """A gradient, split as the parameter is."""
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(param.shape, generator=generator)
    grad *= (
        torch.randn(param.shape[0], generator=generator).exp().view(-1, *[1] * (param.dim() - 1))
    )
    param.grad = grad
    if shards.is_sharded(param):
        param.grad = distribute_tensor(
            grad, param.device_mesh, param.placements, src_data_rank=None
        )


def run(optimizer, steps=STEPS, first=0):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        for k, param in enumerate(params):
            give(param, 100 * step + k)
        optimizer.step()
    return params


def full(x):
    return x.full_tensor() if shards.is_sharded(x) else x


def distance(a, b):
    return (full(a) - full(b)).abs().max().item() if a.numel() else 0.0


def states(optimizer, param):
    """Every state, decoded."""
    return {
        name: layout.unpack(optimizer.compressor(param, name)[0], value, param)
        for name, value in optimizer.state[param].items()
        if isinstance(value, dict) or value.dim()
    }


def whole_blocks(rank, world, names=SHORT):
    """Rows that fill whole blocks: parts and the whole have the same blocks."""
    found = {}
    mesh = mesh_of(world)
    for name in names:
        make = OPTIMIZERS[name]
        pairs = [pair(shape, [Shard(0)], mesh) for shape in [(7, 256), (4, 8, 128), (1, 512)]]
        wholes, parts = zip(*pairs, strict=True)
        a, b = make(list(wholes)), make(list(parts))
        run(a), run(b)
        found[name] = max(distance(p, q) for p, q in pairs)
        found[name + " states"] = max(
            distance(x, states(b, q)[key])
            for p, q in pairs
            for key, x in states(a, p).items()
        )  # fmt: skip
    return found


def any_split(rank, world, names=SHORT):
    """Any shapes, empty parts too: split over the processes, or over one, the same bits."""
    found = {}
    one, all_of_them = mesh_of(world, 1), mesh_of(world)
    shapes = [(5, 77), (6, 176), (1, 300), (4099,), (3,), (9, 3, 5, 2), (0, 4), (7, 256)]
    for name in names:
        wholes = [pair(shape, [Replicate(), Shard(0)], one)[1] for shape in shapes]
        parts = [pair(shape, [Shard(0)], all_of_them)[1] for shape in shapes]
        a, b = OPTIMIZERS[name](wholes), OPTIMIZERS[name](parts)
        run(a), run(b)
        found[name] = max(distance(p, q) for p, q in zip(wholes, parts, strict=True))
        found[name + " states"] = max(
            distance(x, states(b, q)[key])
            for p, q in zip(wholes, parts, strict=True)
            for key, x in states(a, p).items()
        )
    return found


SECONDS = ("Rank-1/Linear", "B128/Linear", "factored", "identity")
KERNELS = {
    f"{name} {options}": fused(name, **options)
    for name, *choices in [
        *(
            (adam, *({"second": second} for second in SECONDS))
            for adam in ("AdamW4bit", "Adam4bit")
        ),
        ("AdamW4bit", {"first": "Lloyd-Max", "second": "factored"}, {"first": "identity"}),
        ("AdamW8bit", {}, {"second": "factored"}),
        *(("SGD4bit", {"momentum": 0.9, "first": first}) for first in ("B128/DE", "identity")),
        *(("Lion4bit", {"first": first}) for first in ("B128/DE", "identity")),
        ("SGD8bit", {"momentum": 0.9}),
        ("Lion8bit", {}),
    ]
    for options in choices
}
"""Every fused kernel with every codec; every third of them is tried by every run."""


def few_rows(rank, world, path=None, names=tuple(KERNELS)[::3], presets=("all_four",)):
    """Parameters of fewer rows than processes, or of no row on the last: as over one process.

    And a wrapped FSDP2 model of such layers, saved and resumed.
    """
    found = {"parts": {}, "own": [], "resumed": {}}
    one, all_of_them = mesh_of(world, 1), mesh_of(world)
    shapes = [(2, 300), (1, 512), (2,), (4, 3, 35), (7, 77)]
    for name in names:
        make = KERNELS[name]
        wholes = [pair(shape, [Replicate(), Shard(0)], one)[1] for shape in shapes]
        parts = [pair(shape, [Shard(0)], all_of_them)[1] for shape in shapes]
        a, b = make(wholes), make(parts)
        run(a, 2), run(b, 2)
        found["parts"][name] = max(distance(p, q) for p, q in zip(wholes, parts, strict=True))
        found["own"] = [shards.local(part.detach()).shape[0] for part in parts]
    for preset in presets:
        found["resumed"][preset] = resumed(preset, path and f"{path}/{preset}")
    return found


def few_rows_of_all(rank, world, path):
    """`few_rows` with every kernel, and presets of all kinds of states."""
    presets = ("balanced", "all_four", "all_four_2bit", "actnn_l3")
    return few_rows(rank, world, path, KERNELS, presets)


def few_rows_model(preset, seed):
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


def train_few_rows(model, optimizer, steps):
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
    first, second = few_rows_model(preset, 0), few_rows_model(preset, 1)
    losses = train_few_rows(*first, range(2))
    if path is None:
        place = copy.deepcopy(_whole_state(first))
    else:
        dcp.save(_whole_state(first), checkpoint_id=path)
        place = _whole_state(second)
        dcp.load(place, checkpoint_id=path)
    second[0].load_state_dict(place["model"])
    set_optimizer_state_dict(*second, place["optim"])
    more = train_few_rows(*first, range(2, 5))
    same = train_few_rows(*second, range(2, 5)) == more
    return [same, all(map(math.isfinite, losses + more))]


def _whole_state(run):
    return {"model": run[0].state_dict(), "optim": get_optimizer_state_dict(*run)}


def dies_in_step(rank, world, path):
    """Save after two steps, record two more, then lose a process in the middle of a backward."""

    def hook(run, die):
        run[0][1].register_forward_hook(lambda module, args, out: out.register_hook(die) and None)

    return doomed(rank, world, path, hook)


def dies_in_save(rank, world, path):
    """The same, but a process is lost when it has written half of its part of a checkpoint."""

    def save(run, die):
        write = FileSystemWriter.write_data

        def half(writer, plan, planner):
            items = plan.items if rank == 0 else plan.items[: len(plan.items) // 2]
            write(writer, dataclasses.replace(plan, items=items), planner).wait()
            die() if rank else None
            return write(writer, plan, planner)

        FileSystemWriter.write_data = half
        dcp.save(_whole_state(run), checkpoint_id=f"{path}/later")

    return doomed(rank, world, path, save)


def doomed(rank, world, path, last):
    run = few_rows_model("all_four", 0)
    train_few_rows(*run, range(2))
    dcp.save(_whole_state(run), checkpoint_id=f"{path}/kept")
    losses = train_few_rows(*run, range(2, 4))
    with open(f"{path}/losses{rank}.json", "w") as file:
        json.dump(losses, file)

    def die(*_):
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    last(run, die)
    train_few_rows(*run, range(4, 6))


def survives(rank, world, path):
    """Whether the checkpoint before a process was lost goes on as that run did."""
    run = few_rows_model("all_four", 1)
    place = _whole_state(run)
    dcp.load(place, checkpoint_id=f"{path}/kept")
    run[0].load_state_dict(place["model"])
    set_optimizer_state_dict(*run, place["optim"])
    losses = train_few_rows(*run, range(2, 4))
    with open(f"{path}/losses{rank}.json") as file:
        return {"equal": losses == json.load(file)}


def sides_of_the_whole(rank, world):
    """Rank-1's scales and the factors, of shapes that no block fits, are those of the whole."""
    found = {}
    mesh, grid = mesh_of(world), mesh_of(1, world)
    cases = {
        "rows": ([Shard(0)], mesh),
        "columns": ([Shard(1)], mesh),
        "replicated rows": ([Replicate(), Shard(0)], grid),
        "both": ([Shard(0), Shard(1)], grid),
    }
    for case, (placements, on) in cases.items():
        for name in ["AdamW4bit", "AdamW4bitFactor", "not fused", "NAdam", "NAdam factored"]:
            whole, part = pair((77, 131), placements, on)
            deep, deep_part = pair((61, 9, 25), placements, on)
            a, b = OPTIMIZERS[name]([whole, deep]), OPTIMIZERS[name]([part, deep_part])
            run(a), run(b)
            key = "exp_avg_sq"
            found[f"{name} {case}"] = max(
                distance(states(a, p)[key], states(b, q)[key]) / states(a, p)[key].max().item()
                for p, q in [(whole, part), (deep, deep_part)]
            )
    return found


def collectives(rank, world):
    """How many all-reduces a step makes."""
    found = {}
    mesh = mesh_of(world)
    real, count = dist.all_reduce, [0]

    def counted(*args, **kwargs):
        count[0] += 1
        return real(*args, **kwargs)

    for name in ["AdamW4bit", "AdamW4bitFactor", "AdamW8bit", "Lion4bit"]:
        optimizer = OPTIMIZERS[name]([pair((77, 256), [Shard(0)], mesh)[1] for _ in range(3)])
        dist.all_reduce, count[0] = counted, 0
        try:
            run(optimizer, 1)
        finally:
            dist.all_reduce = real
        found[name] = count[0]
    return found


def bad_numbers(rank, world):
    """A NaN in one part: the column's scale is NaN in all, other elements stay right."""
    mesh = mesh_of(world)
    whole, part = pair((8, 256), [Shard(0)], mesh)
    found = []
    for param in (whole, part):
        optimizer = OPTIMIZERS["AdamW4bit"]([param])
        run(optimizer, 1)
        give(param, 7)
        grad = full(param.grad).clone()
        grad[0, 3] = torch.nan
        param.grad = (
            distribute_tensor(grad, mesh, [Shard(0)], src_data_rank=None)
            if shards.is_sharded(param)
            else grad
        )
        before = full(param).detach().clone()
        optimizer.step()
        found.append(
            [full(x).detach().nan_to_num(9.0) for x in (*states(optimizer, param).values(), param)]
        )
    return {
        "states": all(map(torch.equal, found[0][:2], found[1][:2])),
        # The kernels' square roots may differ from torch's in the last bit: one ulp of the update,
        # which is at most as large as the parameter before and after it, and one of the result.
        "parameters": bool(
            ((found[0][2] - found[1][2]).abs() <= 2**-23 * (found[1][2].abs() + before.abs())).all()
        ),
        "spoilt": int(full(part).isnan().sum()),
    }


def model_of(sharded, width=48):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, width), nn.Tanh(), nn.Linear(width, 31))
    if sharded:
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    return model


def losses(model, optimizer, rank, world, steps=12):
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 24, generator=generator)
        y = torch.tanh(x[:, :1] * 2 + x[:, 1:2])
        loss = (model(x.chunk(world)[rank]) - y.chunk(world)[rank]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        whole = loss.detach().clone()
        if world > 1:
            dist.all_reduce(whole)
        found.append(whole.item() / world)
    return found


def curves(rank, world):
    found = {}
    for name in ["AdamW4bit", "AdamW4bitFactor", "AdamW8bit"]:
        plain, whole, part = model_of(False), model_of(False), model_of(True)
        found[name] = [
            losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), 0, 1),
            losses(whole, OPTIMIZERS[name](whole.parameters()), 0, 1),
            losses(part, OPTIMIZERS[name](part.parameters()), rank, world),
        ]
    return found


def planned_bytes(model, optimizer, cfg):
    """This process's bytes of weights, gradients, states and compressed states, as planned."""
    plan = make_plan(model, optimizer, cfg)
    kinds = [plan.entries(kind) for kind in ("weight", "gradient", "state")]
    planned = sum(entry.planned for entry in kinds[2])
    return [*(sum(entry.nbytes for entry in entries) for entries in kinds), planned]


def wrapped(rank, world):
    """`memtrain.wrap` around a sharded model, and back."""
    plain = model_of(True)
    kept = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = losses(plain, kept, rank, world)
    found = {}
    exact = {"preset": "exact"}
    small = {"preset": "optimizer_only", "optim": {"min_elements": 0}}
    both = {**small, "preset": "balanced", "activations": {"min_elements": 0}}
    for name, cfg in {"exact": exact, "states": small, "both": both}.items():
        model = model_of(True)
        model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), cfg)
        got = losses(model, optimizer, rank, world)
        found[name] = max(abs(a - b) for a, b in zip(got, expected, strict=True))
        if name == "states":
            own = sum(shards.local(p).nbytes for p in model.parameters())
            taken = [own, own, optim.state_bytes(kept), optim.state_bytes(optimizer)]
            fresh = torch.optim.AdamW(plain.parameters(), lr=1e-2)
            found["planned"] = [planned_bytes(plain, o, cfg) == taken for o in (kept, fresh)]
            found["bytes"] = optim.state_bytes(optimizer) / optim.state_bytes(kept)
            model, optimizer = memtrain.unwrap(model, optimizer)
            state = optimizer.state[next(model.parameters())]["exp_avg"]
            found["back"] = [type(optimizer).__name__, type(state).__name__]
            losses(model, optimizer, rank, world, 1)
    return found


def everything(rank, world):
    """Compressed states, split weights and gradient release together, over shards."""
    model = model_of(False)
    model.to(torch.bfloat16)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    cfg = {"preset": "optimizer_only", "optim": {"min_elements": 0}, "weights": "bf16+8"}
    cfg |= {"gradients": "release", "release": {"clip": "previous", "limit": 10.0}}
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = memtrain.wrap(model, plain, cfg)
    got = []
    for step in range(8):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = (model(x.chunk(world)[rank]) - 0.5).float().square().mean()
        loss.backward()
        optimizer.step()
        got.append(loss.item())
    kind = type(optimizer.state_dict()["state"][0]["weight_correction"]).__name__
    model, back = memtrain.unwrap(model, optimizer)
    return {"first": got[0], "last": got[-1], "kind": kind, "back": back is plain}


def continued(rank, world):
    """Runs that `get_optimizer_state_dict` saved and another loads, under whole presets."""
    return {preset: resumed(preset) for preset in ("balanced", "all_four")}


def replicas(rank, world):
    """Stochastic rounding draws equal bits in replicas and different ones in each part."""
    found = {}
    for name, sizes in {"replicas": (world, 1), "parts": (1, world)}.items():
        mesh = mesh_of(*sizes)
        half = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)).repeat(world, 1)
        whole = half if name == "parts" else half[:4]
        part = nn.Parameter(
            distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None).bfloat16()
        )
        inner = optim.AdamW4bit([part], lr=1e-2, min_elements=0, first="B128/DE+SR")
        optimizer = optim.SplitWeights(inner, "bf16+sr")
        for _ in range(STEPS):
            part.grad = part.detach().clone()
            optimizer.step()
        own = shards.local(part.detach()).float().contiguous()
        others = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(others, own)
        found[name] = all(torch.equal(own, other) for other in others)
    return found


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


def accumulated(rank, world):
    """Gradient release over two backward passes, beside sums that are exact."""
    found = []
    for passes in (1, 2):
        model = model_of(True)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = optim.ReleaseGradients(inner, accumulate=2) if passes == 2 else inner
        for k in range(2):
            x = torch.randn(8, 24, generator=torch.Generator().manual_seed(k)).chunk(world)[rank]
            (model(x) - 0.5).square().mean().backward()
            largest = [
                full(p.grad).abs().max().item() if k == 0 and passes == 1 else 0.0
                for p in model.parameters()
            ]
            found.append(largest)
        held = [p.grad is None for p in model.parameters()]
        held.remove(False)  # of the fewest elements, until the step
        optimizer.step()
        found.append([full(p).detach() for p in model.parameters()])
    largest, _, exact, _, _, got = found
    moved = [
        (a - b).abs().max().item() / top for a, b, top in zip(exact, got, largest, strict=True)
    ]
    return {"moved": moved, "freed": all(held)}


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
                first, count = shards.own_rows(p)
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
        layout.Choice(min_elements=0),
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
    """The scenarios that every run tries with some optimizers, with all."""
    scenarios = (whole_blocks, any_split, checkpoint)
    return {scenario.__name__: scenario(rank, world, OPTIMIZERS) for scenario in scenarios}


SCENARIOS = [
    whole_blocks,
    any_split,
    few_rows,
    sides_of_the_whole,
    collectives,
    bad_numbers,
    curves,
    wrapped,
    everything,
    continued,
    replicas,
    accumulated,
    checkpoint,
    checkpoint_by_names,
    checkpoint_of_columns,
    plain_checkpoints,
]
