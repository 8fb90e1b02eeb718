"""The step of SGD, Lion and 8-bit AdamW: worked cases, and kernels equal to the reference."""

import copy
import math

import pytest
import torch

from memtrain.kernels.codebook.quantize import quantize_blocks_reference
from memtrain.kernels.codebook.values import CODEBOOKS, Codebook
from memtrain.kernels.step.codecs import (
    BLOCKS,
    CODEBOOKS8,
    EXACT,
    MANTISSA,
    Codec,
    upper_buckets,
)
from memtrain.kernels.step.step import Entry
from memtrain.kernels.step.update_rules import adamw, lion, sgd
from tests.kernels.steps import every_level, fused_step, instructions, run

FORMS = [("adamw", 8), *((rule, bits) for rule in ("sgd", "lion") for bits in (4, 8, 32))]
BIG = [(300, 77), (64, 3, 7, 7), (4099,), (500, 3), (1, 901), (256, 384), (1,), (), (0, 4)]
SMALL = [(50, 77), (8, 3, 7, 7), (1030,), (1,), (), (0, 4)]
OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "maximize": {"weight_decay": 0.1, "maximize": True},
}


def numbers(rule, *, nesterov=True, **options):
    if rule == "adamw":
        coupled = {"decoupled": not options.get("maximize")}
        return adamw(3, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, **options, **coupled)
    if rule == "sgd":
        return sgd(lr=1e-2, momentum=0.9, dampening=0.1, nesterov=nesterov, **options)
    return lion(lr=1e-2, betas=(0.9, 0.99), **options)


def codec(bits, map="DE", signed=True):
    return EXACT if bits == 32 else Codec("block", bits, map, signed)


def payload(x, map, bits, signed) -> dict[str, torch.Tensor]:
    if bits == 32:
        return {"tensor": x}
    codes = quantize_blocks_reference(x, Codebook(map, bits, signed), BLOCKS[bits])
    return {"codes": codes[0], "scale": codes[1]}


def entry(shape, rule, bits, *, dtype=torch.float32, grad_dtype=None, maps=("DE", "DE"), **options):
    param = torch.randn(shape).to(dtype)
    grad = (torch.randn(shape) * torch.rand(shape) ** 4).to(grad_dtype or dtype)
    states = [payload(torch.randn(shape) * torch.rand(shape) ** 8, maps[0], bits, True)]
    if rule == "adamw":
        states.append(payload(torch.rand(shape) ** 9, maps[1], bits, False))
    codecs = (codec(bits, maps[0]), codec(bits, maps[1], signed=False))[: len(states)]
    return Entry(param, grad, tuple(states), codecs, rule, numbers(rule, **options))


def run_at(level, before):
    """In C++, with the instructions of `level` at most."""
    with instructions(level):
        return run("cpu", before)


def check_equal(got, want, before):
    """States equal; parameters equal, but for AdamW's root, whose last bit may differ."""
    for a, b, old in zip(got, want, before, strict=True):
        case = (a.rule, a.bits, tuple(a.param.shape), a.param.dtype)
        for mine, theirs in zip(a.states, b.states, strict=True):
            for name in mine:
                assert torch.equal(mine[name], theirs[name]), (*case, name)
        if a.rule != "adamw":
            assert torch.equal(a.param, b.param), case
            continue
        eps = torch.finfo(a.param.dtype).eps
        update = (b.param.double() - old.param.double()).abs()
        room = 4 * 2.0**-23 * update + eps * b.param.double().abs() + 1e-30
        near = (a.param.double() - b.param.double()).abs() <= room
        assert (near | (a.param == b.param)).all(), (
            case
        )  # an infinite one: a moment of 0, in float16


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_worked_sgd(name):
    param, grad = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -4.0])
    states = (payload(torch.tensor([0.0, 2.0]), "DE", 8, True),)
    h = sgd(lr=0.25, momentum=0.5, dampening=0.5, nesterov=True)
    after = run(name, [Entry(param, grad, states, (codec(8),), "sgd", h)])[0]
    # buf = 0.5 * (0, 2) + 0.5 * (0.5, -4) = (0.25, -1); step by g + 0.5 * buf = (0.625, -4.5)
    assert after.param.tolist() == [1 - 0.25 * 0.625, 2 + 0.25 * 4.5]
    # the scale has the sign of the largest element, whose code is that of 1
    assert after.states[0]["scale"].tolist() == [-1.0]
    assert after.states[0]["codes"][0, 1] == 255


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_worked_lion(name):
    param, grad = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, -4.0, 0.0])
    states = ({"tensor": torch.zeros(3)},)
    h = lion(lr=0.25, betas=(0.5, 0.75), weight_decay=1.0)
    after = run(name, [Entry(param, grad, states, (codec(32),), "lion", h)])[0]
    assert after.param.tolist() == [0.75 - 0.25, 1.5 + 0.25, 2.25]
    assert after.states[0]["tensor"].tolist() == [0.125, -1.0, 0.0]


