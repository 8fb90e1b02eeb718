"""Gradients released on a device whose numbers the host reads once a step, not once a parameter."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain.api import wrap
from memtrain.audit.peak.predict import predict
from memtrain.kernels.dispatch import backend
from memtrain.optim import AdamW4bit
from memtrain.optim.fused.sgd import SGD4bit
from memtrain.optim.wrappers import gradient_norms
from memtrain.optim.wrappers.release import ReleaseGradients
from memtrain.optim.wrappers.weights import SplitWeights
from tests.equality import differences

INNER = {
    "block": lambda p: AdamW4bit(p, lr=1e-2, min_elements=0, second="B128/Linear"),
    "rank1": lambda p: AdamW4bit(p, lr=1e-2, min_elements=0),
    "factored": lambda p: AdamW4bit(p, lr=1e-2, min_elements=0, second="factored"),
    "two bits": lambda p: AdamW4bit(
        p, lr=1e-2, min_elements=0, first="Lloyd-Max", second="factored"
    ),
    "sgd": lambda p: SGD4bit(p, lr=1e-2, momentum=0.9, dampening=0.5, min_elements=0),
    "exact": lambda p: AdamW4bit(p, lr=1e-2),
    "split": lambda p: SplitWeights(AdamW4bit(p, lr=1e-2, min_elements=0), "bf16+8"),
    "plain": lambda p: torch.optim.AdamW(p, lr=1e-2),
}
OPTIONS = {
    "finite": {},
    "parameter": {"clip": "parameter", "limit": 1e-2},
    "previous": {"clip": "previous", "limit": 1e-2},
    "two_pass": {"clip": "two_pass", "limit": 1e-2},
    "scaled": {"loss_scale": 1024.0},
    "accumulated": {"accumulate": 2, "clip": "parameter", "limit": 1e-2},
}


class Reads(TorchDispatchMode):
    """Counts what makes a host wait for its device, by the place in a step."""

    def __init__(self):
        super().__init__()
        self.found, self.place = Counter(), ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and self.place:
            self.found[self.place] += 1
        return func(*args, **(kwargs or {}))


def made(inner, options, width=16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 2, bias=False))
    optimizer = ReleaseGradients(INNER[inner](model.parameters()), **OPTIONS[options])
    return model, optimizer


def train(model, optimizer, reads, bad):
    """Three steps; where `bad`, a gradient of the first and of the last has an Inf."""
    scale, passes = optimizer.loss_scale, optimizer.accumulate
    dtype = model[0].weight.dtype
    for step in range(3):

        def closure(step=step):
            for k in range(passes):
                generator = torch.Generator().manual_seed(10 * step + k)
                x = torch.randn(4, 8, generator=generator).to(dtype)
                out = model(x).float()
                spoilt = model[2].weight.float().sum() * (torch.inf if step != 1 else 1.0)
                loss = scale * (out.square().mean() + (spoilt if bad else 0.0))
                reads.place = "backward"
                with reads:
                    loss.backward()

        closed = optimizer.clip == "two_pass"
        if not closed:
            closure()
        reads.place = "step"
        with reads:
            optimizer.step(closure if closed else None)
        reads.place = ""


def reported(model, optimizer):
    found = {"skipped": optimizer.skipped, "norm": optimizer.norm}
    states = [optimizer.state.get(p, {}) for p in model.parameters()]
    return found, [*model.parameters()], states


@pytest.fixture
def counts(monkeypatch):
    """Counters of steps lie on the host, so what they say is no wait: they are read elsewhere."""
    from memtrain.optim.fused.fused import FusedStates

    def turns(self, params):
        steps = [self._counter(param) for param in params]
        torch._foreach_add_(steps, 1)
        return [float(step.numpy()) for step in steps]

    counted = FusedStates._step_counts
    monkeypatch.setattr(
        FusedStates,
        "_step_counts",
        lambda self, p: turns(self, p) if self.counts else counted(self, p),
    )


QUICK = [("rank1", "finite", True), ("sgd", "parameter", True), ("plain", "finite", True)]
LONG = [(name, "finite", True) for name in INNER if name not in ("rank1", "plain")]
LONG += [("block", name, bad) for name in OPTIONS for bad in (False, True)]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.nightly) for case in LONG)]


@pytest.mark.filterwarnings("ignore:.*was skipped:RuntimeWarning")
@pytest.mark.parametrize(("inner", "options", "bad"), CASES)
def test_a_step_waits_once_and_does_the_same(inner, options, bad, monkeypatch, counts):
    reads, before, asked = Reads(), Reads(), []
    real = gradient_norms.read
    monkeypatch.setattr(
        gradient_norms, "read", lambda norms: asked.append(len(norms)) or real(norms)
    )
    ours, theirs = made(inner, options), made(inner, options)
    kernels = "reference" if inner == "plain" else "triton"
    with backend(kernels):
        train(*theirs, before, bad)
        monkeypatch.setattr(gradient_norms, "stays_pending", lambda norm: True)
        train(*ours, reads, bad)
    assert differences(reported(*ours), reported(*theirs)) == []
    closed = options == "two_pass"
    assert before.found["backward"] >= 9  # one a parameter
    assert ours[1].skipped == (2 if bad else 0)
    waits = 3 if not closed else 4 if bad else 6  # a second pass follows where all is finite
    assert [n for n in asked if n] == [3] * waits
    if inner != "plain":
        assert not reads.found


@pytest.mark.filterwarnings("ignore:.*was skipped:RuntimeWarning")
def test_sgd_without_momentum_skips_a_gradient_that_is_not_finite(monkeypatch):
    monkeypatch.setattr(gradient_norms, "stays_pending", lambda norm: True)
    weight = nn.Parameter(torch.ones(4))
    optimizer = ReleaseGradients(SGD4bit([weight], lr=0.5))
    (weight * torch.tensor([1.0, torch.inf, 1.0, 1.0])).sum().backward()
    optimizer.step()
    assert weight.tolist() == [1.0] * 4
    assert optimizer.skipped == 1


@pytest.mark.parametrize("shape", [(37, 5), (185,), (5, 37, 3)], ids=str)
def test_norms_of_16_bit_gradients_are_added_up_in_pieces(monkeypatch, shape):
    """Integers: each piece's sum of squares is exact, its root and their sum's are rounded."""
    grad = torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = float(grad.double().norm())
    monkeypatch.setattr(gradient_norms, "PIECE", 64)
    for own in (grad, grad.mT.contiguous().mT if grad.dim() > 1 else grad):
        assert gradient_norms.norm_of(own) == pytest.approx(exact, rel=4 * 2**-24)
    grad.view(-1)[-1] = torch.inf
    assert gradient_norms.norm_of(grad) == torch.inf


def test_a_16_bit_gradients_norm_takes_no_copy_of_it():
    """Of 8 M elements a float32 copy would be 32 MiB; a piece's is 16."""
    model = nn.Linear(4096, 2048, bias=False, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters())
    batch = torch.ones(1, 4096, dtype=torch.bfloat16)
    timeline = predict(model, optimizer, batch, ["preset=all_four", "weights=keep"])
    grad = model.weight.nbytes
    most = max(m.parts.get("temporaries", 0) for m in timeline.moments if m.phase == "backward")
    assert most < 1.1 * grad  # 16 MiB, and the scalars of a step


def test_the_gradient_of_a_head_above_512_mib_is_multiplied_once():
    """Its norm, which NaN and Inf are found by, reads the gradient that the step takes."""
    model, products = nn.Linear(1, 1, bias=False), []
    model.weight = nn.Parameter(torch.zeros(131_073, 2048, dtype=torch.bfloat16))

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.mm.default:
                products.append(len(args[0]) * args[1].shape[1])
            return function(*args, **(kwargs or {}))

    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-7)
    model, optimizer = wrap(model, optimizer, ["preset=all_four", "weights=keep"])
    with Recorded():
        model(torch.ones(2, 2048, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    assert products == [2 * 131_073, 131_073 * 2048]
    assert (model.weight == -(2.0**-6)).all()
    assert optimizer.norm == pytest.approx(2 * (131_073 * 2048) ** 0.5)
