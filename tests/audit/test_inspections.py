"""Every inspection leaves model, optimizer and random states as they were, bit for bit."""

import functools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import weight_norm
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import memtrain
from memtrain.audit.peak.measure import measure
from memtrain.audit.peak.predict import predict
from memtrain.planner import make_plan

INSPECTIONS = {
    "audit": lambda m, o, x: memtrain.audit(m, x, "balanced", optimizer=o, peak=True),
    "estimate": lambda m, o, x: memtrain.estimate(m, x, "balanced", optimizer=o),
    "largest": lambda m, o, x: memtrain.largest(m, x, "balanced", "1GiB", optimizer=o, most=3),
    "predict": lambda m, o, x: predict(m, o, x, "all_four"),
    "measure": lambda m, o, x: measure(m, o, x, "balanced"),
    "plan": lambda m, o, x: make_plan(m, o, "all_four", batch=x),
    "precision": lambda m, o, x: make_plan(
        m, o, {"precision": {"assignment": "operator"}}, batch=x
    ),
    "budget": lambda m, o, x: make_plan(m, o, batch=x, budget="64MiB"),
    "wrapped": lambda m, o, x: memtrain.unwrap(*memtrain.wrap(m, o, "balanced", batch=x)),
    "verify": lambda m, o, x: memtrain.verify(m, x, "balanced"),
}  # fmt: skip


@functools.lru_cache
def angles(length):
    return torch.linspace(0, 1, length)


class Aliases(nn.Module):
    """A module under three names, a weight in two modules, and a table that is no buffer."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32)
        self.b = self.a
        self.c = nn.Linear(32, 32)
        self.c.weight = self.a.weight
        self.chain = nn.Sequential(self.a, nn.GELU(), self.a)
        self.register_buffer("scale", torch.ones(32))
        self.register_buffer("same", self.scale)
        self.table, self.seen, self.calls = torch.randn(32), [], 0

    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        x = x * angles(32) * self.table * self.same
        return self.chain(self.c(self.b(torch.tanh(self.a(x)))))


class Normed(nn.Module):
    """Batch statistics, weights that are computed, and hooks of the user's."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(32, 64), nn.BatchNorm1d(64)
        self.second = spectral_norm(nn.Linear(64, 64))
        self.third = nn.Linear(64, 32)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Linear(32, 32).eval().requires_grad_(requires_grad=False)
        self.third.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x):
        x = self.first(self.frozen(x))
        x = self.drop(self.second(self.norm(x.unsqueeze(2).expand(-1, -1, 2)).amax(2)))
        if random.random() < 0:
            x = x + np.random.rand()
        return self.third(x)


class Old(nn.Module):
    """A weight norm of the old kind, which leaves what it computes in an attribute."""

    def __init__(self):
        super().__init__()
        self.layer = weight_norm(nn.Linear(32, 32))

    def forward(self, x):
        return self.layer(x).sigmoid()


class Blocks(nn.Module):
    """Equal blocks, of which some are checkpointed; two of them are one."""

    def __init__(self):
        super().__init__()
        block = lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.SiLU())  # noqa: E731
        self.h = nn.ModuleList(block() for _ in range(6))
        self.h.append(self.h[0])

    def forward(self, x):
        for place, block in enumerate(self.h):
            x = checkpoint(block, x, use_reentrant=False) if place % 2 else x + block(x)
        return x


class Last(nn.Module):
    """Fails after all that comes before."""

    fails = False

    def forward(self, x):
        if self.fails:
            raise ValueError("the last module fails")
        return x


def everything():
    return nn.Sequential(Blocks(), Normed(), Aliases(), Last())


MODELS = [
    everything,
    *(pytest.param(one, marks=pytest.mark.nightly) for one in (Aliases, Normed, Blocks)),
]


