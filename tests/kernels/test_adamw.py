"""The fused AdamW step: worked case, and kernels equal to the reference."""

import copy
import math

import pytest
import torch

from memtrain.kernels.codebook import rank1
from memtrain.kernels.codebook.quantize import quantize_blocks_reference
from memtrain.kernels.codebook.values import Codebook
from memtrain.kernels.step import update_rules
from memtrain.kernels.step.codecs import EXACT, FACTORED, Codec
from memtrain.kernels.step.step import Entry
from tests.kernels.steps import by_threads, every_level, fused_step, instructions, run

NUMBERS = {
    "adamw": {"weight_decay": 0.1},
    "adam-maximize": {"weight_decay": 0.1, "decoupled": False, "maximize": True},
}
FIRST = Codec("block", 4, "DE")
DRAWN = FIRST._replace(drawn=True)
CODECS = {
    "exact": (EXACT, EXACT),
    "block": (FIRST, Codec("block", 4, "Linear", signed=False)),
    "rank1": (FIRST, Codec("rank1", 4, "Linear", signed=False)),
    "factored": (FIRST, FACTORED),
    "block, drawn": (DRAWN, Codec("block", 4, "Linear", signed=False)),
    "rank1, drawn": (DRAWN, Codec("rank1", 4, "Linear", signed=False)),
    "factored, drawn": (DRAWN, FACTORED),
    "factored8": (Codec("block", 8, "DE"), FACTORED),
}
BIG = [(1000, 77), (64, 3, 7, 7), (4099,), (5000, 3), (1, 9001), (256, 384), (1,), (0, 4)]
SMALL = [(20, 77), (3, 3, 7, 7), (400,), (200, 3), (1, 301), (4, 128), (1,), (0, 4)]


def hyper(step=3, **options):
    return update_rules.adamw(step, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, **options)


def entry(shape, kind, numbers, dtype=torch.float32, grad_dtype=None):
    param = torch.randn(shape).to(dtype)
    grad = (torch.randn(shape) * torch.rand(shape)).to(grad_dtype or dtype)
    m, v = torch.randn(shape) * 0.1, torch.rand(shape) ** 4
    if kind == "exact":
        states = ({"tensor": m}, {"tensor": v})
        return Entry(param, grad, states, CODECS[kind], "adamw", numbers)
    own = CODECS[kind][0]
    book = Codebook(own.codebook, own.bits, own.signed)
    first = coded(quantize_blocks_reference(m, book, own.block))
    if kind.startswith("factored"):
        matrix = v.reshape(shape[0], math.prod(shape[1:]))
        second = {"row": matrix.mean(1), "col": matrix.mean(0)}
    elif kind.startswith("rank1"):
        second = coded(rank1.quantize(v, Codebook("Linear", 4, False)))
    else:
        second = coded(quantize_blocks_reference(v, Codebook("Linear", 4, False), 128))
    return Entry(param, grad, (first, second), CODECS[kind], "adamw", numbers)


def coded(pair):
    return {"codes": pair[0], "scale": pair[1]}


def entries(shapes, numbers, **options):
    return [
        entry(shape, kind, numbers, **options)
        for shape in shapes
        for kind in CODECS
        if len(shape) > 1 or kind.startswith(("exact", "block"))
    ]


def check_equal(got, want, before):
    """Payloads equal; parameters within four roundings of the update and one of the sum."""
    for a, b, old in zip(got, want, before, strict=True):
        if not a.param.numel():
            continue
        sums = a.kind == "factored"
        for mine, theirs in zip(a.states, b.states, strict=True):
            for name in mine:
                if sums and name in ("row", "col"):
                    # summation order: at most one rounding for each of the terms added
                    bound = max(a.param.shape[0], a.param[0].numel()) * 2.0**-24
                    assert torch.allclose(mine[name], theirs[name], rtol=bound, atol=0)
                else:
                    assert torch.equal(mine[name], theirs[name]), (a.kind, a.param.shape, name)
        # torch's vector sqrt and the kernels' may differ in the last bit, and so on from there
        eps = torch.finfo(a.param.dtype).eps
        update = (b.param.double() - old.param.double()).abs()
        room = 4 * 2.0**-23 * update + eps * b.param.double().abs() + 1e-30
        if sums:
            room += update * max(a.param.shape[0], a.param[0].numel()) * 2.0**-24
        assert ((a.param.double() - b.param.double()).abs() <= room).all(), (a.kind, a.param.shape)


