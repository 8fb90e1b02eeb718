"""Optimizers of others: parameters may be coupled, and states may mean other things."""

import copy

import pytest
import torch
from torch import nn

import memtrain
from memtrain import optim
from memtrain.compressors import Identity
from memtrain.optim import Choice, ReleaseGradients, compress
from memtrain.optim.states.known_optimizers import SEPARABLE, UNTESTED, is_separable, is_tested
from memtrain.plan.plan import make_plan


class Coupled(torch.optim.Optimizer):
    """Momentum, with a step size from the norm of all gradients, and a sum over all of them."""

    key = "momentum_buffer"

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "total": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ready = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        square = sum(p.grad.square().sum() for _, p in ready)
        self.param_groups[0]["total"] += float(square)
        self.state["shared"]["steps"] = self.state["shared"].get("steps", 0) + 1
        self.state["k"] = self.state.get("k", torch.zeros(1)) + 1
        for group, p in ready:
            state = self.state[p]
            if not state:
                state[self.key] = torch.zeros_like(p)
            state[self.key].mul_(0.9).add_(p.grad / (1 + self.param_groups[0]["total"]))
            p.sub_(group["lr"] / self.state["k"].sqrt() * state[self.key])
        return loss


class Numbered(Coupled):
    """Has a number for a state's name, as heavyball's optimizers do."""

    key = 0


class ScheduleFree(Coupled):
    """Swaps weights by a state, as schedule-free optimizers do for evaluation."""

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(self.state[p]["momentum_buffer"])

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p]["momentum_buffer"])


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def groups(model):
    return [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]


def train(model, optimizer, steps=5, closure=False):
    losses = []
    for k in range(steps):
        torch.manual_seed(k)
        x = torch.randn(32, 64)

        def loss_of(x=x):
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            loss.backward()
            return loss

        if closure:
            losses.append(optimizer.step(loss_of).item())
            continue
        losses.append(loss_of().item())
        optimizer.step()
    return losses


