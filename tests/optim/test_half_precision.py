"""Parameters of 16 bits: steps in float32 and rounded once, or torch's own in 16 bits."""

import copy

import pytest
import torch
from torch import nn

from memtrain.compressors import Block, Identity
from memtrain.optim import CompressedOptimizer, SplitWeights, compress, portable_state_dict
from tests.optim.behaviours import FUSED, make, make_plain
from tests.optim.torch_inputs import infos

HALVES = [torch.float16, torch.bfloat16]
UNSIGNED = Block(block_size=256, map="DE-0", bits=8, signed=False)
HAVE_EPS = [
    name
    for name, info in infos().items()
    if name not in ("Adafactor", "Muon", "SparseAdam")  # other eps, and arithmetic of their own
    and isinstance(info.optim_cls([nn.Parameter(torch.ones(1))]).defaults.get("eps"), float)
]


def gradients(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return (0.01 * torch.randn(80, 80, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", [name for name in FUSED if not name.endswith("Factor")])
def test_fused_steps_of_halves_are_those_of_float32(name, dtype):
    """Each from the states as they are held (factors are others after a step than before it)."""
    own = nn.Parameter((0.1 * torch.randn(80, 80)).to(dtype))
    optimizer = make(name, [own])
    # Half a last place, a thousandth of one for the order of float32's operations; of numbers
    # near 0, half of float16's smallest and four roundings of float32's numbers below 1.
    close = {"rtol": 1.001 * torch.finfo(dtype).eps / 2, "atol": 5 * 2**-25}
    for turn in range(4):
        whole = nn.Parameter(own.detach().float())
        plain = make_plain(name, [whole])
        if turn:
            plain.load_state_dict(portable_state_dict(optimizer))
        own.grad = gradients(dtype, turn)
        whole.grad = own.grad.float()
        optimizer.step()
        plain.step()
        torch.testing.assert_close(own.float(), whole.detach(), **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rmsprop_of_eight_bits_makes_torchs_steps_of_the_states_it_holds(dtype):
    own = nn.Parameter(torch.randn(80, 80, dtype=dtype))
    optimizer = CompressedOptimizer(torch.optim.RMSprop([own], 0.01, 0.9), lambda p, s: UNSIGNED)
    reference = nn.Parameter(own.detach().clone())
    plain = torch.optim.RMSprop([reference], 0.01, 0.9)
    for turn in range(4):
        own.grad = gradients(dtype, turn)
        reference.grad = own.grad.clone()
        optimizer.step()
        plain.step()
        assert torch.equal(own, reference)
        held = optimizer.unpacked(own)["square_avg"]
        exact = plain.state[reference]["square_avg"]
        # DE-0 has 7 bits between 0.1 and 1 times the block's largest, and fewer below.
        assert (held - exact).abs().max() <= exact.max() / 64
        exact.copy_(held)


@pytest.mark.parametrize("name", HAVE_EPS)
def test_an_eps_that_is_0_in_float16_is_refused(name):
    own = nn.Parameter(torch.randn(10, 5).half())
    inner = infos()[name].optim_cls([own], eps=1e-8)
    optimizer, start = CompressedOptimizer(inner, lambda p, s: Identity()), copy.deepcopy(own)
    before = copy.deepcopy(dict(optimizer.state))
    own.grad = torch.zeros_like(own)  # 0 / 0
    with pytest.raises(ValueError, match=rf"{name} steps .* eps=1e-08 is 0 .*allowed: eps"):
        optimizer.step()
    assert torch.equal(own, start)
    assert str(dict(optimizer.state)) == str(before)
    optimizer.param_groups[0]["eps"] = 1e-7
    optimizer.step()
    assert own.isfinite().all()


def test_float32_weights_held_in_float16_take_any_eps():
    torch.manual_seed(0)
    start = 0.1 * torch.randn(80, 80)
    own, whole = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = SplitWeights(compress(torch.optim.RMSprop([own], 0.01, 0.9)), "fp16+16")
    plain = compress(torch.optim.RMSprop([whole], 0.01, 0.9))
    for turn in range(5):
        own.grad = gradients(torch.float16, turn)
        whole.grad = own.grad.float()
        optimizer.step()
        plain.step()
    assert own.dtype == torch.float16
    # A master of float16 and 16 bits more is float32 but for its last bits.
    torch.testing.assert_close(optimizer.master(own), whole.detach(), rtol=2**-20, atol=2**-24)
