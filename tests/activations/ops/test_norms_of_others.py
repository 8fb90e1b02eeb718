"""Normalizations that other code writes out, or runs across processes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules import _functions as functions

from memtrain.activations.intercept.replaced_ops import recogniser
from memtrain.activations.ops import norm_calls
from memtrain.activations.ops.method_sources import defined
from memtrain.activations.saved import known_ops
from memtrain.activations.saved.site import Site
from memtrain.compressors import Group, Identity, Key
from tests.activations.intercept.intercepted import intercept
from tests.activations.ops.test_norms import errors, gradients


def _written_out():
    pytest.importorskip("transformers")
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.mistral.modeling_mistral import MistralRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    return {
        "llama": (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm),
        "cast_last": (GptOssRMSNorm, Gemma3nRMSNorm),
        "gemma": (GemmaRMSNorm,),
        "t5": (T5LayerNorm,),
    }


@pytest.mark.parametrize("form", ["llama", "cast_last", "gemma", "t5"])
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_written_out_rms_norms_are_known_and_equal(form, dtype, weight_dtype):
    for make in _written_out()[form]:
        plain = make(48)
        nn.init.normal_(plain.weight)
        plain.to(weight_dtype)
        mine, wide = copy.deepcopy(plain), copy.deepcopy(plain).float()
        x = (torch.randn(6, 5, 48) * 2).to(dtype).requires_grad_()
        twin, exact = (x.detach().clone().to(d).requires_grad_() for d in (dtype, torch.float32))
        call = norm_calls.recognise_module(form, mine, x)
        assert norm_calls.variant_of(type(plain)) == form
        y, expected = call.run(Identity(), Key()), plain(twin)
        assert y.dtype == expected.dtype
        assert torch.equal(y, expected)
        grad = torch.randn(6, 5, 48).to(y.dtype)
        ours, theirs = gradients(y, grad, x, mine), gradients(expected, grad, twin, plain)
        truth = gradients(wide(exact), grad.float(), exact, wide)
        assert [g.dtype for g in ours] == [g.dtype for g in theirs]
        for a, b, t in zip(ours, theirs, truth, strict=True):
            t = t.double()
            rounding = 4 * max(torch.finfo(d).eps for d in (dtype, weight_dtype))
            assert errors([a], [t])[0] <= 2 * errors([b], [t])[0] + rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_written_out_norm_without_a_weight_is_known_and_equal(dtype):
    pytest.importorskip("transformers")
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm

    plain = Gemma3nRMSNorm(48, with_scale=False)
    x = (torch.randn(6, 5, 48) * 2).to(dtype).requires_grad_()
    twin, exact = (x.detach().clone().to(d).requires_grad_() for d in (dtype, torch.float32))
    y = recogniser(type(plain))(plain, x).run(Identity(), Key())
    expected, truth = plain(twin), plain(exact)
    assert torch.equal(y, expected)
    grad = torch.randn(6, 5, 48).to(dtype)
    (ours,), (theirs,) = torch.autograd.grad(y, x, grad), torch.autograd.grad(expected, twin, grad)
    (t,) = torch.autograd.grad(truth, exact, grad.float())
    rounding = 4 * torch.finfo(dtype).eps
    t = t.double()
    assert errors([ours], [t])[0] <= 2 * errors([theirs], [t])[0] + rounding


def test_modules_of_other_code_are_left_alone():
    class HalfRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6

        def forward(self, x):
            return 0.5 * self.weight * x

    x = torch.randn(2, 64)
    assert recogniser(HalfRMSNorm) is None
    assert recogniser(nn.RMSNorm) is None
    (cls, *_) = _written_out()["llama"]
    module = cls(64)
    assert recogniser(cls)(module, x) is not None
    assert recogniser(cls)(module, torch.randn(2, 32)) is None


@pytest.mark.parametrize("of", ["class", "module"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_that_the_user_replaced_is_the_one_that_runs(of, when, monkeypatch):
    (cls, *_) = _written_out()["llama"]
    x, module = torch.randn(32, 64), cls(64)
    intercept(nn.Sequential(cls(64)), lambda site: Group(bits=4), [])  # the class is known

    def replace():
        owner = cls if of == "class" else module
        monkeypatch.setattr(owner, "forward", lambda *args: 3 * args[-1])

    if when == "before":
        replace()
    model = nn.Sequential(module)
    intercept(model, lambda site: Group(bits=4), [])
    if when == "after":
        replace()
    assert torch.equal(model(x), 3 * x)


def test_the_forward_of_a_class_is_restored_with_the_last_interception():
    (llama, *_) = _written_out()["llama"]
    original = defined(llama, "forward")
    cls = type("Norm", (llama,), {"forward": original})
    models = [nn.Sequential(cls(64), cls(64)) for _ in range(2)]
    first, second = (intercept(model, lambda site: Group(bits=4), []) for model in models)
    first.detach()
    assert cls.forward is not original
    second.detach()
    assert cls.forward is original


def test_a_model_that_writes_its_norm_out_is_intercepted():
    (cls, *_) = _written_out()["llama"]
    records = []
    model = nn.Sequential(nn.Linear(64, 96), cls(96), nn.Linear(96, 8))
    x = torch.randn(32, 64)
    plain = model(x)
    intercept(model, lambda site: Group(bits=4), records, derives=0)
    assert torch.equal(model(x), plain)
    norms = [r for r in records if r.site.module == "1" and r.planned]
    assert {r.site.op for r in norms} == {"rms_norm"}
    # 3,072 elements at 4 bits, two bounds per group of 256, and 32 numbers of 4 bytes
    assert sum(r.planned for r in norms) == 3072 // 2 + 12 * 4 + 32 * 4


class _Normalise(torch.autograd.Function):
    """What torch's SyncBatchNorm runs and saves across processes, in one of them."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y, mean, rstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, rstd, torch.tensor([len(x)], dtype=torch.int32))
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, mean, rstd, _ = ctx.saved_tensors
        backward = torch.ops.aten.native_batch_norm_backward
        return *backward(dy, x, weight, None, None, mean, rstd, True, ctx.eps, [True] * 3), None