def test_every_separable_class_of_torch_is_known_and_no_other():
    classes = {
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert classes - SEPARABLE == {torch.optim.Optimizer, torch.optim.LBFGS}


@pytest.mark.parametrize("kind", sorted(SEPARABLE - {torch.optim.SparseAdam}, key=str))
def test_separable_classes_step_alone_as_together(kind):
    def run(alone):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(3, 4)) for _ in range(4)]
        optimizers = [kind([p]) for p in params] if alone else [kind(params)]
        for k in range(4):
            for p in params:
                p.grad = torch.randn(3, 4, generator=torch.Generator().manual_seed(k))
            for optimizer in optimizers:
                optimizer.step()
        return params

    for one, other in zip(run(True), run(False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("cls", [Coupled, Numbered, ScheduleFree])
def test_exact_is_exact(cls, closure):
    plain, model = make(), make()
    reference = cls(groups(plain))
    _, optimizer = memtrain.wrap(model, cls(groups(model)), "exact")
    assert not is_separable(optimizer)
    expected = train(plain, reference, closure=closure)
    assert train(model, optimizer, closure=closure) == expected
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    assert optimizer.param_groups[0]["total"] == reference.param_groups[0]["total"] > 0
    other = make()
    _, resumed = memtrain.wrap(other, cls(groups(other)), "exact")
    train(other, resumed, 1)  # what it counts goes: the checkpoint has another count
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(other, resumed) == train(plain, reference)
    _, original = memtrain.unwrap(other, resumed)
    assert original.state["shared"] == {"steps": 10}
    assert train(other, original) == train(plain, reference)


class WithTables(torch.optim.Optimizer):
    """Momentum; the first step moves a table to its parameters' device, as bitsandbytes does."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "turn": torch.zeros(1)})
        self.tables, self.turns = {"rates": [torch.tensor([0.5, 0.25])]}, torch.zeros(1)

    @torch.no_grad()
    def step(self, closure=None):
        self.turns += 1
        for group in self.param_groups:
            group["turn"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    self.tables["rates"][0] = rates = self.tables["rates"][0].to(p.device)
                    buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    buffer.mul_(rates[1]).add_(p.grad)
                    turns = (self.turns + group["turn"]).to(p.device)
                    p.sub_(group["lr"] * rates[0] / turns * buffer)


@pytest.mark.filterwarnings("ignore:.*stay exact:RuntimeWarning")
@pytest.mark.parametrize("preset", ["exact", "optimizer_only"])
def test_planning_changes_nothing_of_an_optimizer(preset):
    plain, model = make(), make()
    reference = WithTables(groups(plain))
    _, optimizer = memtrain.wrap(model, WithTables(groups(model)), preset)
    assert train(model, optimizer) == train(plain, reference)


class TwoReasons(Coupled):
    """A state of a known name, and one that no rule names."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("shadow", torch.zeros_like(p)).add_(p)


def test_an_unknown_optimizer_is_one_warning():
    def run():
        model = make()
        train(*memtrain.wrap(model, TwoReasons(groups(model)), "optimizer_only"))

    with pytest.warns(RuntimeWarning, match="TwoReasons stay exact") as found:
        run()
    assert len(found) == 1


def asked(state):
    """The user's own rule, which holds for any optimizer."""
    rule = {"state": state, "compressor": "B128/DE"}
    return {"preset": "optimizer_only", "optim": {"exceptions": [rule]}}


class Logarithms(torch.optim.Adam):
    """Adam's names for other things: the second state holds logarithms, which are negative."""

    separable = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.full_like(p, -20.0))
                state["exp_avg"].lerp_(p.grad, 0.1)
                square = state["exp_avg_sq"].exp().lerp(p.grad.square(), 0.01)
                state["exp_avg_sq"].copy_(square.log())
                p.addcdiv_(state["exp_avg"], square.sqrt() + 1e-8, value=-1e-3)


def test_states_of_an_unknown_optimizer_stay_exact_and_are_reported():
    plain, model = make(), make()
    expected = train(plain, Logarithms(plain.parameters()))
    with pytest.warns(RuntimeWarning, match="^7.91 bytes per .* of Logarithms stay exact"):
        _, optimizer = memtrain.wrap(model, Logarithms(model.parameters()), "optimizer_only")
    assert train(model, optimizer) == expected  # and warns no more
    rows = [row for row in optim.describe(optimizer) if row.param.dim() == 2]
    assert {(row.compressor, row.reason) for row in rows} == {(Identity(), UNTESTED.reason)}
    plan = memtrain.plan_of(model)
    kept = {entry.planned for entry in plan.entries("state") if entry.reason == UNTESTED.reason}
    assert kept == {4 * 64 * 128}
    again = make_plan(plain, Logarithms(plain.parameters()), plan)  # as loaded from a file
    assert {e.planned for e in again.entries("state")} >= kept


def test_compress_and_predict_keep_the_states_of_an_unknown_optimizer():
    model = make()
    plain = Logarithms(model.parameters())
    train(model, plain, 1)
    assert {row.reason for row in optim.predict(plain) if row.param.dim() == 2} == {UNTESTED.reason}
    state = compress(plain).state[model[0].weight]
    assert all(isinstance(value, torch.Tensor) for value in state.values())


def test_a_rule_of_the_user_compresses_states_of_an_unknown_optimizer():
    model = make()
    with pytest.warns(RuntimeWarning, match="^3.95 bytes per parameter of states of Logarithms"):
        _, optimizer = memtrain.wrap(model, Logarithms(model.parameters()), asked("exp_avg"))
    train(model, optimizer, 1)
    state = optimizer.state[model[0].weight]
    assert isinstance(state["exp_avg"], dict)
    assert isinstance(state["exp_avg_sq"], torch.Tensor)


def test_states_of_unknown_bytes_are_reported_without_them():
    model = make()
    with pytest.warns(RuntimeWarning, match=r"^states of Coupled stay exact"):
        _, optimizer = memtrain.wrap(model, Coupled(groups(model)), "optimizer_only")
    train(model, optimizer, 2)  # and warns no more


@pytest.mark.parametrize("cfg", [asked("momentum_buffer"), ["weights=bf16+16", "optim=identity"]])
def test_compressed_it_follows(cfg):
    plain, model = make(), make()
    _, optimizer = memtrain.wrap(model, Coupled(groups(model)), cfg)
    reference = Coupled(groups(plain))
    losses, expected = train(model, optimizer, 20), train(plain, reference, 20)
    assert losses[0] - losses[-1] > 0.9 * (expected[0] - expected[-1])
    total = reference.param_groups[0]["total"]
    assert optimizer.param_groups[0]["total"] == pytest.approx(total, rel=0.05)


def test_states_that_a_step_leaves_alone_are_not_rounded_again():
    model = make()
    optimizer = compress(Coupled(groups(model)), Choice())
    train(model, optimizer, 2)
    before = copy.deepcopy(optimizer.state[model[2].weight]["momentum_buffer"])
    optimizer.zero_grad()
    model[0](torch.randn(8, 64)).sum().backward()  # nothing for the second group
    optimizer.step()
    after = optimizer.state[model[2].weight]["momentum_buffer"]
    assert isinstance(after, dict)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_train_and_eval_reach_the_inner_optimizer():
    model = make()
    _, optimizer = memtrain.wrap(model, ScheduleFree(groups(model)), asked("momentum_buffer"))
    train(model, optimizer, 3)
    weight = model[0].weight.detach().clone()
    momentum = optimizer.unpacked(model[0].weight)["momentum_buffer"]
    optimizer.eval()
    assert torch.equal(model[0].weight, weight + momentum)
    optimizer.train()
    assert torch.allclose(model[0].weight, weight, atol=1e-6)
    assert isinstance(optimizer.state[model[0].weight]["momentum_buffer"], dict)
    plain = make()
    with pytest.warns(RuntimeWarning, match=r"^states of Coupled stay exact"):
        assert not hasattr(memtrain.wrap(plain, Coupled(groups(plain)))[1], "train")


def test_what_needs_parameters_one_by_one_is_refused_before_anything_changes():
    model = make()
    with pytest.raises(ValueError, match=r"Coupled may read all gradients .*gradients=keep"):
        memtrain.wrap(model, Coupled(groups(model)), "all_four")
    with pytest.raises(ValueError, match="Coupled may read all gradients"):
        ReleaseGradients(Coupled(groups(model)))
    with pytest.raises(ValueError, match=r"has train\(\) and eval\(\).*weights=keep"):
        memtrain.wrap(model, ScheduleFree(groups(model)), ["weights=bf16+8"])
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not hasattr(model, "_memtrain")


def test_a_subclass_says_that_it_is_separable():
    class Mine(torch.optim.SGD):
        separable = True

    class Other(torch.optim.SGD): ...

    model = make()
    assert not is_separable(compress(Other(model.parameters())))
    assert is_separable(compress(Mine(model.parameters())))
    memtrain.wrap(model, Mine(model.parameters(), lr=0.1), "all_four")


def test_a_class_that_bears_the_name_of_a_tested_one_is_not_tested():
    class Lion(torch.optim.Optimizer):
        def step(self):
            """Nothing."""

    Lion.__module__, Lion.__qualname__ = optim.Lion.__module__, optim.Lion.__qualname__
    weight = torch.nn.Parameter(torch.ones(2))
    assert is_tested(optim.Lion([weight]))
    assert not is_tested(Lion([weight], {}))
