"""Compiled models beside what else there is: modes, steps, caches, ops that are not traced."""

import copy
import gc
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.activations import NewGELUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import memtrain
from memtrain.activations.saved import payload_ops
from memtrain.activations.saved.site import UNKNOWN_READER
from memtrain.compressors import Group, Host, Key
from tests.activations.intercept import compiled_nets as nets
from tests.activations.intercept.compiled_nets import gradient, held
from tests.activations.saved import test_factors as factors
from tests.activations.saved.test_reads import Model as Reading
from tests.activations.saved.test_reads import with_and_without

BACKEND = "aot_eager_decomp_partition"  # generates no code
COMPILED = partial(torch.compile, backend=BACKEND)
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("fresh_compiler"),
]


@torch.library.custom_op("memtrain_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halved.register_autograd(lambda ctx, gradient: gradient / 2)


@torch.library.custom_op("memtrain_tests::mul", mutates_args=())
def mul(x: torch.Tensor) -> torch.Tensor:
    """Takes a logarithm under another op's name."""
    return x.log()


mul.register_fake(torch.empty_like)
mul.register_autograd(
    lambda ctx, gradient: gradient / ctx.saved_tensors[0].exp(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Net(nn.Module):
    """Runs `between`, which saves nothing, between two parts."""

    def __init__(self, between=lambda x: x):
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 64)
        self.between = between

    def forward(self, x):
        return self.down(F.gelu(self.between(self.middle(F.gelu(self.up(x))))))


def wrapped(model, preset="balanced"):
    return memtrain.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), preset)


def planned(model):
    return nets.planned(model)[0]


def test_cuda_graphs_are_cut_at_the_compressing_op():
    compress = torch.ops.memtrain.compress_saved.default
    assert torch.Tag.cudagraph_unsafe in compress.tags  # its random bits come of the host's counter
    assert torch.Tag.cudagraph_unsafe not in torch.ops.memtrain.decompress_saved.default.tags


def test_an_op_of_someone_else_is_no_known_reader_of_a_result():
    def read(h):
        y = torch.exp(h)
        return y @ factors.WEIGHT + torch.ops.memtrain_tests.mul(y)

    model, _ = wrapped(Reading(read), ["preset=balanced", "activations.min_elements=0"])
    torch.compile(model, backend=BACKEND)(torch.randn(64, 64)).sum().backward()
    rows = memtrain.plan_of(model).entries("activation")
    assert {row.reason for row in rows if row.site.endswith("exp / saved")} == {UNKNOWN_READER}


PRODUCTS = {
    "elementwise": lambda h: (h - 0.1) * (h - 0.1),
    "matrix": lambda h: (h.view(64, 64, 1) @ h.view(64, 1, 64))[:, 3] + 8,
}
CHOOSES = nn.Linear(64, 64, bias=False)
del CHOOSES.weight
CHOOSES.register_buffer("weight", torch.eye(64))
KINDS = re.compile("chosen|convolution$|behind|a root$|logarithm of two$|indices|a mean$")
READERS = {
    **{name: op for name, op in factors.ALL.items() if KINDS.search(name)},
    "what is outside": lambda s: s,
    "a logarithm of what a buffer chooses": lambda s: CHOOSES(s).log(),
    "a norm of four": lambda s: factors.NORMS["batch_norm"](s, 4)[0].view(16, 64) @ factors.WEIGHT,
}


def eager_and_compiled(op):
    torch.manual_seed(0)
    return with_and_without(Reading(op), torch.randn(64, 64), run=COMPILED)[:2]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("reader", READERS)
def test_a_graph_keeps_the_factors_of_a_product_that_another_op_reads(product, reader):
    exact, mine = eager_and_compiled(lambda h: READERS[reader](PRODUCTS[product](h)))
    is_kept = (mine - exact).norm() < 1e-5 * exact.norm()  # graphs round in other ways
    assert is_kept.item() is (reader not in factors.LARGE)
    assert torch.cosine_similarity(mine, exact, 0) > 0.98


AGAIN = {
    "exp": lambda h: F.layer_norm((18 * h).exp(), (64,))[:, ::3],
    "a norm of four": lambda h: F.layer_norm(h.cumsum(1).view(-1, 4), (4,))[:, ::3],
    "confident log-probabilities": lambda h: F.cross_entropy(
        h + 8 * torch.eye(64), torch.arange(64), reduction="none"
    ).log(),
    "attention of exact inputs": lambda h: F.scaled_dot_product_attention(
        *[(h / (h.roll(1, 0).abs() + 0.01)).view(1, 4, 64, 16)] * 3
    ),
}


