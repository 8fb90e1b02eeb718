"""Two bits of a moment over the second's factors: by hand, and where what is lost goes."""

import math

import pytest
import torch

from memtrain.kernels.codebook.lloyd_max import LARGE, SMALL, VALUES, decode, encode
from memtrain.kernels.dispatch import backend
from memtrain.kernels.packing import bits as bitpack
from memtrain.kernels.step import update_rules
from memtrain.kernels.step.codecs import EXACT, FACTORED, LLOYD_MAX
from memtrain.kernels.step.split import MasterWeight
from memtrain.kernels.step.step import Entry
from memtrain.kernels.step.update_rules import later_weight
from tests.kernels.steps import every_level, fused_step, instructions, run

NAMES = ("codes", "scale", "row", "col")


def entry(shape, numbers, dtype=torch.float32, *, first=True, **others):
    rows, cols = shape[0], math.prod(shape[1:])
    param = torch.randn(shape).to(dtype)
    grad = (torch.randn(shape) * torch.rand(shape)).to(dtype)
    v = torch.rand(shape).reshape(rows, cols) ** 4
    second = {"row": v.mean(1), "col": v.mean(0)}
    row, col = torch.rand(rows) + 0.5, torch.rand(cols)
    m = torch.randn(rows, cols) * row.unsqueeze(1) * col * 0.1 * first
    state = dict(zip(NAMES, (*encode(m, row, col), row, col), strict=True))
    return Entry(param, grad, (state, second), (LLOYD_MAX, FACTORED), "adamw", numbers, **others)


def hyper(step=3, betas=(0.9, 0.999), eps=1e-8, **options):
    return update_rules.adamw(step, lr=1e-2, betas=betas, eps=eps, **options)


def test_codes_by_hand():
    # over rows and columns: 4, 1, -1, 0; the mean square is 4.5, 0.9814**2 of it 4.33, so only 4,
    # whose square is 16, is large; the scale of least squares, and that as a bfloat16
    row, col = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25])
    codes, scale = encode(torch.tensor([[2.0, 0.25], [-1.0, 0.0]]), row, col)
    assert bitpack.unpack(codes, 2)[0, :4].tolist() == [3, 2, 1, 2]
    exact = (4 * LARGE + 2 * SMALL) / (LARGE**2 + 3 * SMALL**2)  # 2.401
    assert scale.float().item() == 2.390625
    assert 2.390625 <= exact < 2.390625 + 2**-6
    back = decode(codes, scale, row, col)
    want = 2.390625 * torch.tensor([[LARGE * 0.5, SMALL * 0.25], [-SMALL, SMALL * 0.5]])
    assert torch.allclose(back, want, rtol=2**-22, atol=0)
    assert VALUES == (-LARGE, -SMALL, SMALL, LARGE)


def test_equal_magnitudes_come_back():
    # all are large, and their scale of least squares is their own: but for its rounding down
    x = torch.tensor([1.0, -1.0]).repeat(3, 100)
    back = decode(*encode(x, torch.ones(3), torch.ones(200)), torch.ones(3), torch.ones(200))
    assert torch.equal(back.sign(), x)
    assert ((back.abs() <= 1) & (back.abs() >= 1 - 2**-7)).all()


@pytest.mark.parametrize("power", [0.1, 1, 5])
def test_never_longer_than_given(power):
    x = torch.randn(300, 128).sign() * torch.rand(300, 128) ** power
    back = decode(*encode(x, torch.ones(300), torch.ones(128)), torch.ones(300), torch.ones(128))
    assert (back.norm(dim=1) <= x.norm(dim=1) * (1 + 2**-20)).all()


@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan])
def test_a_block_without_a_scale_is_zero(bad):
    x = torch.randn(2, 128)
    x[0] = bad
    codes, scale = encode(x, torch.ones(2), torch.ones(128))
    assert scale[0] == 0
    assert scale[1] > 0
    assert (decode(codes, scale, torch.ones(2), torch.ones(128))[0] == 0).all()


