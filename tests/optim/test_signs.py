"""States are unbiased in sign, and no second moment becomes zero, with every compressor."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from memtrain.compressors import COMPRESSORS, Key
from memtrain.compressors.base import STATE
from memtrain.compressors.floats import Float
from memtrain.compressors.named import named
from memtrain.kernels.codebook.values import CODEBOOKS, codebook
from memtrain.kernels.dispatch import backend
from memtrain.optim.states import layout
from tests.kernels.steps import every_level, instructions
from tests.optim.behaviours import FUSED, every, make

SIGNED = [name for name in CODEBOOKS if name != "DE-0"]
MAPS = [*(f"{name}{bits}" for name in SIGNED for bits in range(2, 9)), "E2M1"]
"""Every signed codebook at every width, and a small float."""
SCALES = ("B8", "B128", "B256", "Rank-1")


def state_compressors(signed, books):
    """Every compressor that can store a state, by name."""
    coded = ("block", "rank1", "float")
    known = {name: cls for name, cls in COMPRESSORS.items() if STATE in cls.roles}
    found = {name: cls() for name, cls in known.items() if name not in coded}
    found["bfloat16"] = Float(format="bf16")
    for name in (f"{scale}/{book}{end}" for scale in SCALES for book in books for end in END):
        found[name] = named(name, signed=signed)
    return found


END = ("", "+SR")
MOMENTUM = state_compressors(True, MAPS)
SECOND = state_compressors(False, [*MAPS, *(f"DE-0{bits}" for bits in range(2, 9)), "E2M2"])


def symmetric(shape):
    """Numbers of 8 bits: blocks have several elements of largest magnitude."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).bfloat16().float()


def ci(name):
    """Every map in blocks of 128; 4 bits in others, and with stochastic rounding."""
    four = "4" in name.partition("/")[2] and (name.startswith("B128") or not name.endswith("SR"))
    return "/" not in name or four or (name.startswith("B128") and not name.endswith("SR"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if ci(name) else pytest.mark.nightly)
        for name, compressor in MOMENTUM.items()
        if compressor.signed and compressor.first_moment
    ],
)
def test_compressors_of_momentum_have_no_bias_in_sign(name):
    compressor = MOMENTUM[name]
    x, n = symmetric((512, 128)), 16 if compressor.rounding == "stochastic" else 1
    errors = []
    for sign in (1, -1):
        for step in range(n):
            key = Key(step=2 * step + (sign > 0))
            errors.append(compressor.decompress(compressor.compress(sign * x, key=key)) - sign * x)
    bias = torch.stack(errors).double().mean(0)
    # Zero if -x decodes to the opposite of x; else the mean error of 65,536 elements.
    assert abs(bias.mean()) <= 5 * bias.std() / bias.numel() ** 0.5


@pytest.mark.parametrize("state", layout.SIGNED)
def test_scales_without_a_sign_are_refused_for_momentum(state):
    with pytest.raises(ValueError, match="must not drift to one side"):
        layout.check_state(named("Rank-1/Linear", signed=True), state)


def run(name, sign, level, **options):
    """Weights after 20 steps of zero-mean gradients; some blocks have ties."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((64, 256), (33, 150), (5000,), (40,))]
    optimizer = make(name, params, **{"lr": 1e-3, "weight_decay": 0.0, **options})
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        for param in params:
            param.grad = sign * torch.randn(param.shape, generator=generator).bfloat16().float()
        with instructions(level):
            optimizer.step()
    return [param.detach() for param in params]


@every_level
@every
def test_opposite_gradients_step_opposite_ways(name, level):
    for ours, opposite in zip(run(name, 1, level), run(name, -1, level), strict=True):
        assert ours.any()
        assert torch.equal(ours, -opposite)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("name", [name for name in FUSED if "Adam" not in name or "W" in name])
def test_opposite_gradients_step_opposite_ways_by_other_kernels(name, kernels):
    with backend(kernels):
        params = [nn.Parameter(torch.zeros(34, 150)) for _ in range(2)]
        grads = [symmetric((34, 150)), -symmetric((34, 150))]
        for param, grad in zip(params, grads, strict=True):
            optimizer = make(name, [param], weight_decay=0.0)
            for _ in range(2):
                param.grad = grad.clone()
                optimizer.step()
    assert torch.equal(params[0], -params[1])


def small_beside_large(shape):
    """Positive numbers over 24 orders of magnitude: each block has large ones and small ones."""
    generator = torch.Generator().manual_seed(0)
    return 10 ** (-24 * torch.rand(shape, generator=generator))


@pytest.mark.parametrize("name", [n for n, c in SECOND.items() if c.second_moment])
def test_no_second_moment_comes_back_as_zero(name):
    compressor = SECOND[name]
    for shape in ((64, 256), (33, 150)):
        x = small_beside_large(shape)
        back = compressor.decompress(compressor.compress(x, key=Key()))
        assert (back > 0).all()


@pytest.mark.parametrize("book", [*CODEBOOKS, "E2M2"])
def test_maps_with_a_zero_are_refused_for_second_moments(book):
    for signed in (False, True):
        if book == "DE-0" and signed:
            continue
        bits = 4 if not book.startswith("E") else 4 + signed
        values = codebook(book, bits=bits, signed=signed)
        compressor = COMPRESSORS["block"](map=book, bits=bits, signed=signed)
        refused = pytest.raises(ValueError, match="rounds small numbers to zero")
        with nullcontext() if values[0] > 0 else refused:
            layout.check_state(compressor, "exp_avg_sq")


@every
def test_a_gradient_that_stops_throws_no_weight_away(name):
    # If the second moment were zero and the first were not, the update would be m / eps.
    params = [nn.Parameter(torch.zeros(64, 256)) for _ in range(2)]
    optimizer = make(name, params[:1], lr=1e-3, weight_decay=0.0)
    plain = type(optimizer.original) if name == "CompressedOptimizer" else type(optimizer).plain
    options = {"momentum": 0.9} if name.startswith("SGD") else {}
    reference = plain(params[1:], lr=1e-3, weight_decay=0.0, **options)
    for second in (3e-4, 0.0):
        for param, own in zip(params, (optimizer, reference), strict=True):
            param.grad = torch.zeros(64, 256)
            param.grad[:, 0], param.grad[:, 1] = 1.0, second
            own.step()
    ours, theirs = (copy.copy(param.detach()) for param in params)
    assert (ours.abs() <= 1.5 * theirs.abs().max()).all()