class SyncBatchNorm(nn.BatchNorm2d):
    def forward(self, x):
        return _Normalise.apply(x, self.weight, self.bias, self.eps)


class Custom(SyncBatchNorm):
    """A Function that nobody knows."""


@pytest.mark.parametrize("cls", [SyncBatchNorm, Custom])
def test_a_norm_across_processes_keeps_its_input_in_groups(cls, monkeypatch):
    known = known_ops.KNOWN[functions.SyncBatchNorm._backward_cls]
    if cls is SyncBatchNorm:  # torch's own runs on CUDA alone
        monkeypatch.setitem(known_ops.KNOWN, _Normalise._backward_cls, known)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), cls(16), nn.Conv2d(16, 4, 3))
    records, x = [], torch.randn(8, 3, 18, 18)
    model(x).square().sum().backward()
    exact = model[0].weight.grad.clone()
    model.zero_grad()
    intercept(model, lambda site: Group(bits=8), records)
    model(x).square().sum().backward()
    (row,) = [r for r in records if r.site.module == "1" and r.nbytes == 8 * 16 * 16 * 16 * 4]
    if cls is Custom:
        assert "custom autograd Function" in row.reason
        return
    assert row.site == Site("1", "sync_batch_norm", "input")
    assert row.planned == Group(bits=8).compress(torch.zeros(8 * 16**3), key=Key()).nbytes
    # 256 numbers lie within 8 deviations, in 255 steps; rounding is unbiased, and errors add up
    # over sums of a thousand: a gradient is off by less than one step of its inputs.
    error = (model[0].weight.grad - exact).norm() / exact.norm()
    assert 0 < error < 8 / 255
