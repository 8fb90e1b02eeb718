"""Compiled models of other kinds: checkpointing, convolutions, families, replicas, copies."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import memtrain
from benchmarks.families import FAMILIES
from memtrain.compressors import Group, Integers
from tests.activations.intercept.compiled_nets import (
    BACKEND,
    Block,
    Model,
    compiled,
    decomposing,
    gradient,
    held,
    planned,
    tokens,
    wrapped,
)

# torch's compiler looks at the gradients of what it traces
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("fresh_compiler"),
]


class Checkpointed(nn.Module):
    def __init__(self, *reentrant):
        super().__init__()
        self.reentrant, self.h = reentrant, nn.ModuleList(Block() for _ in reentrant)

    def forward(self, x):
        for block, reentrant in zip(self.h, self.reentrant, strict=True):
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x


@pytest.mark.parametrize(
    "reentrant", [(False, True), *(pytest.param((r,), marks=pytest.mark.nightly) for r in (0, 1))]
)
def test_checkpointing_around_compiled_blocks_recomputes_exactly(reentrant):
    model, _ = wrapped(Checkpointed(*reentrant))
    plain, x = Checkpointed(*reentrant), torch.randn(2, 64, 64, requires_grad=True)
    plain.load_state_dict(model.state_dict())
    for block in model.h:
        block.compile(backend=BACKEND)
    for one in (model, plain):
        one(x).square().mean().backward()
    assert torch.equal(gradient(model), gradient(plain))


def test_a_compiled_function_that_was_checkpointed_before_is_compressed():
    model, _ = wrapped(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
    run, x = compiled(model, "a function"), torch.randn(128, 64)
    checkpoint(run, x, use_reentrant=False)
    y = run(x)
    assert 0 < held(y, x, *model.parameters()) == planned(model)[0] < planned(model)[1] / 4


@pytest.mark.nightly
@pytest.mark.parametrize("compress", [False, True])
def test_activation_checkpointing_inside_keeps_its_inputs_as_the_plan_says(compress):
    inputs = {"name": "group", "bits": 8} if compress else "keep"
    cfg = {"preset": "balanced", "activations": {"recompute_inputs": inputs}}
    model, _ = wrapped(Checkpointed(False, False), cfg)
    plain = Checkpointed(False, False)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 64, 64, requires_grad=True)
    for one in (model, plain):
        y = torch.compile(one, backend=BACKEND)(x)
        if one is model:
            rows = memtrain.plan_of(model).entries("activation")
            names = [row.site for row in rows if row.site.endswith("recompute / input")]
            assert names == ["h.0.ln1 / recompute / input", "h.1.ln1 / recompute / input"]
            assert held(y, *model.parameters()) == planned(model)[0]
        y.square().mean().backward()
    close = F.cosine_similarity(gradient(model), gradient(plain), dim=0)
    assert close > 0.999 if compress else torch.equal(gradient(model), gradient(plain))


@pytest.mark.nightly
def test_a_convolutional_network_keeps_masks_exactly_and_what_relus_read_at_eight_bits():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(),
        nn.Linear(16 * 64, 10),
    )  # fmt: skip
    model, _ = wrapped(model)
    x = torch.randn(8, 3, 16, 16)
    y = torch.compile(model, backend=BACKEND)(x)
    assert held(y, x, *model.parameters(), *model.buffers()) == planned(model)[0]
    rows = {row.site: row for row in memtrain.plan_of(model).entries("activation")}
    assert rows["0 / conv2d / input"].reason.startswith("the model's own input")
    assert {row.compressor for site, row in rows.items() if "relu" in site} == {repr(Group(bits=8))}
    assert rows["6 / dropout / saved"].compressor == "Integers(limit=2)"
    y.square().mean().backward()


def test_offsets_of_max_pooling_take_the_bits_of_their_window_and_are_exact():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1),
        nn.MaxPool2d(3, 2, padding=1, dilation=1, ceil_mode=True), nn.Flatten(),
        nn.Linear(8 * 25, 10),
    )  # fmt: skip
    plain, x = copy.deepcopy(model), torch.randn(8, 3, 16, 16)
    pooled = {"op": "*max_pool*", "compressor": {"name": "group", "bits": 8}}
    rules = [pooled, {"op": "*", "compressor": "keep"}]
    model, _ = wrapped(model, {"activations": {"exceptions": rules}})
    y = torch.compile(model, backend=decomposing)(x)
    assert held(y, x, *model.parameters()) == planned(model)[0]
    rows = {row.site: row for row in memtrain.plan_of(model).entries("activation")}
    for place, limit, bits, outputs in ((1, 4, 2, 8 * 8 * 64), (3, 9, 4, 8 * 8 * 25)):
        row = rows[f"{place} / max_pool2d / saved"]
        blocks = -(-outputs // 256)
        assert (row.nbytes, row.planned) == (outputs, blocks * 32 * bits)
        assert row.compressor == repr(Integers(limit=limit))
    y.square().mean().backward()
    torch.compile(plain, backend=decomposing)(x).square().mean().backward()
    assert torch.equal(gradient(model), gradient(plain))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["cifar_resnet18", "resnet", "vit", "gpt2", "llama"])
def test_graphs_of_families_hold_a_fifth_of_what_they_hold_without_memtrain(name):
    pytest.importorskip("transformers")
    case = FAMILIES[name]()
    x, *_ = case.batch.values() if isinstance(case.batch, dict) else case.batch
    found = []
    for model in (copy.deepcopy(case.model), case.model):
        if model is case.model:
            wrapped(model)
        y = torch.compile(model, backend=decomposing)(x)
        found.append(held(getattr(y, "logits", y), x, *model.parameters(), *model.buffers()))
    assert found[1] == planned(case.model)[0] < found[0] / 5


@pytest.mark.nightly
def test_copies_and_pickles_of_a_model_that_was_compiled_train():
    model, _ = wrapped(Model())
    x = tokens()
    torch.compile(model, backend=BACKEND)(x).square().mean().backward()
    other = copy.deepcopy(model)
    y = torch.compile(other, backend=BACKEND)(x)
    assert held(y, x, *other.parameters()) == planned(other)[0]


@pytest.mark.nightly
def test_compiled_autograd_has_the_same_gradients():
    found = []
    for use in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        model, _ = wrapped(Model())
        x = tokens()
        with torch._dynamo.config.patch(compiled_autograd=use):
            y = torch.compile(model, backend=BACKEND)(x)
            assert held(y, x, *model.parameters()) == planned(model)[0]
            y.square().mean().backward()
        found.append(gradient(model))
    assert torch.equal(*found)


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["torch.compile", "each block"])
def test_fifty_steps_compile_nothing_again(how):
    model, optimizer = wrapped(Model(blocks=2))
    run, x = compiled(model, how), tokens()
    for step in range(50):
        for _ in range(2):  # accumulated
            with torch.autocast("cpu", torch.bfloat16):
                y = run(x)
            y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            graphs = dict(counters["stats"])
        if step % 10 == 0:
            with torch.no_grad():
                model.eval()(x)
                run(x)
            model.train()
    assert dict(counters["stats"]) == graphs


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_replicas_and_shards_are_compressed(how, tmp_path):
    script = str(Path(__file__).with_name("compiled_replicas.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(tmp_path / "group"), how],
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    found = [json.loads(rank.communicate(timeout=600)[0].splitlines()[-1]) for rank in ranks]
    result = found[0]
    assert result["planned"] == found[1]["planned"]
    assert result["cosine"] > 0.98
    assert result["graphs"] == 1  # no more of them after the first step
    assert result["planned"] < result["bytes"] / (4 if how == "ddp" else 2)
    gathered = "an input of a sharded module's graph: perhaps a gathered weight"
    assert (gathered in result["kept"]) == (how == "fsdp")
