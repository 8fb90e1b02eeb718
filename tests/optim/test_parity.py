"""Identity everywhere is bit-identical for every torch optimizer; round trips lose nothing."""

import pytest
import torch
from torch import nn

from memtrain.compressors import Identity
from memtrain.optim import CompressedOptimizer, SGD4bit, compress, restore, state_bytes

CASES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "adafactor-maximize": lambda p: torch.optim.Adafactor(p, maximize=True, weight_decay=0.1),
    "adadelta-maximize": lambda p: torch.optim.Adadelta(p, maximize=True, weight_decay=0.1),
    "adagrad-decay": lambda p: torch.optim.Adagrad(p, lr_decay=0.1, weight_decay=0.1),
    "nadam-decoupled": lambda p: torch.optim.NAdam(p, decoupled_weight_decay=True),
    "radam-decoupled": lambda p: torch.optim.RAdam(p, decoupled_weight_decay=True),
    "sgd-dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=0.01),
}


def keep(param, name):
    return Identity()


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 2))


def train(net, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 20, generator=generator)
        optimizer.zero_grad()
        (net(x) - 1).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_taken_over_and_given_back_in_mid_run(make):
    ours = model()
    original = make(ours.parameters())
    train(ours, original, 2)
    b = compress(original, keep, min_elements=0)
    train(ours, b, 2)
    assert restore(b) is original
    train(ours, original, 2)
    # the data restarts with each call of train: do the same to the plain one
    twin = model()
    c = make(twin.parameters())
    for _ in range(3):
        train(twin, c, 2)
    for x, y in zip(twin.parameters(), ours.parameters(), strict=True):
        assert torch.equal(x, y)


def test_lbfgs_is_refused_with_the_reason():
    with pytest.raises(TypeError, match="one vector over all parameters"):
        compress(torch.optim.LBFGS(model().parameters()))


def test_compressing_twice_is_refused():
    with pytest.raises(TypeError, match="already"):
        compress(compress(torch.optim.AdamW(model().parameters())))


def test_scheduler_made_before_keeps_working():
    net = model()
    original = torch.optim.AdamW(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(original, gamma=0.5)
    optimizer = compress(original, min_elements=100)
    train(net, optimizer, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert restore(optimizer).param_groups[0]["lr"] == 0.25


class Counting(torch.optim.Optimizer):
    """Advances an option of its group once a step, as schedule-free optimizers do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "k": 0})

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                p.data.sub_(self.state[p]["sum"], alpha=group["lr"] / group["k"])


def test_an_option_that_a_step_advances_moves_once_a_step():
    def run(wrap):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(80, 80)) for _ in range(3)]
        optimizer = Counting(params)
        if wrap:
            optimizer = CompressedOptimizer(optimizer, lambda param, state: Identity())
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(80, 80)
            optimizer.step()
        return params, optimizer.param_groups[0]["k"]

    (plain, k), (wrapped, k_wrapped) = run(wrap=False), run(wrap=True)
    assert k == k_wrapped == 3
    assert all(torch.equal(a, b) for a, b in zip(plain, wrapped, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "maximize": True}])
def test_sgd_without_momentum_gives_torchs_bits(options, dtype):
    ours = nn.Parameter(torch.randn(90, 70).to(dtype))
    theirs = nn.Parameter(ours.detach().clone())
    optimizer, plain = SGD4bit([ours], lr=0.1, **options), torch.optim.SGD([theirs], 0.1, **options)
    for _ in range(3):
        ours.grad = torch.randn(90, 70).to(dtype)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        plain.step()
    assert torch.equal(ours, theirs)
    assert state_bytes(optimizer) == 0