@pytest.mark.filterwarnings("ignore:invalid value")  # the padding is 0 / 0 with eps=0
def test_worked_case():
    # step 1 from zero: m = 0.1 g, v = 0.001 g^2, so the corrected update is lr * sign(g)
    param, grad = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -4.0])
    first = coded(quantize_blocks_reference(torch.zeros(2), Codebook("DE", 4, True), 128))
    second = coded(quantize_blocks_reference(torch.zeros(2), Codebook("Linear", 4, False), 128))
    numbers = update_rules.adamw(1, lr=0.25, betas=(0.9, 0.999), eps=0.0)
    for name in ("reference", "cpu", "triton"):
        before = [Entry(param, grad, (first, second), CODECS["block"], "adamw", numbers)]
        after = run(name, before)[0]
        assert torch.allclose(after.param, torch.tensor([0.75, 2.25]), rtol=1e-6, atol=0)
        assert torch.allclose(after.states[0]["scale"], torch.tensor([-0.4]))
        # 0.05 / -0.4 = -0.125, nearest -0.0775 (code 4); the largest is its own scale (code 15)
        assert (after.states[0]["codes"][0, :2] & 15).tolist() == [4, 15]
        # (0.5 / 4)^2 = 1/64, below the lowest value 1/16 (code 0); 1 is code 15
        assert (after.states[1]["codes"][0, :2] & 15).tolist() == [0, 15]


@pytest.mark.parametrize("options", NUMBERS.values(), ids=NUMBERS)
@every_level
def test_cpp_equals_the_reference(options, level):
    before = entries(BIG, hyper(**options))
    with instructions(level):
        after = run("cpu", before)
    check_equal(after, run("reference", before), before)


def test_triton_equals_the_reference():
    before = entries(SMALL, hyper(**NUMBERS["adamw"]))  # `test_half_precision` has the others
    check_equal(run("triton", before), run("reference", before), before)


