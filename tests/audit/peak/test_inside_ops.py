"""What torch's ops hold inside themselves is what its allocator says, forwards and backwards."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain.audit.allocations import Allocations
from memtrain.audit.peak import op_workspace
from memtrain.audit.peak.op_workspace import workspace_of

BLOCK = 4 * 60 * 60
"""Bytes of the block through which torch copies a transposed matrix, part by part."""


class Inside(TorchDispatchMode):
    """Op -> bytes that it held inside, as declared and as allocated."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with Allocations(torch.device("cpu")) as live:
            result = func(*args, **kwargs)
            inside = live.peak_nbytes - live.nbytes()
        self.rows.append((func, workspace_of(func, args, kwargs, result), inside))
        return result


def r(*shape):
    return torch.randn(*shape, requires_grad=True)


def last(*shape):
    n, c, h, w = shape
    return r(n, h, w, c).permute(0, 3, 1, 2)


def conv(*sizes, x, **options):
    kind = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[x.dim()]
    return lambda: kind(*sizes, **options)(x)


CASES = {
    "classes last": lambda: F.cross_entropy(
        r(64, 100, 32).transpose(1, 2), torch.ones(64, 100).long()
    ),
    "softmax of columns": lambda: r(256, 512).t().softmax(1),
    "norm of columns": lambda: nn.BatchNorm1d(64)(r(32, 64, 64).transpose(1, 2)),
    "norm of maps": lambda: nn.BatchNorm2d(64)(r(4, 64, 32, 32)),
    "layer norm of columns": lambda: nn.LayerNorm(64)(r(32, 64, 64).transpose(1, 2)),
    "product": lambda: r(512, 64) @ r(64, 512),
    "products": lambda: r(8, 512, 64) @ r(8, 512, 64).transpose(1, 2),
    "linear": lambda: F.linear(r(512, 64), r(512, 64), r(512)),
    "attention": lambda: F.scaled_dot_product_attention(
        r(2, 4, 256, 64), r(2, 4, 512, 64), r(2, 4, 512, 64)
    ),
    "long attention": lambda: F.scaled_dot_product_attention(*[r(2, 4, 768, 64)] * 3),
    "convolution": conv(32, 64, 3, 2, padding=1, x=r(4, 32, 32, 32)),
    "depthwise, last": conv(64, 64, 7, padding=3, groups=64, x=last(4, 64, 32, 32)),
    "3-d, transposed": lambda: nn.ConvTranspose3d(32, 16, 2, 2)(r(2, 32, 8, 16, 16)),
    "up": lambda: F.interpolate(r(4, 16, 32, 32), scale_factor=2, mode="bilinear"),
    "up, last": lambda: F.interpolate(last(4, 16, 32, 32), scale_factor=2, mode="bilinear"),
    "pooled": lambda: F.max_pool2d(r(4, 64, 32, 32), 2),
    "padded": lambda: F.pad(r(8, 16, 32, 32), (1, 1, 1, 1), mode="reflect"),
    "rolled": lambda: r(8, 16, 32, 32).roll((1, 2, 3), (1, 2, 3)),
    "with logits": lambda: F.binary_cross_entropy_with_logits(r(64, 1024), torch.rand(64, 1024)),
    "gelu": lambda: F.gelu(r(64, 4096)),
    "spectrum": lambda: torch.fft.rfft2(r(4, 16, 64, 64)).abs(),
    "a number": lambda: F.mse_loss(r(1)[0].abs(), torch.ones(())),
    "weight norm": lambda: torch._weight_norm(r(256, 512), r(256, 1), 0),
    "sampled": lambda: F.grid_sample(
        r(4, 16, 32, 32), torch.rand(4, 32, 32, 2), align_corners=False
    ),
}  # fmt: skip


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "expanded"])
@pytest.mark.parametrize("name", CASES)
def test_an_op_holds_inside_what_it_declares(name, dense):
    torch.set_num_threads(1)
    with Inside() as inside:
        y = CASES[name]()
        (y.square() if dense else y).sum().backward()
    for func, declared, allocated in inside.rows:
        assert declared == pytest.approx(allocated, rel=0.03, abs=BLOCK), func


def test_many_samples_save_what_a_few_of_them_predict(monkeypatch):
    run = conv(32, 64, 3, 2, padding=1, x=r(24, 32, 32, 32))
    monkeypatch.setattr(op_workspace, "SAMPLE", 7 * 4 * 32 * 32 * 32)
    torch.set_num_threads(1)
    with Inside() as inside:
        run().square().sum().backward()
    names = [func._schema.name for func, _, _ in inside.rows]
    assert {"aten::convolution", "aten::convolution_backward"} <= {*names}
    for func, declared, allocated in inside.rows:
        assert declared == pytest.approx(allocated, rel=0.03, abs=BLOCK), func
