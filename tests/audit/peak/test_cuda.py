"""Each correction of a trace on the CPU, by hand."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memtrain.activations.ops import batch_norm
from memtrain.audit.peak import StepOptions, cuda
from memtrain.audit.peak.predict import predict
from memtrain.compressors import Group
from memtrain.kernels.dispatch import simulating


def saved_bytes(forward, x):
    """Bytes of what autograd keeps, besides what is older."""
    found = {}

    def pack(tensor):
        found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), cuda.CudaForms():
        y = forward(x)
    older = {t.untyped_storage()._cdata for t in (x, y)}
    return sum(size for key, size in found.items() if key not in older), y


def test_a_dropout_mask_takes_one_byte_on_cuda():
    x = torch.ones(64, 32, requires_grad=True)
    for dropout in (lambda x: F.dropout(x, 0.25), nn.Dropout(0.25)):
        nbytes, y = saved_bytes(dropout, x)
        assert nbytes == 64 * 32
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad, y.detach())
    for off in (lambda x: F.dropout(x, 0.5, training=False), lambda x: F.dropout(x, 0.0)):
        assert saved_bytes(off, x)[0] == 0


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_is_one_kernel_on_cuda_with_dropout_and_mask_too(dropout):
    x = torch.ones(2, 4, 100, 16, requires_grad=True)
    mask = torch.ones(100, 100, dtype=torch.bool)

    def attend(x):
        q, k, v = x * 1, x * 2, x * 3
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)

    nbytes, y = saved_bytes(attend, x)
    bias = 4 * 100 * 104  # rows of whole 32 bytes
    assert nbytes == 3 * x.nbytes + 4 * 2 * 4 * 100 + bias
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape


@pytest.mark.parametrize(
    ("shape", "dtype", "nbytes"),
    [
        ((2, 1, 64, 64), torch.bool, 2 * 2 * 64 * 64),
        ((2, 1, 1, 64), torch.bool, 2 * 2 * 64),
        ((64, 64), torch.bool, 2 * 64 * 64),
        ((2, 4, 64, 60), torch.bool, 2 * 2 * 4 * 64 * 64),
        ((2, 1, 64, 64), torch.bfloat16, 0),  # the mask itself
        ((2, 1, 64, 60), torch.bfloat16, 2 * 2 * 64 * 64),
        ((2, 1, 64, 64), torch.float32, 2 * 2 * 64 * 64),  # autocast's copy
    ],
    ids=str,
)
def test_each_call_of_attention_makes_its_mask_a_bias_on_cuda(shape, dtype, nbytes):
    x = torch.ones(2, 4, 64, 16, dtype=torch.bfloat16, requires_grad=True)
    mask, found = torch.ones(shape, dtype=dtype), []
    keys = x[:, :, : shape[-1]]
    for given in (None, mask):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            found.append(saved_bytes(lambda x, m=given: twice(x, keys.detach(), attn_mask=m), x)[0])
    own = mask.nbytes if nbytes == 0 else 2 * nbytes
    assert found[1] - found[0] == own


def twice(x, keys, attn_mask):
    """Attention of two layers that share a mask."""
    y = F.scaled_dot_product_attention(x, keys, keys, attn_mask=attn_mask)
    return F.scaled_dot_product_attention(y, keys, keys, attn_mask=attn_mask)


def test_autocast_keeps_on_cuda_in_float32_what_it_keeps_there():
    x = torch.ones(4, 32, requires_grad=True)
    weight = torch.ones(32, 32)
    with cuda.CudaForms(), torch.autocast("cpu", torch.bfloat16):
        low = F.linear(x, weight)
        found = {
            "linear": low,
            "layer_norm": F.layer_norm(low, (32,)),
            "softmax": low.softmax(-1),
            "pow": low**3,
            "gelu": F.gelu(low),
            "attention": F.scaled_dot_product_attention(*3 * [x.view(1, 4, 4, 8)]),
        }
    assert {name for name, y in found.items() if y.dtype == torch.float32} == {
        "layer_norm",
        "softmax",
        "pow",
    }


@pytest.mark.parametrize("autocast", [False, True])
def test_a_group_norm_of_channels_last_is_copied_on_cuda(autocast):
    x = torch.ones(2, 8, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    x = x.bfloat16() if autocast else x
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        nbytes, y = saved_bytes(lambda x: F.group_norm(x, 2), x)
    statistics = 2 * 4 * 2 * 2
    assert nbytes == 4 * x.numel() + statistics  # autocast's copy, which is in float32
    assert y.is_contiguous()
    run = partial(batch_norm.group_norm, x, 2, compressor=Group(bits=4))
    assert run().is_contiguous(memory_format=torch.channels_last)
    with simulating("cuda"):
        assert run().is_contiguous()


def test_a_step_on_cuda_by_hand():
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters())
    batch = torch.ones(10, 100)
    options = StepOptions(device="cuda")
    found = {m.label: m for m in predict(model, optimizer, batch, None, options).moments}
    forward = found["forward of 1 / dropout"]
    # 40,000 bytes of weights and 4,000 of inputs, outputs and result, 1,000 of the mask
    assert forward.parts["allocator rounding"] == (40448 - 40000) + 3 * (4096 - 4000) + 1024 - 1000
    assert forward.parts["workspaces"] == cuda.CUBLAS
    assert forward.parts["saved activations"] == 1000
    assert found["step"].parts["workspaces"] == 2 * cuda.CUBLAS
    sm90 = predict(model, optimizer, batch, None, StepOptions(device="cuda:sm_90"))
    assert sm90.peak.nbytes - found["step"].nbytes >= 2 * (cuda.CUBLAS_SM90 - cuda.CUBLAS)
    with pytest.raises(ValueError, match="allowed: cpu, cuda, cuda:sm_90"):
        StepOptions(device="tpu")


def test_a_workspace_follows_the_devices_capability_and_the_environment(monkeypatch):
    def forward(device="cuda", capability=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        return cuda.workspaces(device)["forward"]

    assert forward() == forward(capability=(8, 6)) == forward(capability=(11, 0)) == cuda.CUBLAS
    for capability in ((9, 0), (10, 0), (12, 0)):
        assert forward(capability=capability) == 32 * 2**20
    assert forward("cuda:sm_90") == forward("cuda:sm_90", (8, 0)) == 32 * 2**20
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8:4096:2")
    assert forward(capability=(9, 0)) == forward() == (16 * 8 + 4096 * 2) * 1024


class Dropout(nn.Module):
    """Drops in a module and in its own code."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(64, 256), nn.Dropout(0.1), nn.Linear(256, 64)

    def forward(self, x):
        return F.dropout(self.second(self.drop(F.gelu(self.first(x)))), 0.1)


@pytest.mark.parametrize("rules", [[], [{"op": "dropout", "compressor": "keep"}]], ids=str)
def test_what_is_computed_again_saves_what_it_saved_at_first(rules):
    model = nn.Sequential(Dropout(), Dropout())
    optimizer = torch.optim.SGD(model.parameters())
    activations = {"exceptions": rules, "recompute": ["*"]}
    config = {"preset": "balanced", "activations": activations}
    device = StepOptions(device="cuda")
    assert predict(model, optimizer, torch.ones(32, 64), config, device).peak.nbytes > 0
