"""Every combination of `allow`: a plan that fits, or a refusal whose own advice holds."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.predict import predict
from memtrain.cli.models.build_model import build
from memtrain.cli.models.named_models import NAMED_MODELS
from memtrain.cli.models.request import Request
from memtrain.planner import ALLOWED, DoesNotFit, Fit, Goal, fit, search

EVERY = [names for n in range(5) for names in itertools.combinations(ALLOWED, n)]
SOME = [("release",), ("quantise", "recompute"), ("recompute", "release", "weights")]
"""Each name is allowed in one of these and refused in another."""
DEPTHS = ("n_layer", "n_layers", "num_layers", "num_decoder_layers", "num_hidden_layers")


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList([nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))])

    def forward(self, x):
        return self.h[0](x)


@pytest.fixture(autouse=True)
def traced_once(monkeypatch):
    """Combinations that differ in what is done to weights and gradients share their forwards."""
    real, known = search.gather, {}

    def gather(model, optimizer, config, batch, goal, progress):
        key = str(config), "quantise" in goal.names, "recompute" in goal.names
        if key not in known:
            known[key] = real(model, optimizer, config, batch, goal, progress)
        return known[key]

    monkeypatch.setattr(search, "gather", gather)


def outcomes(model, optimizer, batch, goal, combinations, share):
    """Plan each combination for a share of plain's peak, and those that refusals advise."""
    known = {}
    size = int(share * predict(model, optimizer, batch, None, goal.options).needed.nbytes)

    def outcome(names):
        if names not in known:
            try:
                known[names] = fit(model, optimizer, batch, size, goal=replace(goal, allow=names))
            except DoesNotFit as error:
                known[names] = error
        found = known[names]
        if isinstance(found, Fit):
            assert found.peak.nbytes <= size
            assert set(used(found)) <= set(names)
        else:
            assert found.smallest.nbytes > size
        return found

    for names in combinations:
        advised = advice(outcome(names))
        assert len(advised) == (isinstance(known[names], DoesNotFit) and names != ALLOWED)
        for other in advised:
            assert not advice(outcome(other))
    return {names: type(known[names]) for names in combinations}


def advice(refused):
    """The names that a refusal advises to allow."""
    lines = refused.help if isinstance(refused, DoesNotFit) else ()
    found = [line.split()[0] for line in lines if line.startswith("allow=")]
    return [tuple(line.removeprefix("allow=").split(",")) for line in found]


def used(found):
    """The names that a plan makes use of."""
    config = found.plan.config
    if not (found.chosen.keys() <= {"keep", "recompute"} and found.states == "torch"):
        yield "quantise"
    if config.activations.recompute:
        yield "recompute"
    if config.gradients != "keep":
        yield "release"
    if config.weights != "keep":
        yield "weights"


@pytest.mark.parametrize("combinations", [SOME, pytest.param(EVERY, marks=pytest.mark.nightly)])
def test_what_is_allowed_is_planned_or_refused_for_its_bytes(combinations):
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    goal = Goal()
    found = outcomes(model, optimizer, torch.zeros(64, 64), goal, combinations, 0.65)
    assert {*found.values()} == {Fit, DoesNotFit}


@pytest.mark.parametrize(
    "names", [("weights",), pytest.param(("release", "weights"), marks=pytest.mark.nightly)]
)
def test_what_plain_pytorch_fits_into_is_not_refused(names):
    """Float32 states, which go with float32 masters of bfloat16 weights, are larger than its."""
    model = Blocks().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    batch, goal = torch.zeros(8, 64, dtype=torch.bfloat16), Goal()
    assert outcomes(model, optimizer, batch, goal, [names], 1.0) == {names: Fit}


def shallow(name):
    """A named model in its own width, with a block of each kind."""
    import transformers

    own = NAMED_MODELS[name]
    keys = getattr(transformers, own.config)().to_dict()
    options = {**own.options, **{key: 1 for key in DEPTHS if isinstance(keys.get(key), int)}}
    if "depths" in keys:
        options = {key: x for key, x in options.items() if key not in DEPTHS}
        options["depths"] = [1] * len(keys["depths"])
    if "depth_coefficient" in keys:
        options["depth_coefficient"] = 0.1
    return replace(own, options=options)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMED_MODELS)
def test_every_combination_is_planned_for_every_named_model(name, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setitem(NAMED_MODELS, name, own := shallow(name))
    dtype = "bfloat16" if own.task == "CausalLM" else "float32"
    seq = {} if own.task == "ImageClassification" else {"seq": 256}
    built = build(Request(model=name, batch=4, dtype=dtype, **seq))
    # A context of 512 MiB is most of what a model of one layer needs, and no plan makes it smaller.
    goal = Goal(options=StepOptions(device="cuda", context=0))
    found = outcomes(*built, goal, EVERY, 0.6)
    assert found[ALLOWED] is Fit