def state(model, optimizer):
    """All that an inspection must leave alone: identities, bits, and plain values."""
    tensors, plain, hooks = {}, {}, {}
    for path, module in model.named_modules(remove_duplicate=False):
        plain[path] = type(module), id(module), module.training
        for name, value in vars(module).items():
            key = f"{path}.{name}"
            if name.endswith("_hooks"):
                hooks[key] = [(number, id(hook)) for number, hook in value.items()]
            elif name in ("_parameters", "_buffers"):
                for own, x in value.items():
                    tensors[f"{key}.{own}"] = x, None if x is None else x.grad
            elif name != "_modules":
                leaves = torch.utils._pytree.tree_leaves(value)
                found = [x if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
                tensors |= {f"{key}.{n}": (x, None) for n, x in enumerate(found)}
    for number, own in enumerate(optimizer.state.values()):
        tensors |= {f"{number}.{name}": (x, None) for name, x in own.items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    plain["groups"], plain["keys"] = repr(groups), list(map(id, optimizer.state))
    plain["random"] = random.getstate(), repr(np.random.get_state())
    tensors["random"] = torch.get_rng_state(), None
    return tensors, plain, hooks


def kept(value):
    """A tensor's object, class and bits."""
    if not isinstance(value, torch.Tensor):
        return value
    assert type(value) in (torch.Tensor, nn.Parameter), type(value)
    return type(value), value.requires_grad, value.detach().clone()


def equal_states(before, after):
    if isinstance(before, tuple) and isinstance(before[-1], torch.Tensor):
        return before[:2] == after[:2] and torch.equal(before[2], after[2])
    return before == after


def check(model, batch, inspect):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    loss = model(**batch) if isinstance(batch, dict) else model(batch)
    getattr(loss, "loss", loss).sum().backward()
    optimizer.step()
    tensors, plain, hooks = state(model, optimizer)
    bits = {name: tuple(map(kept, pair)) for name, pair in tensors.items()}
    inspect(model, optimizer, batch)
    now, *others = state(model, optimizer)
    assert others == [plain, hooks]
    assert list(now) == list(tensors)
    for name, pair in now.items():
        if name != "random":
            objects = zip(pair, tensors[name], strict=True)
            assert all(a is b or not isinstance(a, torch.Tensor) for a, b in objects), name
        assert all(map(equal_states, bits[name], map(kept, pair))), name
    assert type(angles(32)) is torch.Tensor  # what a cache of the user's holds


@pytest.mark.filterwarnings("ignore")  # of plans that compress little of such models
@pytest.mark.parametrize("inspection", INSPECTIONS)
@pytest.mark.parametrize("make", MODELS)
def test_an_inspection_changes_nothing(make, inspection):
    angles.cache_clear()
    check(make(), torch.randn(64, 32), INSPECTIONS[inspection])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inspection", INSPECTIONS)
def test_an_inspection_that_raises_changes_nothing(inspection):
    def fails(model, optimizer, batch):
        model[-1].fails = True
        with pytest.raises((RuntimeError, ValueError)):
            INSPECTIONS[inspection](model, optimizer, batch)
        del model[-1].fails

    check(everything(), torch.randn(64, 32), fails)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inspection", ["audit", "predict", "plan", "measure"])
def test_an_inspection_leaves_a_weight_that_a_hook_computes(inspection):
    model = Old()
    before = model.layer.weight_g
    INSPECTIONS[inspection](model, torch.optim.SGD(model.parameters()), torch.ones(4, 32))
    assert model.layer.weight_g is before
    assert not isinstance(model.layer.weight, torch._subclasses.FakeTensor)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inspection", INSPECTIONS)
def test_an_inspection_changes_no_family(inspection):
    families = pytest.importorskip("benchmarks.families")
    for name in families.FAMILIES:
        torch.manual_seed(0)
        case = families.FAMILIES[name]()
        batch = case.batch if isinstance(case.batch, dict) else case.batch[0]
        check(case.model, batch, INSPECTIONS[inspection])


def test_a_model_that_cannot_be_copied_is_named():
    model = nn.Linear(4, 4)
    model.source = (n for n in range(3))
    with pytest.raises(TypeError, match=r"Linear cannot be copied .*generator"):
        memtrain.audit(model, torch.ones(1, 4), optimizer=torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("name", ["audit", "estimate", "largest", "verify"])
def test_arguments_in_another_order_are_refused(name):
    model, x = nn.Linear(4, 4), torch.ones(1, 4)
    optimizer = torch.optim.SGD(model.parameters())
    inspect, more = getattr(memtrain, name), ["1GiB"] if name == "largest" else []
    order = r"allowed: \(model, batch, cfg\) in this order, with a torch.nn.Module, its input"
    with pytest.raises(TypeError, match=f"model is of type Tensor; {order}"):
        inspect(x, model, "balanced", *more)
    with pytest.raises(TypeError, match=f"batch is of type SGD; {order}"):
        inspect(model, optimizer, x, *more)
    with pytest.raises(TypeError, match=r"the batch is a str|cfg is a Tensor"):
        inspect(model, "balanced", x, *more)
    assert inspect(model, x, "balanced", *more)


def test_a_memory_in_another_position_is_refused():
    with pytest.raises(ValueError, match="memory='balanced' is not a size"):
        memtrain.largest(nn.Linear(4, 4), torch.ones(1, 4), "1GiB", "balanced")
