"""Code that inductor generates: it calls what packs a save at its place, past the dispatcher."""

import re

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor
from torch._inductor.codegen.custom_extern_kernel_codegen import (
    CUSTOM_EXTERN_KERNEL_CODEGEN as REGISTRY,
)
from torch._inductor.scheduler import Scheduler
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

import memtrain
from memtrain.activations.intercept import compiler_internals
from memtrain.activations.saved import payload_ops
from memtrain.activations.saved.flatten import flatten
from memtrain.compressors import Group

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("fresh_compiler"),
]
CALL = "= torch.ops.memtrain."


def step(x):
    """The gradients of a new model's compiled step on `x`, and the code of its graphs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.LayerNorm(64))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = memtrain.wrap(model, sgd, ["preset=balanced", "activations.min_elements=1"])
    model.compile()

    def run():
        model(x).square().mean().backward()

    _, codes = run_and_get_code(run)
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    run()  # by what the first run has found
    return model, [*first, *(p.grad.clone() for p in model.parameters())], "\n".join(codes)


@pytest.mark.parametrize("how", ["Python", pytest.param("C++", marks=pytest.mark.nightly)])
def test_a_step_by_what_serves_a_place_is_that_by_ops(how, monkeypatch):
    x = torch.randn(2, 64, 64)
    direct = how == "Python"
    with inductor.patch(cpp_wrapper=not direct, fx_graph_cache=False):
        _, found, code = step(x)
        assert ("= compressor_at_buf" in code) == ("= decompressor_at_buf" in code) == direct
        assert CALL not in code
    torch.compiler.reset()
    monkeypatch.setattr(compiler_internals, "call_directly", lambda *_: None)
    for name in [name for name in REGISTRY if name.startswith("torch.ops.memtrain.")]:
        monkeypatch.delitem(REGISTRY, name)
    with inductor.patch(fx_graph_cache=False):
        _, expected, code = step(x)
    assert CALL in code
    assert "compressor_at_buf" not in code
    assert all(map(torch.equal, found, expected))


class Names(TorchDispatchMode):
    """The ops that run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


def test_modes_see_the_ops_of_code_that_was_generated_without_them():
    x = torch.randn(2, 64, 64)
    model, _, code = step(x)
    model.zero_grad()
    loss = model(x).square().mean()
    with Names() as names:
        loss.backward()
    calls = code.count("= decompressor_at_buf")
    assert names.seen.count("memtrain.decompress_saved.default") == calls > 0


def test_what_the_host_reads_is_decompressed_in_the_same_places(monkeypatch):
    x = torch.randn(2, 64, 64)

    def order(code):
        return re.findall(r"(compressor_at|decompressor_at|extern_kernels|cpp_\w+)[_.(]", code)

    _, expected, usual = step(x)
    torch.compiler.reset()
    op = payload_ops.decompress_on_host_op.default
    monkeypatch.setattr(payload_ops, "decompressing", lambda parts: op)
    with inductor.patch(fx_graph_cache=False):
        model, found, code = step(x)
    assert order(code) == order(usual)
    assert CALL not in code
    assert all(map(torch.equal, found, expected))
    loss = model(x).square().mean()
    with Names() as names:
        loss.backward()
    assert names.seen.count(str(op)) == code.count("= decompressor_at_buf") > 0


def test_shapes_that_vary_and_branches_of_a_graph_have_places_of_their_own():
    compiler_internals.call_directly(
        payload_ops.compress_op.default, payload_ops.compressor_at, "x"
    )
    compiler_internals.call_directly(
        payload_ops.decompress_op.default, payload_ops.decompressor_at, "parts shape"
    )
    form = payload_ops.form_of(Group(bits=8), flatten(torch.zeros(4, 256))[1], Group.parts)
    key = 0, 1, 0, payload_ops.graph_number(), 0

    def packed(x):
        parts = payload_ops.compress(2 * x, form, key)
        return payload_ops.decompress(parts, form, x.shape, x.dtype)

    @torch.compile(dynamic=True)
    def run(x, flag):
        return torch.cond(flag.sum() > 0, packed, lambda x: packed(-x), (x,)) + packed(x)

    x = torch.randn(4, 256)
    _, codes = run_and_get_code(run, x, torch.ones(1))
    assert codes[0].count("compressor_at(") >= 6  # three to compress, three to decompress
    for rows in (4, 7, 3, 7):
        x = torch.randn(rows, 256)
        for flag, times in ((torch.ones(1), 4), (-torch.ones(1), 0)):
            assert (run(x, flag) - times * x).abs().max() < 0.2


def test_a_place_within_a_part_that_a_cuda_graph_would_hold(monkeypatch):
    def unsafe(scheduler, node, *_, **__):
        held = getattr(node.node, "op_overload", None)
        return "unsafe" if held is payload_ops.compress_op.default else None

    x = torch.randn(2, 64, 64)
    _, expected, _ = step(x)
    torch.compiler.reset()
    monkeypatch.setattr(Scheduler, "should_partition", unsafe)
    with inductor.patch(fx_graph_cache=False):
        _, found, code = step(x)
    parts = re.findall(r"\ndef partition_\d+\(.*?\n\n", code, re.DOTALL)
    assert any("= decompressor_at_buf" in part for part in parts)
    assert all(map(torch.equal, found, expected))