def test_rows_and_columns_without_a_magnitude_count_as_zero():
    x = torch.randn(2, 128)
    codes, scale = encode(x, torch.tensor([0.0, 1.0]), torch.ones(128))
    assert scale[0] == 0
    assert (decode(codes, scale, torch.tensor([0.0, 1.0]), torch.ones(128))[0] == 0).all()


@pytest.mark.parametrize("b1", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("step", [1, 2, 10, 10_000])
def test_weight_of_later_steps(b1, step):
    exact = sum(b1**k / (1 - b1 ** (step + k)) for k in range(1, 5000))
    found = later_weight(b1, step)
    on_device = later_weight(b1, torch.tensor(float(step), dtype=torch.float64))
    assert abs(found - exact) < 2e-3 * exact  # what the formula leaves out at 0.5
    assert abs(float(on_device) - found) < 1e-9 * found
    assert later_weight(0.0, step) == 0


def test_first_step_by_hand():
    # m = 0.1 g; v's factors give g**2 * 0.001 where g has rank one, so m over its root is
    # 0.1 / sqrt(0.001) times a sign everywhere, which 2 bits keep but for the scale's rounding
    param, grad = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]])
    zeros = entry((1, 2), hyper(), first=False)
    numbers = update_rules.adamw(1, lr=0.25, betas=(0.9, 0.999), eps=0.0)
    states = (zeros.states[0], {"row": torch.zeros(1), "col": torch.zeros(2)})
    before = zeros._replace(param=param, grad=grad, scalars=numbers, states=states)
    after = run("reference", [before])[0]
    u = 0.1 / math.sqrt(0.001)
    scale = after.states[0]["scale"].float().item()
    assert u / LARGE * (1 - 2**-7) <= scale <= u / LARGE
    lost = 1 - scale * LARGE / u  # of each element
    step = 0.25 * (1 + 0.1 * lost * later_weight(0.9, 1))
    want = torch.tensor([[1.0 - step, 2.0 + step]])
    assert torch.allclose(after.param, want, rtol=2**-20, atol=0)
    assert torch.allclose(after.states[0]["col"], math.sqrt(0.001) * grad.abs()[0])


def test_what_is_stored_does_not_change_where_the_weight_ends():
    # with b2 = 1 the denominator stays: without a new gradient the weight comes to rest where the
    # exact moment brings it, whatever was lost on the way; noise would leave a sixth of the way
    torch.manual_seed(0)
    options = {"betas": (0.9, 1.0 - 1e-7), "eps": 1e-3}
    ours = entry((40, 128), None)
    m = LLOYD_MAX.decode(ours.states[0], ours.param.shape)
    row, col = ours.states[1]["row"], ours.states[1]["col"]
    v = (row / row.mean()).unsqueeze(1) * col
    exact = Entry(
        ours.param.clone(), ours.grad, ({"tensor": m}, {"tensor": v}), (EXACT, EXACT), "adamw", None
    )
    ours, start = ours._replace(param=ours.param.clone()), ours.param.clone()
    for step in range(1000, 1250):
        for one in (ours, exact):
            one.grad.copy_(torch.zeros(1) if step > 1100 else one.grad)
            h = hyper(step, **options)
            with backend("reference"):
                fused_step([one._replace(scalars=h._replace(eps=1e-3, step_size=h.step_size))])
        if step < 1100:
            ours.grad.normal_()
            exact.grad.copy_(ours.grad)
    way = (exact.param - start).norm()
    assert (ours.param - exact.param).norm() < 0.01 * way


def exactly(shape, dtype=torch.float32, **others):
    """An entry whose sums are exact in any order: powers of two, and numbers of few bits."""
    numbers = update_rules.adamw(
        3, lr=0.01, betas=(0.5, 0.75), eps=1e-8, weight_decay=0.1, maximize=others.pop("up", False)
    )
    found = entry(shape, numbers, dtype, **others)
    found.grad.copy_(torch.randint(-8, 9, shape) / 4)
    for part in found.states[1].values():
        part.copy_(torch.randint(1, 9, part.shape) / 16)
    return found