@pytest.mark.parametrize("op", AGAIN)
def test_a_graph_computes_results_again_as_they_were(op):
    exact, mine = eager_and_compiled(AGAIN[op])
    assert torch.cosine_similarity(mine, exact, 0) > 0.98


@pytest.mark.parametrize(
    ("compressor", "cut"),
    # A replay would read the host's part of the capture.
    [(Group(bits=4), False), (Host(inner=Group(bits=4)), True)],
    ids=repr,
)
def test_cuda_graphs_are_cut_where_the_host_reads_a_payload(compressor, cut):
    with FakeTensorMode():
        parts = compressor.compress(torch.empty(256, 64, device="cuda"), key=Key()).tensors
    op = payload_ops.decompressing([*parts.values()])
    assert (torch.Tag.cudagraph_unsafe in op.tags) == cut


@pytest.mark.nightly
@pytest.mark.filterwarnings("error:.*memtrain")
def test_reduce_overhead_on_a_cpu_compresses_as_any_mode():
    model, x = wrapped(Net())[0], torch.randn(64, 64)
    run, found = torch.compile(model, mode="reduce-overhead"), []
    for _ in range(2):
        model.zero_grad()
        y = run(x)
        assert held(y, x, *model.parameters()) == planned(model) < 64 * (256 + 64 + 64)
        y.square().mean().backward()
        found.append(gradient(model))
    assert not torch.equal(*found)
    assert F.cosine_similarity(*found, dim=0) > 0.99


@pytest.mark.nightly
def test_an_op_without_a_fake_form_is_torchs_error_and_compresses_outside_of_graphs():
    model, x = wrapped(Net(halved))[0], torch.randn(64, 64)
    with pytest.raises(Exception, match="no fake impl registered for <CustomOpDef"):
        torch.compile(model, backend=BACKEND)(x)
    torch.compiler.reset()
    model.between = torch.compiler.disable(halved)
    plain = Net(halved)
    plain.load_state_dict(model.state_dict())
    for one in (plain, model):
        y = torch.compile(one, backend=BACKEND)(x) if one is model else one(x)
        if one is model:
            assert held(y, x, *model.parameters()) == planned(model) < 64 * (256 + 64 + 64)
        y.square().mean().backward()
    assert F.cosine_similarity(gradient(model), gradient(plain), dim=0) > 0.98


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["balanced", "all_four"])
def test_an_optimizers_step_compiles_to_itself(preset):
    plain, x, ends = Net(), torch.randn(64, 64), []
    for compiled in (False, True):
        model, optimizer = wrapped(copy.deepcopy(plain), preset)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        run = torch.compile(model, backend=BACKEND)
        for _ in range(3):
            run(x).square().mean().backward()
            step()
            optimizer.zero_grad()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["all_four", "balanced"])
def test_what_no_gradient_reaches_is_compressed_where_a_layer_reads_it(preset):
    model, x = Net(), torch.randn(64, 64)
    if preset == "balanced":
        model.up.requires_grad_(False)
    wrapped(model, preset)
    y = torch.compile(model, backend=BACKEND)(x)
    assert held(y, x, *model.parameters()) == planned(model)
    rows = {str(row.site): row for row in memtrain.plan_of(model).entries("activation")}
    # bfloat16 weights read a copy of the user's tensor, a frozen layer's output is no weight's
    row = rows["up / linear / input" if preset == "all_four" else "middle / linear / input"]
    assert 0 < row.planned < row.nbytes / 3
    assert "Group" in row.compressor


def process(preset, model, caches):
    """Compile a model in a process of its own, and give what it says of that."""
    script = str(Path(__file__).with_name("compiled_process.py"))
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(caches), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, script, preset, model], env=environment, capture_output=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
def test_processes_of_other_plans_may_share_the_compilers_caches(tmp_path):
    presets = ("plain", "balanced", "smallest", "balanced")
    found = [process(preset, "mlp", tmp_path) for preset in presets]
    assert [one["held"] for one in found] == [one["planned"] for one in found]
    assert [(one["generated"], one["served"]) for one in found] == [(2, 0)] * 3 + [(0, 2)]
    plain, balanced, smallest, again = found
    assert balanced["gradient"] == again["gradient"]  # to the bit
    assert smallest["held"] < balanced["held"] == again["held"] < plain["held"] / 4
    gradients = torch.tensor([plain["gradient"], balanced["gradient"]])
    assert F.cosine_similarity(*gradients, dim=0) > 0.99


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_a_first_compilation_takes_half_again_of_plains_at_most(model, tmp_path):
    seconds = {"plain": [], "balanced": []}  # of the processor: compilers are counted
    for turn in range(3):
        for preset, found in seconds.items():
            found.append(process(preset, model, tmp_path / f"{preset}_{turn}")["seconds"])
    assert median(seconds["balanced"]) <= 1.5 * median(seconds["plain"])