@pytest.mark.parametrize(("rule", "bits"), FORMS)
@every_level
def test_cpp_equals_the_reference(rule, bits, level):
    options = list(OPTIONS.values())
    before = [entry(shape, rule, bits, **options[i % 3]) for i, shape in enumerate(BIG)]
    check_equal(run_at(level, before), run("reference", before), before)


@pytest.mark.parametrize(("rule", "bits"), FORMS)
def test_triton_equals_the_reference(rule, bits):
    before = [entry(shape, rule, bits, **OPTIONS["maximize"]) for shape in SMALL]
    before.append(entry((300,), rule, bits))
    if rule == "sgd":
        before.append(entry((300,), rule, bits, nesterov=False))
    check_equal(run("triton", before), run("reference", before), before)


@pytest.mark.filterwarnings("ignore:overflow")  # numpy, in the interpreter: a second moment of 0
@pytest.mark.parametrize("name", ["cpu", "triton"])
@pytest.mark.parametrize(("rule", "bits"), FORMS)
def test_half_precision(rule, bits, name):
    pairs = [(torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, torch.float32)]
    pairs.append((torch.float32, torch.float16))
    before = [
        entry(shape, rule, bits, dtype=p, grad_dtype=g)
        for shape in [(20, 77), (5,)]
        for p, g in pairs
    ]
    check_equal(run(name, before), run("reference", before), before)


NARROW = [(name, signed) for name in CODEBOOKS for signed in (True, False)]
NARROW += [("E2M1", True), ("E3M0", True), ("E2M2", False), ("E3M1", False)]
NARROW.remove(("DE-0", True))
EVERY = [(4, *pair) for pair in NARROW] + [(8, "DE", True), (8, "DE", False), (8, "DE-0", False)]


@pytest.mark.parametrize(("bits", "map", "signed"), EVERY)
def test_upper_bits_leave_one_bound_in_doubt(bits, map, signed):
    device = torch.device("cpu")
    bounds = Codebook(map, bits, signed).midpoints(device)
    exact = torch.cat([bounds, bounds.nextafter(torch.tensor(9.0)), torch.tensor([0.0, 1.0])])
    exact = torch.cat([exact, torch.rand(2000) ** 4]) * torch.tensor([[1.0], [-1.0]])[: 1 + signed]
    exact = exact.flatten()
    count = (exact[:, None] > bounds).sum(1)
    table = upper_buckets(codec(bits, map, signed), device)
    shift, centre = 23 - MANTISSA[bits], len(table) // 4
    for error in (-(2.0**-22), 0.0, 2.0**-22):  # of a reciprocal and a product
        place = ((exact * (1 + error)).view(torch.int32) >> shift) + centre
        start = table[place].long() & (15 if bits == 4 else 255)
        assert ((count - start == 0) | (count - start == 1)).all()
        if bits == 4:
            following = torch.cat([bounds, torch.tensor([math.inf])])[start]
            assert torch.equal((table[place] >> 32).int().view(torch.float32), following)
    nan = torch.tensor([math.nan, -math.nan]).view(torch.int32)
    assert not ((table[(nan >> shift) + centre] & 15).any())
    assert not (table[2 * centre :] & 255).any()


@pytest.mark.parametrize("exponent", [-140, -100, -30, 0, 30, 100, 126])
@pytest.mark.parametrize(("name", "bits"), [("cpu", 8), ("triton", 8), ("triton", 4)])
def test_codes_at_every_bound_and_scale(name, bits, exponent):
    # a state that is kept as it is (b1 = 1) and quantised again: every bound, and its neighbours
    bounds = Codebook("DE", bits, True).midpoints(torch.get_default_device())
    near = torch.cat([bounds, bounds.nextafter(torch.tensor(9.0)), torch.tensor([1.0])])
    x = (near.double() * 2.0**exponent).float()
    h = sgd(lr=0.0, momentum=0.0)
    states = (payload(torch.zeros_like(x), "DE", bits, True),)
    before = [Entry(torch.zeros_like(x), x, states, (codec(bits),), "sgd", h)]
    check_equal(run(name, before), run("reference", before), before)


