"""Identical blocks are run three times at most; the rest of the step is theirs, shifted."""

import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memtrain.activations.trace import fake_forward, repeats
from memtrain.activations.trace.repeats import repeated_blocks
from memtrain.audit.peak import StepOptions, unfold
from memtrain.audit.peak.predict import predict
from memtrain.plan.plan import make_plan
from memtrain.planner import cost_model
from tests.planner.nets import Block, Net

X = torch.ones(64, 32)
KEEP_ONE = {"exceptions": [{"module": "h.4.*", "compressor": "keep"}]}
CONFIGS = {
    "plain": None,
    "balanced": "balanced",
    "released": {"preset": "balanced", "gradients": "release"},
    "all four": {"preset": "all_four"},
    "recomputed": {"preset": "balanced", "activations": {"recompute": ["h.[0-3]"]}},
    "one otherwise": {"preset": "balanced", "activations": KEEP_ONE},
    "states otherwise": {
        "preset": "balanced",
        "optim": {"exceptions": [{"parameter": "h.5.*", "compressor": "keep"}]},
    },
}


class Skips(Net):
    """Its last layer reads what every block gave."""

    def forward(self, x):
        x = self.first(x)
        seen = []
        for block in self.h:
            x = block(x)
            seen.append(x.exp())
        return self.last(sum(seen))


class Checkpoints(Net):
    """Every second block is checkpointed."""

    def forward(self, x):
        x = self.first(x)
        for place, block in enumerate(self.h):
            x = checkpoint(block, x, use_reentrant=False) if place % 2 else block(x)
        return self.last(x)


class Taps(Net):
    """What one block gives is kept, and normed."""

    def forward(self, x):
        x, taps = self.first(x), []
        for place, block in enumerate(self.h):
            x = block(x)
            if place == 3:
                taps.append(nn.functional.layer_norm(x.tanh(), x.shape[-1:]))
        return self.last(x) + sum(taps).sum()


class Repeats(Net):
    """One of its blocks runs twice."""

    def forward(self, x):
        x = self.first(x)
        for place in (0, 1, 2, 2, 3, 4, 5):
            x = self.h[place](x)
        return self.last(x)


class Shrinks(Net):
    """Its blocks have as many weights each, and half as many rows as the one before."""

    def forward(self, x):
        x = self.first(x)
        for block in self.h:
            x = block(x[: len(x) // 2])
        return self.last(x)


def made(kind, depth=6):
    torch.manual_seed(0)
    model = kind(depth)
    return model, torch.optim.AdamW(model.parameters())


@pytest.fixture
def whole(monkeypatch):
    """Calls a function with no run of blocks found."""

    def call(run):
        with monkeypatch.context() as patch:
            predicting = sys.modules[predict.__module__]
            for module in (fake_forward, predicting):
                patch.setattr(module, "foldable_blocks", lambda model, batch: [])
            return run()

    return call


def timeline(kind, cfg, device="cpu"):
    """As of a second call: tables of codes are made at the first one."""
    model, optimizer = made(kind)
    options = StepOptions(device=device)
    predict(model, optimizer, X, cfg, options)
    return predict(model, optimizer, X, cfg, options)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name in ("balanced", "released")))
        for name in CONFIGS
    ],
)
def test_the_timeline_is_that_of_a_step_through_all_blocks(name, device, whole):
    exact = whole(lambda: timeline(Net, CONFIGS[name], device))
    assert timeline(Net, CONFIGS[name], device) == exact


@pytest.mark.filterwarnings("ignore:the plan compresses:RuntimeWarning")  # checkpoints' inputs
@pytest.mark.parametrize("kind", [Skips, Shrinks, Checkpoints, Taps, Repeats])
def test_blocks_that_differ_in_what_they_are_given_are_all_run(kind, whole):
    assert timeline(kind, "balanced") == whole(lambda: timeline(kind, "balanced"))
    model, optimizer = made(kind)
    plan = make_plan(model, optimizer, "balanced")
    assert plan.trace(model, X) == whole(lambda: plan.trace(model, X))


