"""Gradients whose squares overflow make no weight Inf or NaN that torch leaves finite."""

import pytest
import torch
from torch import nn

from memtrain import optim
from memtrain.kernels.dispatch import backend
from memtrain.optim.states.layout import Choice
from tests.optim.test_zero_step import OPTIMIZERS, TORCH

SHAPE = (33, 136)
SIZES = {torch.float32: (1e20, 1e30, 3e38), torch.bfloat16: (1e20, 3e38), torch.float16: (6e4,)}
CASES = [
    (name, dtype)
    for name, (cls, _) in OPTIMIZERS.items()
    for dtype in SIZES
    if cls not in TORCH or dtype != torch.float16  # refused: their eps is 0
]


def pair(name, dtype):
    """A parameter with an optimizer, and its counterpart with the plain one; fused: in float32."""
    cls, options = OPTIMIZERS[name]
    options = {"lr": 1e-3, **options}
    start = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)
    own, other = nn.Parameter(start), nn.Parameter(start.clone() if cls in TORCH else start.float())
    if cls in TORCH:
        plain = getattr(torch.optim, cls)
        compressed = optim.CompressedOptimizer(plain([own], **options), Choice())
        return own, compressed, other, plain([other], **options)
    fused = getattr(optim, cls)
    plain = {k: v for k, v in options.items() if k not in ("first", "second")}
    return own, fused([own], **options), other, fused.plain([other], **plain)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # the interpreter's
@pytest.mark.each_value
@pytest.mark.parametrize("where", ["one", "row", "column", "all"])
@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("kernels", ["cpu", "reference", "triton"])
def test_weights_are_finite_where_torchs_are(kernels, name, dtype, where):
    at = {"one": (3, 5), "row": (3,), "column": (slice(None), 5), "all": ()}[where]
    for size in SIZES[dtype]:
        own, optimizer, other, plain = pair(name, dtype)
        for step in range(3):
            grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step)) * 1e-3
            grad[7], grad[:, 11] = 0.0, 0.0
            if not step:
                grad[at] = size
            own.grad = grad.to(dtype)
            other.grad = own.grad.to(other.dtype)
            with backend(kernels):
                optimizer.step()
            plain.step()
            assert own.isfinite()[other.to(dtype).isfinite()].all()
