"""Steps of split weights: bit for bit a float32 step of the master, and a split."""

import copy

import pytest
import torch

from memtrain.kernels.dispatch import backend
from memtrain.kernels.step.split import MasterWeight, merge, split
from memtrain.kernels.step.step import Entry
from memtrain.kernels.step.update_rules import sgd
from tests.kernels import test_adamw, test_blockstep
from tests.kernels.steps import fused_step, instructions

# dtype, the correction's, stochastic
FORMS = {
    "bf16+8": (torch.bfloat16, torch.int8, False),
    "bf16+16": (torch.bfloat16, torch.int16, False),
    "bf16+sr": (torch.bfloat16, None, True),
    "fp16+8": (torch.float16, torch.int8, False),
    "fp16+16": (torch.float16, torch.int16, False),
}
SHAPES = [(30, 77), (9, 256), (1030,), (7,)]


def steps(shape):
    """Entries of every kind with float32 parameters."""
    options = {"weight_decay": 0.1, "decoupled": False}
    for kind in test_adamw.CODECS:
        if len(shape) > 1 or kind in ("exact", "block"):
            yield test_adamw.entry(shape, kind, test_adamw.hyper(**options))
    for rule, bits in test_blockstep.FORMS:
        yield test_blockstep.entry(shape, rule, bits, weight_decay=0.1)
    plain = sgd(lr=0.01, momentum=0.0, weight_decay=0.1)
    x = test_blockstep.entry(shape, "sgd", 32)
    yield Entry(x.param, x.grad, (), (), "sgd", plain)


def halved(entry, form, seed):
    dtype, kind, stochastic = FORMS[form]
    weight = torch.empty_like(entry.param, dtype=dtype)
    correction = None if kind is None else torch.empty_like(weight, dtype=kind)
    split(entry.param, weight, correction, seed=seed, stochastic=stochastic)
    return entry._replace(param=weight, master=MasterWeight(correction, stochastic, seed))


def weight(entry):
    return [x for x in (entry.param, entry.master.correction) if x is not None]


def check_equal_to_a_step_of_the_master(whole, form):
    masters = [
        copy.deepcopy(e)._replace(param=merge(e.param, e.master.correction), master=MasterWeight())
        for e in whole
    ]
    fused_step(whole)
    fused_step(masters)
    for ours, theirs in zip(whole, masters, strict=True):
        again = halved(theirs, form, ours.master.seed)
        for mine, other in zip(weight(ours), weight(again), strict=True):
            assert torch.equal(mine, other)
        for mine, other in zip(ours.states, theirs.states, strict=True):
            assert all(torch.equal(mine[part], other[part]) for part in mine)


@pytest.mark.parametrize("name", ["reference", "portable", "avx2", "cpu"])
@pytest.mark.parametrize("form", FORMS)
def test_equal_to_a_step_of_the_master(form, name):
    levels = {"portable": 0, "avx2": 1}
    whole = [halved(e, form, k) for shape in SHAPES for k, e in enumerate(steps(shape))]
    with instructions(levels.get(name, 2)), backend("reference" if name == "reference" else "cpu"):
        check_equal_to_a_step_of_the_master(whole, form)


KINDS = list(steps((1, 1)))


@pytest.mark.filterwarnings("ignore:overflow")  # numpy, in the interpreter
@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("form", FORMS)
def test_triton_equals_a_step_of_the_master(form, kind):
    shape = (9, 128) if form == "bf16+sr" else (5, 43)  # across a run that shares its random bits
    whole = [halved(list(steps(shape))[kind], form, 5)]
    with backend("triton"):
        check_equal_to_a_step_of_the_master(whole, form)


def test_sgd_without_a_state_by_hand():
    master = torch.tensor([1.001, -2.0])
    h = sgd(lr=0.5, momentum=0.0)
    entry = Entry(master, torch.tensor([0.5, 0.25]), (), (), "sgd", h)
    split_entry = halved(entry, "bf16+16", 0)
    fused_step([split_entry])
    after = merge(split_entry.param, split_entry.master.correction)
    assert after.tolist() == [(master[0] - 0.25).item(), -2.125]


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # numpy's
@pytest.mark.parametrize("bits", [4, 8])
def test_triton_equals_a_step_of_the_master_where_no_lane_is_cleared(bits):
    """A whole program of elements, without L2 decay and maximizing: what nearly all programs do."""
    entry = test_blockstep.entry((33, 128), "adamw", 8, weight_decay=0.1)
    if bits == 4:
        entry = test_adamw.entry((33, 128), "block", test_adamw.hyper(weight_decay=0.1))
    with backend("triton"):
        check_equal_to_a_step_of_the_master([halved(entry, "bf16+sr", 5)], "bf16+sr")


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # numpy's
@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_bad_gradients_reach_the_weight_and_leave_no_correction(name):
    for form in FORMS:
        entry = halved(test_adamw.entry((4, 128), "block", test_adamw.hyper()), form, 3)
        entry.grad[1, 2] = torch.nan
        with backend(name):
            fused_step([entry])
        bad = torch.zeros(4, 128, dtype=torch.bool)
        bad[1, 2] = True
        assert torch.equal(entry.param.isnan(), bad)
        assert all(x[1, 2] == 0 for x in weight(entry)[1:])


def test_a_momentum_of_another_size_is_refused():
    p, h = torch.ones(300), sgd(lr=1.0, momentum=0.9)
    state = {"codes": torch.zeros(1, 128, dtype=torch.uint8), "scale": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"'codes' of a state has 128 elements; .* needs 192"):
        fused_step([Entry(p, p.clone(), (state,), (test_blockstep.codec(4),), "sgd", h)])
    assert torch.equal(p, torch.ones(300))


@pytest.mark.parametrize("part", ["codes", "scale", "correction"])
def test_what_is_on_another_device_is_refused(part):
    entry = halved(test_blockstep.entry((40, 20), "adamw", 4), "bf16+8", 1)
    before = entry.param.clone()
    if part == "correction":
        elsewhere = entry.master.correction.to("meta")
        entry = entry._replace(master=entry.master._replace(correction=elsewhere))
    else:
        entry.states[1][part] = entry.states[1][part].to("meta")
    with pytest.raises(ValueError, match=rf"{part}.* is on meta, its parameter .* on cpu: a model"):
        fused_step([entry])
    assert torch.equal(entry.param, before)
