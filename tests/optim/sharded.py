"""What processes that share parameters (DTensor, FSDP2) find; `distributed.py` runs it."""

import torch
import torch.distributed as dist
from torch import nn
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
            getattr(torch.optim, name)(params, lr=1e-2), layout.Choice(**options),
            min_elements=0,
        )  # fmt: skip

    return make


def fused(name, **options):
    return lambda params: getattr(optim, name)(params, lr=1e-2, min_elements=0, **options)


OPTIMIZERS = {
    "AdamW4bit": fused("AdamW4bit"),
    "AdamW4bit block": fused("AdamW4bit", second="B128/Linear"),
    # Rounded to nearest: stochastic rounding depends on the split.
    "AdamW4bitFactor": fused("AdamW4bitFactor", first="B128/DE"),
    "AdamW8bitFactor": fused("AdamW8bitFactor"),
    "AdamW8bit": fused("AdamW8bit"),
    "SGD4bit": fused("SGD4bit", momentum=0.9),
    "Lion4bit": fused("Lion4bit", first="B128/DE"),
    "AdamW4bitFactor 2 bits": fused("AdamW4bit", first="Lloyd-Max", second="factored"),
    "not fused": fused("AdamW4bit", first="identity"),
    "NAdam": general("NAdam"),
    "NAdam factored": general("NAdam", second="factored"),
    "Adagrad": general("Adagrad"),
}


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


def any_split(rank, world, names=(*SHORT, *tuple(KERNELS)[::3])):
    """Any shapes, empty parts too: split over the processes, or over one, the same bits.

    Fewer rows than processes show what a process without rows has to do.
    """
    found = {}
    one, all_of_them = mesh_of(world, 1), mesh_of(world)
    shapes = [(5, 77), (6, 176), (1, 300), (4099,), (3,), (9, 3, 5, 2), (0, 4), (7, 256)]
    shapes += [(2, 300), (1, 512), (2,), (4, 3, 35)]
    for name in names:
        wholes = [pair(shape, [Replicate(), Shard(0)], one)[1] for shape in shapes]
        parts = [pair(shape, [Shard(0)], all_of_them)[1] for shape in shapes]
        make = OPTIMIZERS.get(name) or KERNELS[name]
        a, b = make(wholes), make(parts)
        run(a), run(b)
        found[name] = max(distance(p, q) for p, q in zip(wholes, parts, strict=True))
        found[name + " states"] = max(
            distance(x, states(b, q)[key])
            for p, q in zip(wholes, parts, strict=True)
            for key, x in states(a, p).items()
        )
    return found


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


SCENARIOS = [
    whole_blocks,
    any_split,
    sides_of_the_whole,
    collectives,
    bad_numbers,
    wrapped,
    everything,
    replicas,
    accumulated,
]