@pytest.mark.parametrize("parts", [False, True], ids=["whole", "blocks"])
def test_what_was_compiled_and_trained_before_wrap_is_compiled_anew(parts):
    """Of torch's own modules: their graphs are not guarded by hooks that they did not have."""

    def block():
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    model = nn.Sequential(block(), block()) if parts else block()
    for part in model if parts else ():
        part.compile(backend=BACKEND)
    called = model if parts else torch.compile(model, backend=BACKEND)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(128, 64)
    called(x).sum().backward()
    optimizer.step()
    called, optimizer = memtrain.wrap(called, optimizer, ["preset=balanced", "strict=true"])
    called(x).sum().backward()
    optimizer.step()
    sites = {row.site for row in memtrain.plan_of(model).entries("activation") if row.compressor}
    assert len(sites) == (3 if parts else 1)  # two GELUs and the second block's input


def test_graphs_of_a_plain_model_do_not_serve_a_wrapped_one_that_is_compiled_later():
    """Dynamo guards no graph by hooks that its module lacked."""

    def saved(wrap):
        model, x = nets.Model(blocks=2), nets.tokens()
        model = wrapped(model)[0] if wrap else model
        for block in model.h:
            block.compile(backend=BACKEND)
        output = model(x)
        nbytes = held(output, x, *model.parameters())
        output.sum().backward()
        return nbytes

    alone = saved(wrap=True)
    torch.compiler.reset()
    plain, beside = saved(wrap=False), saved(wrap=True)
    assert beside == alone < plain / 2


def test_equal_blocks_share_one_graph():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act, self.linear = (
                LlamaRMSNorm(64),
                NewGELUActivation(),
                nn.Linear(64, 64),
            )

        def forward(self, x):
            return x + self.linear(self.act(self.norm(x)))

    def graphs(wrapped):
        torch.compiler.reset()
        counters.clear()
        model = nn.Sequential(*(Block() for _ in range(3)))
        if wrapped:
            model, _ = memtrain.wrap(
                model, None, ["preset=activations_only", "activations.min_elements=1"]
            )
        for block in model:
            block.compile(backend="aot_eager")
        for _ in range(2):
            model(torch.randn(8, 64)).sum().backward()
        return counters["stats"]["unique_graphs"]

    assert graphs(wrapped=True) == graphs(wrapped=False) > 0


@pytest.mark.parametrize("how", ["torch.compile", "model.compile", "a block"])
def test_a_graph_of_an_equal_module_that_is_uncompressed_is_reported_with_its_remedy(how):
    def make():
        if how == "torch.compile":
            model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
            return torch.compile(model, backend=BACKEND)
        model = nets.Model(blocks=1)
        (model if how == "model.compile" else model.h[0]).compile(backend=BACKEND)
        return model

    def step():
        for one in (plain, model):
            one(x).sum().backward()

    plain, model, x = make(), make(), nets.tokens()
    x = torch.randn(128, 64) if how == "torch.compile" else x
    model, optimizer = wrapped(model)
    step()
    with pytest.warns(RuntimeWarning, match=r"torch\.compiler\.reset\(\)"):
        optimizer.step()
    torch.compiler.reset()
    model(x).sum().backward()
    assert any(row.compressor for row in memtrain.plan_of(model).entries("activation"))


@pytest.mark.parametrize("how", ["a frame itself", "traced", "in place"])
def test_a_part_that_outlives_its_model_is_compiled_anew(how):
    """Lightning's module goes when its training ends; the network in it goes on."""
    traced = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    outer = nn.Sequential(traced if how == "traced" else Net())
    if how == "in place":
        outer[0].compile(backend=BACKEND)
    wrapped(outer)
    inner, x = outer[0], torch.randn(128, 64)
    del outer
    gc.collect()
    torch.compiler.reset()
    y = (inner if how == "in place" else torch.compile(inner, backend=BACKEND))(x)
    assert 0 < held(y, x, *inner.parameters()) < 4 * 128 * 256  # of one layer's result
    y.sum().backward()
