"""What a step allocates besides the states: at most 64 MiB on the shapes of GPT-2-small."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from memtrain import optim
from memtrain.audit.live_storages import LiveStorages
from memtrain.optim.wrappers.weights import FORMATS

MOST = 64 * 2**20
LAYER = [(768,)] * 4 + [(768, 2304), (2304,), (768, 768), (768,), (768, 3072), (3072,)]
LAYER += [(3072, 768), (768,)]
SHAPES = [(50257, 768), (1024, 768), *LAYER * 4, (768,), (768,)]  # of 12 equal layers 4
FUSED = {
    "AdamW4bit": optim.AdamW4bit,
    "AdamW4bit-block": lambda p: optim.AdamW4bit(p, second="B128/Linear"),
    "AdamW4bitFactor": optim.AdamW4bitFactor,
    "AdamW4bit-2": lambda p: optim.AdamW4bit(p, first="Lloyd-Max", second="factored"),
    "AdamW8bit": optim.AdamW8bit,
    "AdamW8bitFactor": optim.AdamW8bitFactor,
    "SGD4bit": lambda p: optim.SGD4bit(p, momentum=0.9),
    "SGD8bit": lambda p: optim.SGD8bit(p, momentum=0.9),
    "Lion4bit": optim.Lion4bit,
    "Lion8bit": optim.Lion8bit,
}


@pytest.fixture(scope="module")
def weights():
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    return params


def resident(field):
    """VmRSS or its high-water mark VmHWM, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def two_steps_hold_little(optimizer):
    """Of the whole process, the C++ kernels' scratch too; new states are not counted."""
    for turn in ("first", "second"):
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        before, held = resident("VmRSS"), optim.state_bytes(optimizer)
        optimizer.step()
        made = optim.state_bytes(optimizer) - held
        assert resident("VmHWM") - before - made <= MOST, turn


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", FUSED)
def test_fused_steps_hold_no_parameter_sized_temporaries(name, weights):
    optimizer = EVERY[name](weights)
    two_steps_hold_little(optimizer)
    # the first step plans the states on the meta device, whose tensors the meter counts as well
    with LiveStorages() as meter:
        optimizer.step()
    assert meter.peak_nbytes <= MOST


PLAIN_SGD = {"SGD4bit-plain": lambda p: optim.SGD4bit(p, lr=0.1)}
EVERY = FUSED | PLAIN_SGD
COMMON = {("AdamW4bit", form) for form in FORMATS if form.startswith("bf16")} | {
    (name, "bf16+8") for name in EVERY
}
SPLIT = [
    pytest.param(name, form, marks=[] if (name, form) in COMMON else pytest.mark.nightly)
    for name in EVERY
    for form in FORMATS
]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("name", "form"), SPLIT)
def test_split_weights_are_stepped_without_masters(name, form):
    """A master of this weight and its gradient in float32 would take 86 MB."""
    weight = nn.Parameter(torch.zeros(14000, 768, dtype=FORMATS[form].dtype))
    weight.grad = torch.full_like(weight, 1e-3)
    optimizer = optim.SplitWeights(EVERY[name]([weight]), form)
    two_steps_hold_little(optimizer)
    assert (weight[:2] < 0).all()


def test_the_general_wrapper_holds_one_parameters_states():
    params = [nn.Parameter(torch.zeros(512, 512)) for _ in range(6)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = optim.CompressedOptimizer(torch.optim.RMSprop(params, centered=True, momentum=0.9))
    optimizer.step()
    with LiveStorages() as meter:
        optimizer.step()
    # three states of one parameter, whole; torch's and the compressors' few temporaries of it
    one = 512 * 512 * 4
    assert 3 * one <= meter.peak_nbytes <= 9 * one