@pytest.mark.parametrize("name", ["balanced", "recomputed", "one otherwise"])
def test_the_records_are_those_of_a_forward_through_all_blocks(name, whole):
    model, optimizer = made(Net)
    plan = make_plan(model, optimizer, CONFIGS[name])
    assert plan.trace(model, X) == whole(lambda: plan.trace(model, X))
    assert [len(model.h), len(list(model.h.children()))] == [6, 6]


def test_the_work_of_a_forward_is_that_of_its_blocks_and_of_the_rest():
    model, _ = made(Net)
    paths = [f"h.{k}" for k in range(6)]
    found = cost_model.measure_forward(model, X, paths)
    assert len(found) == 7
    assert len({work.flops for path, work in found.items() if path}) == 1
    both = model.first.in_features + model.last.out_features
    flops = 6 * found["h.0"].flops + 2 * len(X) * model.first.out_features * both
    assert found[""].flops == flops


def test_two_blocks_of_a_run_are_run_twice_and_then_three(monkeypatch):
    model, optimizer = made(Net)
    calls = []
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: calls.append(1) or forward(self, x))
    predict(model, optimizer, X)
    assert len(calls) == 2 + 2 + repeats.KEPT


def test_blocks_are_one_run_where_only_their_weights_differ():
    model, _ = made(Net)
    assert [run.paths for run in repeated_blocks(model)] == [tuple(f"h.{k}" for k in range(6))]
    model.h[1].drop.p = 0.5
    assert [run.paths for run in repeated_blocks(model)] == [tuple(f"h.{k}" for k in range(2, 6))]
    model.h[3].register_forward_hook(lambda *_: None)
    assert repeated_blocks(model) == []
    model, _ = made(Net)
    for place, block in enumerate(model.h):
        block.place = place
    assert len(repeated_blocks(model)) == 1
    model.h[2].up.weight = model.h[1].up.weight  # tied
    assert repeated_blocks(model) == []
    assert repeated_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU())) == []


def test_released_gradients_of_half_precision_weights_are_predicted():
    """Eight parameters are stepped one by one: no sample of them is compared."""
    model, optimizer = made(Net, 3)
    model.bfloat16()
    cfg = {"preset": "all_four", "weights": "keep"}
    assert predict(model, optimizer, X.bfloat16(), cfg).peak.nbytes


class Noting(Net):
    """Notes the blocks that its forward passes through."""

    ran = None

    def forward(self, x):
        self.ran = [*self.h]
        return super().forward(x)


class Preconditioned(torch.optim.SGD):
    """Reads what the forward has noted of each block, halfway through a step."""

    def __init__(self, model, needs):
        super().__init__(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.needs, self.stepping = model, needs, False

    def step(self, closure=None):
        if self.stepping:
            raise RuntimeError("the step before has not ended")
        self.stepping = True
        super().step(closure)
        if self.model.ran is not None and len(self.model.ran) < self.needs:
            raise KeyError(f"{self.needs} blocks")
        self.stepping = False


def test_a_step_that_fails_without_all_blocks_is_begun_anew_on_new_copies(whole):
    model = Noting(6)
    optimizer = Preconditioned(model, 6)
    assert predict(model, optimizer, X) == whole(lambda: predict(model, optimizer, X))
    assert not optimizer.stepping
    with pytest.raises(KeyError, match="7 blocks"):  # the model's own, not the half-done step's
        predict(model, Preconditioned(model, 7), X)


@pytest.mark.parametrize("where", [(fake_forward, "expanded"), (unfold.FoldedRecorder, "unfolded")])
def test_only_what_runs_without_all_blocks_may_fail(where, monkeypatch):
    model, optimizer = made(Net)
    own, calls = getattr(*where), []

    def broken(*args):
        calls.append(1)
        return 1 / 0 if len(calls) == 1 else own(*args)

    monkeypatch.setattr(*where, broken)
    plan = make_plan(model, optimizer, "balanced")
    with pytest.raises(ZeroDivisionError):
        plan.trace(model, X) if where[0] is fake_forward else predict(model, optimizer, X)
