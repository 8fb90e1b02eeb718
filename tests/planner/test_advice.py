"""What a refusal advises: when it is done, a plan fits, or is refused for another reason."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from memtrain.audit.peak import Moment
from memtrain.planner import ALLOWED, DoesNotFit, Fit, Goal, fit
from memtrain.planner.advice import advice
from tests.planner.nets import Net, X

PLAIN = Goal()
EVERYTHING = replace(PLAIN, allow=ALLOWED)
TAKEN = {"a batch of": "batch", "sequences of": "seq", "allow=": "allow"}


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.net, self.head = nn.Embedding(128, 32), Net(2), nn.Linear(8, 128)

    def forward(self, input_ids):
        return self.head(self.net(self.embed(input_ids)))


def maps():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1),
        nn.ReLU(), nn.Flatten(), nn.Linear(64 * 256, 10),
    )  # fmt: skip


TOKENS = {"input_ids": torch.zeros(1, 256, dtype=torch.long)}
CASES = {
    "temporaries": (lambda: Net(2), X, "1.5MB", PLAIN, {"batch", "allow"}),
    "weights": (lambda: Net(2), X, "300KB", PLAIN, {"allow"}),
    "one sample of text": (Text, TOKENS, "450KB", EVERYTHING, {"seq"}),  # of 400 no length fits
    "maps": (maps, torch.zeros(8, 3, 32, 32), "4MB", PLAIN, {"batch", "allow"}),
}


def outcome(model, batch, size, goal):
    """The plan, or the refusal."""
    torch.manual_seed(0)
    model = model()
    try:
        return fit(model, torch.optim.AdamW(model.parameters()), batch, size, goal=goal)
    except DoesNotFit as error:
        return error


def taken(line, model, batch, size, goal):
    """What comes of a line of advice; None of one about other machines."""
    found = re.match(r"(a batch of|sequences of|allow=) ?(\S+)", line)
    if found is None:
        assert "sharded over" in line
        return None
    what, value = TAKEN[found[1]], found[2]
    if what == "allow":
        goal = replace(goal, allow=value.split(","))
    else:
        part = (slice(int(value)),) if what == "batch" else (slice(None), slice(int(value)))
        shorter = {name: x[part] for name, x in batch.items()} if what == "seq" else batch[part]
        batch = shorter
    return what, outcome(model, batch, size, goal)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_advice_that_is_taken_ends_the_refusal(name):
    *case, expected = CASES[name]
    refusal = outcome(*case)
    assert isinstance(refusal, DoesNotFit)
    seen = set()
    for line in refusal.help:
        done = taken(line, *case)
        if done is None:
            continue
        what, result = done
        seen.add(what)
        if what != "allow":  # sizes were tried before they were advised
            assert isinstance(result, Fit), (line, result)
        if isinstance(result, DoesNotFit):
            assert not any(other.startswith("allow=") for other in result.help)
    assert seen == expected


def test_sizes_that_cannot_be_tried_are_listed_with_the_reason_and_a_bug_is_raised():
    goal, moment = Goal(), Moment("step", "step", 100, {"weights": 10, "inputs": 90})

    def one_size_only(what, most):
        raise ValueError("labels have 4 rows")

    lines = advice(60, moment, torch.ones(4, 2), goal, one_size_only)
    assert lines[0] == "a smaller batch could not be tried: labels have 4 rows"
    with pytest.raises(ZeroDivisionError):
        advice(60, moment, torch.ones(4, 2), goal, lambda what, most: 1 // 0)
