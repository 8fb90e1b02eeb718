"""Checkpoints of other optimizers: they give torch's step, or loading them changes nothing."""

import copy
from functools import cache

import pytest
import torch
from torch import nn

from memtrain.optim import portable_state_dict
from tests.equality import equal
from tests.optim.torch_inputs import NAMES, kind, make, plain

OPTIONS = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "CompressedOptimizer(Adam)": {"amsgrad": True},
}
COMPRESSED = [n for n in NAMES if n != "Lion" and kind(n) not in ("LBFGS", "SparseAdam")]
ADAMS = ("Adam", "AdamW", "NAdam", "RAdam")  # states with one meaning; NAdam needs a third one


def built(by, name, weight):
    return by(name, [weight], **{"lr": 1e-3, **OPTIONS.get(name, OPTIONS.get(kind(name), {}))})


def stepped(optimizer, weight):
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()


@cache
def checkpoints(name, steps):
    """The checkpoint of an optimizer after some steps, and the portable one."""
    weight = nn.Parameter(torch.ones(80, 64))
    optimizer = built(make, name, weight)
    for _ in range(steps):
        stepped(optimizer, weight)
    return optimizer.state_dict(), portable_state_dict(optimizer)


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_checkpoint_of_another_optimizer_gives_torchs_step_or_is_refused(name, steps):
    taken, refused = set(), []
    for other in COMPRESSED:
        weight, theirs = (nn.Parameter(torch.ones(80, 64)) for _ in range(2))
        optimizer, torchs = built(make, name, weight), built(plain, name, theirs)
        stepped(optimizer, weight)
        theirs.data.copy_(weight)
        saved, portable = copy.deepcopy(checkpoints(other, steps))
        before = copy.deepcopy(optimizer.state_dict())
        try:
            optimizer.load_state_dict(saved)
        except ValueError as error:
            refused.append(str(error))
            assert equal(optimizer.state_dict(), before)
            continue
        taken.add(kind(other))
        if torchs.state and not saved["state"]:
            continue  # torch 2.11's Adagrad creates its states in __init__ and requires them
        # A checkpoint lacks the options that only the other optimizer has.
        portable["param_groups"] = [torchs.defaults | one for one in portable["param_groups"]]
        torchs.load_state_dict(portable)
        stepped(optimizer, weight)
        stepped(torchs, theirs)
        # A dozen float32 operations on weights below 2.
        torch.testing.assert_close(weight, theirs, rtol=0, atol=12 * 2.0**-23)
    assert all("allowed: " in why or "portable_state_dict" in why for why in refused)
    assert kind(name) in taken
    if steps:
        assert taken <= {*(ADAMS if kind(name) in ADAMS else (kind(name), "SGD", "Muon"))}
    else:
        assert ("Adafactor" in taken) == ("eps" not in torchs.defaults or kind(name) == "Adafactor")
