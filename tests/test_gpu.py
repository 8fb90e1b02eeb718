"""Every Triton kernel natively, against the reference on a CPU; training on CUDA tensors.

    MEMTRAIN_GPU=1 python -m pytest -q -m gpu tests/test_gpu.py

The variable keeps the tests out of Triton's interpreter. These have not run on a GPU yet.
"""

import pytest
import torch
from torch import nn

import memtrain
from memtrain.compressors import COMPRESSORS, Key
from memtrain.kernels.dispatch import backend, choose
from memtrain.optim import AdamW4bit

pytestmark = pytest.mark.gpu

SHAPES = [(300, 257), (1000, 77), (8, 512, 768), (4099,)]
FLOATS = ["group", "derivative", "block", "rank1", "factored"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FLOATS)
def test_payloads_equal_the_reference(name, dtype, shape):
    if name in ("rank1", "factored") and len(shape) < 2:
        shape = (1, *shape)
    x = torch.randn(shape).abs().to(dtype)
    compressor = COMPRESSORS[name]()
    with backend("reference"):
        expected = compressor.compress(x, key=Key(seed=5))
        whole = compressor.decompress(expected)
    assert choose(x.cuda()) == "triton"
    packed = compressor.compress(x.cuda(), key=Key(seed=5))
    for part, tensor in expected.tensors.items():
        got = packed.tensors[part].cpu()
        if tensor.dtype == torch.uint8:
            # the same arithmetic; a tie may fall to the other side
            assert (got != tensor).float().mean() < 1e-4
        else:
            torch.testing.assert_close(got, tensor)
    close = torch.isclose(compressor.decompress(packed).cpu().float(), whole.float(), rtol=1e-3)
    assert (~close).float().mean() < 1e-3


@pytest.mark.parametrize("second", ["Rank-1/Linear", "B128/Linear", "factored"])
def test_adamw_steps_as_on_the_cpu(second):
    def run(device):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        grads = [[torch.randn(shape) for shape in SHAPES] for _ in range(5)]
        params = [nn.Parameter(p.detach().to(device)) for p in params]
        optimizer = AdamW4bit(params, lr=1e-2, second=second)
        for step in grads:
            for p, g in zip(params, step, strict=True):
                p.grad = g.to(device)
            optimizer.step()
        return params

    for a, b in zip(run("cpu"), run("cuda"), strict=True):
        # a tie that falls to the other side moves one element by less than one step of the update
        assert (a - b.cpu()).abs().median() < 1e-6
        assert (a - b.cpu()).abs().max() < 5e-2


@pytest.mark.parametrize("preset", ["exact", "balanced", "smallest"])
def test_training_on_cuda_takes_less_memory_and_reaches_the_loss(preset):
    def run(wrapped):
        torch.manual_seed(0)
        layers = [m for _ in range(4) for m in (nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512))]
        model = nn.Sequential(*layers, nn.Linear(512, 10)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if wrapped:
            model, optimizer = memtrain.wrap(model, optimizer, preset)
        x = torch.randn(8192, 512, device="cuda")
        y, first = x[:, :10].argmax(1), 0.0
        for step in range(30):
            torch.cuda.reset_peak_memory_stats()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            first = loss.item() if step == 0 else first
        return first, loss.item(), torch.cuda.max_memory_allocated()

    first, plain, peak = run(wrapped=False)
    _, wrapped, peak_wrapped = run(wrapped=True)
    assert first - wrapped > 0.9 * (first - plain)
    if preset == "exact":
        assert wrapped == plain
    else:
        assert peak_wrapped < 0.6 * peak