@pytest.mark.parametrize("up", [False, True], ids=["min", "max"])
@every_level
def test_cpp_equals_the_reference(level, up):
    before = [exactly(shape, up=up) for shape in [(64, 256), (256, 32), (8, 2, 4, 8), (2, 16)]]
    before += [exactly((64, 256), torch.bfloat16), exactly((2, 16), torch.float16)]
    sr = MasterWeight(stochastic=True, seed=5)
    before.append(exactly((64, 128), torch.bfloat16, master=sr))
    own = MasterWeight(torch.zeros(64, 64, dtype=torch.int8))
    before.append(exactly((64, 64), torch.bfloat16, master=own))
    with instructions(level):
        after = run("cpu", before)
    check_equal(after, run("reference", before))


def check_equal(got, want, before=None):
    """All equal; with the entries before, parameters but for the quotient's last bits.

    On a GPU it is within 1.5 units in the last place.
    """
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        for mine, theirs in zip(a.states, b.states, strict=True):
            for name in mine:
                assert torch.equal(mine[name], theirs[name]), (a.param.shape, name)
        if before is None:
            assert torch.equal(a.param, b.param)
            continue
        own, other, old = (x.param.double() for x in (a, b, before[k]))
        room = 1.5 * 2.0**-23 * (other - old).abs() + torch.finfo(a.param.dtype).eps * other.abs()
        assert ((own - other).abs() <= room).all()


def test_triton_equals_the_reference():
    before = [exactly(shape) for shape in [(32, 128), (64, 32), (4, 2, 4, 8), (2, 16)]]
    before += [exactly((2, 16), torch.float16), exactly((8, 128), torch.bfloat16)]
    sr = MasterWeight(stochastic=True, seed=5)
    before.append(exactly((8, 128), torch.bfloat16, master=sr))
    own = MasterWeight(torch.zeros(8, 64, dtype=torch.int8))
    before.append(exactly((8, 64), torch.bfloat16, master=own))
    check_equal(run("triton", before), run("reference", before), before)


@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_any_sizes(name):
    # sums may be added in another order, and so an element at a bound have the other code; then
    # the weight takes the difference, and both together are as before
    shapes = [(20, 77), (3, 3, 7, 7), (1, 301), (5, 128), (0, 4), (5, 0), (1, 1)]
    before = [entry(shape, hyper(weight_decay=0.1)) for shape in shapes]
    for a, b in zip(run(name, before), run("reference", before), strict=True):
        if not a.param.numel():
            continue
        h, bound = a.scalars, max(a.param.shape[0], a.param[0].numel()) * 2.0**-22
        ends = []
        for one in (a, b):
            row, col = one.states[0]["row"], one.states[0]["col"]
            root = (row.unsqueeze(1) * col).view(one.param.shape).double()
            stored = LLOYD_MAX.decode(one.states[0], one.param.shape)
            ends.append(one.param - h.residual_size * stored / (root + h.eps))
        lost = (h.step_size + h.residual_size) * 2 / (root + h.eps)  # of moments of a few units
        assert ((ends[0] - ends[1]).abs() <= bound * lost + 2.0**-22 * ends[1].abs()).all()
        codes = [bitpack.unpack(one.states[0]["codes"], 2) for one in (a, b)]
        assert (codes[0] != codes[1]).float().mean() < 0.001


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_bad_gradients_spoil_the_tensor_as_factors_do(name, bad):
    spoilt = [entry((6, 128), hyper()), entry((6, 128), hyper())]
    spoilt[0].grad[2, 3] = bad
    after = run(name, spoilt)
    if math.isnan(bad):
        assert not after[0].param.isfinite().any()
    assert not after[0].param[2, 3].isfinite()
    assert not after[0].states[1]["row"].isfinite().all()
    assert after[1].param.isfinite().all()


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_dead_rows_and_columns_do_not_move(name):
    numbers = update_rules.adamw(3, lr=0.01, betas=(0.9, 0.999), eps=1e-8)
    before = entry((40, 200), numbers, first=False)
    for part in before.states[1].values():
        part.zero_()
    before.grad[3], before.grad[:, 5] = 0, 0
    after = run(name, [before])[0]
    assert after.param.isfinite().all()
    assert torch.equal(after.param[3], before.param[3])
    assert torch.equal(after.param[:, 5], before.param[:, 5])
    assert (after.param[4, :5] != before.param[4, :5]).all()
