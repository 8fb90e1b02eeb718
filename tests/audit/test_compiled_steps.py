"""Predicted bytes of compiled steps: those that real graphs hold between forward and backward."""

import copy

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

import memtrain
from memtrain.audit import audit
from memtrain.audit.live_storages import LiveStorages, storage_nbytes
from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.measure import measure
from memtrain.planner import fit
from tests.graphs import graph_nodes

# inductor's partition of a graph, run op by op: nothing is generated
BACKEND = aot_autograd(fw_compiler=boxed_nop, partition_fn=min_cut_rematerialization_partition)
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class GraphStorages(LiveStorages):
    """Sees the ops of graphs too, where they run one by one."""

    @classmethod
    def ignore_compile_internals(cls):
        return True


def held(run, batch):
    """Bytes alive between forward and backward where a loop keeps the loss alone."""
    torch.compiler.reset()
    run(**batch)
    with GraphStorages() as live:
        output = run(**batch)
        output = getattr(output, "loss", output)  # and lets go of logits and caches
    return live.nbytes(exclude=[output, *batch.values()])


def held_by_nodes(output, *others):
    """Bytes that the nodes of one whole graph hold, compiled by inductor."""
    saved = [x for node in graph_nodes(output) for x in getattr(node, "saved_tensors", ())]
    return storage_nbytes(saved, exclude=[output, *others])


class Layers(nn.Sequential):
    """Of a forward of its own: torch 2.11 compiles no module of torch's in place."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


class MLP(nn.Module):
    def __init__(self, blocks=1):
        super().__init__()
        layers = (nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.h = nn.ModuleList(copy.deepcopy(Layers(*layers)) for _ in range(blocks))

    def forward(self, x):
        for block in self.h:
            x = x + block(x)
        return x


def mlp():
    return MLP(), {"x": torch.randn(64, 64)}


def mlps():
    return MLP(blocks=3), {"x": torch.randn(64, 64)}  # whose first needs no gradient of its input


def gpt2():
    transformers = pytest.importorskip("transformers")
    shape = {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 500, "n_positions": 64}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**shape, **off, **ends, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, 500, (2, 64))
    return model.train(), {"input_ids": tokens, "labels": tokens.clone()}


def llama():
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads))
    tokens = torch.randint(0, 500, (2, 64))
    mask = torch.ones(2, 64, dtype=torch.long)
    return model.train(), {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": mask}


def cnn():
    layers = (
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.SiLU(), nn.Dropout(0.5),
        nn.Flatten(), nn.Linear(32 * 64, 10),
    )  # fmt: skip
    return nn.Sequential(*layers), {"input": torch.randn(8, 3, 16, 16)}


def compiled(model, how, backend):
    if how == "whole":
        return torch.compile(model, backend=backend)
    layers = getattr(model, "h", None) or getattr(model, "model", model)
    for block in getattr(layers, "layers", layers):
        block.compile(backend=backend)
    return model


CASES = [
    (mlps, "blocks"),
    pytest.param(mlp, "whole", marks=pytest.mark.nightly),
    pytest.param(cnn, "whole", marks=pytest.mark.nightly),
    pytest.param(llama, "whole", marks=pytest.mark.nightly),
    pytest.param(gpt2, "whole", marks=pytest.mark.nightly),
    pytest.param(llama, "blocks", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("build", "how"), CASES)
def test_predicted_bytes_are_those_held_plain_and_planned(build, how):
    torch.manual_seed(0)
    model, batch = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = compiled(model, how, BACKEND)
    report = audit(run, batch, optimizer=optimizer)
    saved = report.totals()["saved activations"]
    assert not any(hasattr(module, "_memtrain") for module in model.modules())
    assert held(run, batch) == saved.plain
    memtrain.wrap(run, optimizer, batch=batch)
    predicted = memtrain.plan_of(model).listing()
    assert held(run, batch) == saved.planned < saved.plain / 4
    assert memtrain.plan_of(model).listing() == predicted


@pytest.mark.nightly
def test_graphs_that_inductor_compiles_hold_what_is_predicted():
    torch.manual_seed(0)
    torch.compiler.reset()
    model, batch = gpt2()
    del batch["labels"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = torch.compile(model)
    found = audit(run, batch, optimizer=optimizer).totals()["saved activations"]
    weights = [*model.parameters(), *model.buffers(), *batch.values()]
    for planned in (False, True):
        if planned:
            torch.compiler.reset()
            memtrain.wrap(run, optimizer)
        output = run(**batch).logits
        assert held_by_nodes(output, *weights) == (found.planned if planned else found.plain)


@pytest.mark.nightly
def test_timelines_of_compiled_steps_hold_the_reports_bytes_and_name_modules():
    torch.manual_seed(0)
    model, batch = gpt2()
    report = audit(
        torch.compile(model), batch, optimizer=torch.optim.AdamW(model.parameters()), peak=True
    )
    saved = report.totals()["saved activations"]
    constants = 64 * 8 + 4  # positions and a count: the graph's, there before the step
    logits = 2 * 64 * 500 * 4  # which the model returns, beside their codes
    for timeline, bytes_saved in (
        (report.timeline, saved.plain),
        (report.planned_timeline, saved.planned + logits),
    ):
        last = [moment for moment in timeline.moments if moment.phase == "forward"][-1]
        assert last.parts["saved activations"] == bytes_saved - constants
        labels = {moment.label for moment in timeline.moments}
        assert any("transformer.h.1.mlp.act / " in label for label in labels)
    assert report.planned_timeline.peak.nbytes < report.timeline.peak.nbytes


def test_what_cannot_be_reported_of_compiled_steps_is_refused():
    model, batch = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match=r"backend 'eager'.*allowed: inductor, aot_eager"):
        audit(run, batch, optimizer=optimizer)
    report = audit(run, batch, optimizer=optimizer, peak=True, measure=True)
    assert "backend 'eager'" in report.unknown["activation"]
    assert report.timeline is None
    plain = measure(model, optimizer, batch).peak.nbytes
    assert report.measured.peak.nbytes == pytest.approx(plain, rel=0.03)
    run = torch.compile(model)
    with pytest.raises(ValueError, match=r"device 'cuda'.*allowed for a compiled model: cpu"):
        audit(run, batch, optimizer=optimizer, options=StepOptions(device="cuda"))
    with pytest.raises(ValueError, match=r"MLP is compiled.*before torch.compile"):
        fit(run, optimizer, batch, "1GiB")
