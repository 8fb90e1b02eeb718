"""How often Python functions of memtrain are called in a training step: that may not grow.

The calls of a layer are what three layers make more than two.
"""

import sys
import time
from pathlib import Path

import pytest

import memtrain
from benchmarks.host import Step

HOME = str(Path(memtrain.__file__).parent)


def calls(run):
    """What `run` returns, and the calls of memtrain's functions that it makes."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(HOME)

    sys.setprofile(profile)
    try:
        return run(), count
    finally:
        sys.setprofile(None)


def of_layers(layers):
    step = Step("balanced", layers=layers, width=64)
    for _ in range(3):  # the first forward records
        step.run(time.process_time)
    loss, forward = calls(lambda: step.model(input_ids=step.x, labels=step.x).loss)
    _, backward = calls(loss.backward)
    _, update = calls(step.optimizer.step)
    return {"forward": forward, "backward": backward, "step": update}


@pytest.fixture(scope="module")
def of_a_layer():
    two, three = of_layers(2), of_layers(3)
    return {part: three[part] - two[part] for part in two}


@pytest.mark.parametrize(("part", "most"), [("forward", 860), ("backward", 233), ("step", 50)])
def test_calls_of_a_layer_do_not_grow(of_a_layer, part, most):
    assert of_a_layer[part] <= most
