"""RReLU in training: torch's value and slopes, an unbiased gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memtrain.activations.intercept.hooks import Interception
from memtrain.activations.intercept.options import Options
from memtrain.activations.ops.leaky_relu import rrelu
from memtrain.audit.live_storages import saved_nbytes
from memtrain.compressors import DerivativeCode, Group, Key
from tests.activations.replaced import recognise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 300), (2, 3, 4, 5)])
@pytest.mark.parametrize("inplace", [False, True])
def test_value_is_torchs_and_exact_where_the_slope_is_one(shape, dtype, inplace):
    x = torch.randn(shape, dtype=dtype)
    twin, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.manual_seed(0)
    expected = F.rrelu(twin * 1, training=True)
    torch.manual_seed(0)
    y = rrelu(ours * 1, 1 / 8, 1 / 3, Group(bits=8), Key(), inplace=inplace)
    assert torch.equal(y, expected)
    grad = torch.randn_like(x)
    expected.backward(grad)
    y.backward(grad)
    above = x > 0
    if above.any() and shape != ():
        assert torch.equal(ours.grad[above], twin.grad[above])
    # One step of 8 bits between slopes of at least 1/8 and at most 1, bounds rounded outwards.
    step = (1 - 1 / 8) / 255 * (1 + 2**-7) + 2**-8 * torch.finfo(torch.float32).eps
    slack = torch.finfo(dtype).eps
    assert ((ours.grad - twin.grad).abs() <= grad.abs() * (step + 2 * slack)).all()


def test_gradient_is_unbiased():
    x = -torch.rand(64) - 0.1
    x[0] = 1.0
    draws = []
    for call in range(400):
        given = x.clone().requires_grad_()
        torch.manual_seed(0)
        rrelu(given, 0.1, 0.5, Group(bits=2, group_size=64), Key(call=call)).sum().backward()
        draws.append(given.grad)
    torch.manual_seed(0)
    exact = x.clone().requires_grad_()
    F.rrelu(exact, 0.1, 0.5, training=True).sum().backward()
    draws = torch.stack(draws)
    error = (draws.mean(0) - exact.grad).abs()
    # Between two codes a step of (1 - 0.1) / 3 apart no deviation is above half a step.
    assert (error <= 5 * 0.5 * 0.91 / 3 / 400**0.5).all()
    assert (draws[:, 1:].std(0) > 0).float().mean() > 0.9


def test_the_interception_finds_it_in_training_and_its_mean_slope_else():
    model = nn.Sequential(nn.Linear(64, 256), nn.RReLU(), nn.Linear(256, 64))
    x, records = torch.randn(32, 64), []
    interception = Interception(
        model,
        lambda site: DerivativeCode(bits=3) if site.op == "rrelu" else Group(bits=4),
        options=Options(min_elements=64),
        seed=0,
        on_saved=records.extend,
    )
    interception.attach()
    saved_nbytes(lambda: model(x), exclude=[x])
    interception.detach()
    planned = {record.site.name: record.planned for record in records if record.planned}
    sizes = (32 * 256 * 3 // 8, 32 * 256 // 256 * 4)  # codes, and a pair of bounds per group
    assert planned["1 / rrelu / input"] <= sum(sizes)
    call = recognise("rrelu", (x,), {"training": True})
    assert call.accepts(Group())  # and a nonlinearity with a table does not
    mean = recognise("rrelu", (x,), {"training": False})
    assert call.op == mean.op == "rrelu"
    assert not mean.accepts(Group())