HALVES = [(torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(("dtype", "grad_dtype"), [*HALVES, (torch.float32, torch.float16)])
@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_half_precision(name, dtype, grad_dtype):
    shapes = [(20, 77), (6, 128)] if name == "triton" else [(90, 77), (4099,), (30, 1100)]
    numbers = hyper(**NUMBERS["adam-maximize"])
    before = entries(shapes, numbers, dtype=dtype, grad_dtype=grad_dtype)
    check_equal(run(name, before), run("reference", before), before)


@pytest.mark.filterwarnings("ignore:invalid value")  # the padding is 0 / 0 with eps=0
@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_half_precision_rounds_once_to_the_nearest(name):
    # 1 - 0.0035 = 0.9965: neighbours in bfloat16 are 0.99609375 and 1; twice rounded or truncated
    # arithmetic in bfloat16 would give another
    param, grad = torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
    first, second = {"tensor": torch.zeros(1)}, {"tensor": torch.zeros(1)}
    numbers = update_rules.adamw(1, lr=0.0035, betas=(0.9, 0.999), eps=0.0)
    entry = Entry(param, grad, (first, second), CODECS["exact"], "adamw", numbers)
    after = run(name, [entry])[0]
    assert after.param.item() == 0.99609375


def test_double_precision_goes_by_the_reference():
    before = entries([(20, 77)], hyper(), dtype=torch.float64)
    for a, b in zip(run("cpu", before), run("reference", before), strict=True):
        assert torch.equal(a.param, b.param)


def test_results_do_not_depend_on_threads():
    before = entries([(1000, 77), (600, 256), (40, 3, 16, 16)], hyper())
    for a, b in zip(*by_threads(lambda: run("cpu", before)), strict=True):
        assert torch.equal(a.param, b.param)
        for name in a.states[1]:
            assert torch.equal(a.states[1][name], b.states[1][name])


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drawn_first_moments_are_unbiased(name, dtype):
    n = 512 if name == "triton" else 8192
    x = torch.linspace(-0.88, 0.99, 128) + 0.01 * torch.rand(
        n, 128
    )  # equal ones draw equal numbers
    x[:, -1] = 1.0  # the scale
    numbers = hyper()._replace(w1=1.0)  # the new moment is the gradient
    before = entry((n, 128), "factored, drawn", numbers, dtype)
    before.states[0]["scale"].zero_()
    after = run(name, [before._replace(grad=x)])[0]
    found = DRAWN.decode(after.states[0], after.param.shape)
    values = Codebook("DE", 4, True).values(x.device)
    above = torch.searchsorted(values, x).clamp(min=1)
    up, down = values[above] - x, x - values[above - 1]
    assert ((found == values[above]) | (found == values[above - 1])).all()
    # of 128 means of independent draws, one in a thousand such tests has one so far away
    off = (found - x) / (up * down).sqrt().clamp(min=1e-3)
    assert (off.double().mean(0).abs() <= 4.5 / n**0.5).all()
    together = (off[:, 1:] * off[:, :-1]).double()  # of independent neighbours: 0, with variance 1
    assert (together.mean(0).abs() <= 4.5 / n**0.5).all()


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy, in the interpreter
@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["block", "rank1"])
def test_bad_gradients_stay_in_their_block(name, bad, kind):
    clean = [entry((6, 128), kind, hyper())]
    spoilt = copy.deepcopy(clean)
    spoilt[0].grad[2, 3] = bad
    a, b = run(name, clean)[0], run(name, spoilt)[0]
    fine = torch.ones(6, 128, dtype=torch.bool)
    fine[2, 3] = False
    assert torch.equal(a.param[fine], b.param[fine])
    assert not b.param[2, 3].isfinite()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(a.states[0]["codes"][others], b.states[0]["codes"][others])
    if kind == "block":
        assert torch.equal(a.states[1]["codes"][others], b.states[1]["codes"][others])
    else:
        book = Codebook("Linear", 4, False)
        back = rank1.dequantize(*b.states[1].values(), book, shape=(6, 128))
        assert back[fine].isfinite().all()
        assert not back[2, 3].isfinite()


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_factored_zero_gradient_stays_finite(name):
    before = [entry((6, 130), "factored", hyper())]
    for tensor in (before[0].grad, *before[0].states[1].values()):
        tensor.zero_()
    before[0].states[0]["scale"].zero_()
    after = run(name, before)[0]
    assert torch.equal(after.param, before[0].param)


@pytest.mark.filterwarnings("ignore:invalid value")  # the padding is 0 / 0 with eps=0
@pytest.mark.parametrize("kind", ["factored", "factored8"])
@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_factored_worked_case(name, kind):
    # the first step from nothing: m = 0.1 g and v = 0.001 g^2, so lr * sign(g) where g^2 has rank 1
    grad = torch.tensor([[0.5, -1.0], [-1.0, 2.0]])
    numbers = update_rules.adamw(1, lr=0.25, betas=(0.9, 0.999), eps=0.0)
    before = entry((2, 2), kind, numbers)._replace(grad=grad)
    before.param.zero_()
    before.states[0]["scale"].zero_()
    for part in before.states[1].values():
        part.zero_()
    after = run(name, [before])[0]
    assert torch.allclose(after.param, -0.25 * grad.sign(), rtol=1e-6, atol=0)
    assert torch.allclose(after.states[1]["row"], 0.001 * torch.tensor([0.625, 2.5]))
    assert after.states[0]["scale"].item() == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("second", "shape", "match"),
    [
        (Codec("rank2", 4), (4, 4), "no kernel for 2 states kept as"),
        (CODECS["rank1"][1], (4,), "needs at least 2 dimensions"),
        (FACTORED, (), "needs at least 2 dimensions"),
        (EXACT, (4, 4), "no kernel for 2 states kept as"),
    ],
)
def test_wrong_codecs_raise(second, shape, match):
    bad = entry(shape, "block", hyper())._replace(codecs=(FIRST, second))
    with pytest.raises(ValueError, match=match):
        fused_step([bad])
