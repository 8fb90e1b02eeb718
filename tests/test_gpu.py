"""Steps, copies and training on CUDA tensors; none has run on a GPU yet.

MEMTRAIN_GPU=1 python -m pytest -q -m gpu
"""

import pytest
import torch
from torch import nn

import memtrain
from memtrain.activations.ops.dropout import dropout
from memtrain.compressors import Host, Identity, Key
from memtrain.optim import AdamW4bit

pytestmark = pytest.mark.gpu

SHAPES = [(300, 257), (1000, 77), (8, 512, 768), (4099,)]


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


def test_a_captured_step_is_refused():
    param = nn.Parameter(torch.ones(80, 80, device="cuda"))
    optimizer, graph = AdamW4bit([param]), torch.cuda.CUDAGraph()
    param.grad = torch.ones_like(param)
    with torch.cuda.graph(graph):
        param.grad.mul_(2)  # torch warns of an empty graph
        with pytest.raises(RuntimeError, match="can't be captured in a CUDA graph"):
            optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dropout_and_its_gradient_are_torchs(dtype):
    def run(f):
        torch.manual_seed(3)
        x = torch.linspace(-3, 3, 5000, device="cuda").to(dtype).requires_grad_()
        y = f(x, 0.1)
        return y, torch.autograd.grad(y, x, torch.linspace(1, 2, 5000, device="cuda").to(dtype))[0]

    for ours, theirs in zip(run(dropout), run(nn.functional.dropout), strict=True):
        assert torch.equal(ours, theirs)


def test_one_optimizer_steps_parameters_of_the_cpu_and_of_cuda():
    def run(devices):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(64, 256).to(device)) for device in devices]
        optimizer = AdamW4bit(params, lr=1e-2)
        for p in params:
            p.grad = torch.randn(64, 256).to(p.device)
        optimizer.step()
        return [p.detach().cpu() for p in params]

    for a, b in zip(run(["cpu", "cuda", "cpu"]), run(["cpu"] * 3), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_forward_that_swaps_holds_three_payloads():
    inner = Identity()
    compressor = Host(inner=inner)
    x = torch.randn(64, 2**16, device="cuda")  # 16 MiB
    packed, nbytes = [], inner.compress(x, key=Key()).tensors[inner.parts[0]].nbytes
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for k in range(20):
        packed.append(compressor.compress(x + k, key=Key(call=k)))
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 3 * nbytes + 4 * x.nbytes  # and the sum, and what `inner` works in
    for k in reversed(range(20)):
        expected = inner.decompress(inner.compress(x + k, key=Key(call=k)))
        assert torch.equal(compressor.decompress(packed[k]), expected)


@pytest.mark.parametrize("clip", ["none", "parameter"])
def test_states_in_host_memory_are_stepped_as_on_the_cpu(clip):
    """The CPU's own kernels step both, by gradients that the device has brought."""
    release = {"clip": clip, "limit": 0.1}
    cfg = {"preset": "all_four", "optim": {"device": "cpu"}, "release": release}
    torch.manual_seed(0)
    there = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    here = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    here.load_state_dict(there.state_dict())
    there, optimizer = memtrain.wrap(there.cuda(), torch.optim.AdamW(there.parameters()), cfg)
    here, twin = memtrain.wrap(here, torch.optim.AdamW(here.parameters()), cfg)
    seen = {}
    for name, p in there.named_parameters():  # before a gradient is freed; hooks go in order
        p.register_hook(lambda grad, name=name: seen.__setitem__(name, grad.cpu()))
    for step in range(5):
        there(torch.randn(16, 256, device="cuda")).float().square().mean().backward()
        optimizer.step()
        assert all(p.grad is None for p in there.parameters())
        for name, p in reversed([*here.named_parameters()]):
            p.grad = seen[name]
        twin.step()
        for ours, theirs in zip(there.parameters(), here.parameters(), strict=True):
            assert torch.equal(ours.cpu(), theirs), step
    held = [x for own in optimizer.state.values() for x in torch.utils._pytree.tree_leaves(own)]
    assert all(x.is_cpu for x in held if isinstance(x, torch.Tensor))