@pytest.mark.filterwarnings("ignore")  # numpy, in the interpreter
@pytest.mark.parametrize("bits", [4, 8])
def test_triton_blocks_that_have_no_scale(bits):
    h = sgd(lr=0.0, momentum=0.0)
    x = torch.randn(4, BLOCKS[bits])
    x[0] = 0.0
    x[1, 3], x[2, 5] = math.inf, math.nan
    states = (payload(torch.zeros_like(x), "DE", bits, True),)
    before = [Entry(torch.zeros_like(x), x, states, (codec(bits),), "sgd", h)]
    (ours,), (theirs,) = run("triton", before), run("reference", before)
    assert torch.equal(ours.states[0]["codes"], theirs.states[0]["codes"])
    torch.testing.assert_close(
        ours.states[0]["scale"], theirs.states[0]["scale"], rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("map", CODEBOOKS8)
@every_level
def test_every_8_bit_code_decodes_to_its_value(map, level):
    # blocks of one code only, kept as they are: their new scale is the value itself
    codes = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 256)
    states = tuple({"codes": codes.clone(), "scale": torch.ones(256)} for _ in range(2))
    h = numbers("adamw")._replace(w1=0.0, b2=1.0, w2=0.0)
    zeros = torch.zeros(256 * 256)
    codecs = (codec(8), codec(8, map, signed=False))
    before = Entry(zeros, zeros.clone(), states, codecs, "adamw", h)
    after = run_at(level, [before])[0]
    for k, (name, signed) in enumerate([("DE", True), (map, False)]):
        values = Codebook(name, 8, signed).values(torch.device("cpu"))
        assert torch.equal(after.states[k]["scale"], values)


@pytest.mark.parametrize("map", CODEBOOKS8)
@every_level
def test_unsigned_8_bit_codes_around_every_bound(map, level):
    # the second moment becomes the gradient's square: a few on each side of every bound
    bounds = Codebook(map, 8, False).midpoints(torch.device("cpu"))
    steps = 1 + torch.arange(-4, 5) * 2.0**-23
    grad = torch.ones(9, 256)
    grad[:, 1:] = steps[:, None] * bounds.sqrt()
    before = []
    for scale in (1.0, 0.83, 1e-10):  # the last one's square is below 2**-60
        h = numbers("adamw")._replace(b2=0.0, w2=1.0)
        state = entry((9, 256), "adamw", 8, maps=("DE", map))
        before.append(state._replace(grad=grad * scale, scalars=h))
    check_equal(run_at(level, before), run("reference", before), before)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy, in the interpreter
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("rule", "bits"), FORMS)
def test_bad_gradients_stay_in_their_block(rule, bits, bad, name):
    clean = [entry((4, 256), rule, bits)]
    spoilt = copy.deepcopy(clean)
    spoilt[0].grad[2, 3] = bad
    a, b = run(name, clean)[0], run(name, spoilt)[0]
    fine = torch.ones(4, 256, dtype=torch.bool)
    fine[2, 3] = False
    assert torch.equal(a.param[fine], b.param[fine])
    if not (rule == "lion" and bad == math.inf):  # whose step is the sign of it
        assert not b.param[2, 3].isfinite()
    for mine, theirs in zip(a.states, b.states, strict=True):
        for part in mine:
            blocks = mine[part].view(4, -1), theirs[part].view(4, -1)
            others = [0, 1, 3]
            assert torch.equal(blocks[0][others], blocks[1][others])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rule": "adam"}, "allowed: adamw, sgd, lion"),
        ({"codecs": (Codec("block", 5),)}, "no kernel for 1 states"),
        ({"codecs": (codec(8, "Linear"),)}, "no kernel for 1 states"),
        ({"codecs": (codec(8), codec(8))}, "rule 'sgd' has no kernel"),
    ],
)
def test_wrong_entries_raise_before_any_change(change, match):
    good, bad = entry((300,), "sgd", 8), entry((300,), "sgd", 8)._replace(**change)
    start = good.param.clone()
    with pytest.raises(ValueError, match=match):
        fused_step([good, bad])
    assert torch.equal(good.param, start)
