"""The audit's bytes are those of real forwards and real optimizer steps; no byte is lost."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from memtrain import optim
from memtrain.activations.saved.site import Record, Site
from memtrain.api import wrap
from memtrain.audit.live_storages import LiveStorages, storage_nbytes
from memtrain.audit.live_tensors import state_tensors
from memtrain.audit.report import activation_rows, audit
from memtrain.config.sources import options

transformers = pytest.importorskip("transformers")


class Block(nn.Module):
    """Convolution, batch norm and ReLU, without and in place."""

    def __init__(self, inside, outside, *, inplace):
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, padding=1)
        self.norm = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=inplace)

    def forward(self, x):
        return self.relu(self.norm(self.conv(x)))


def cnn():
    model = nn.Sequential(
        Block(3, 16, inplace=False), Block(16, 24, inplace=True), nn.AvgPool2d(2),
        Block(24, 24, inplace=False), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(384, 100),
    )  # fmt: skip
    return model, torch.randn(4, 3, 16, 16)


def gpt2(attention="eager", dropout=0.0):
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=211, n_positions=64, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        attn_implementation=attention,
    )  # fmt: skip
    tokens = torch.randint(0, 211, (4, 48))
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens.clone()}


def llama():
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=211, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(0, 211, (3, 40))
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens.clone()}


MODELS = {
    "gpt2-eager": gpt2,
    "gpt2-sdpa": lambda: gpt2("sdpa"),
    "gpt2-dropout": lambda: gpt2("eager", 0.1),
    "llama": llama,
    "cnn": cnn,
}


def forward(model, batch):
    result = model(**batch) if isinstance(batch, dict) else model(batch)
    return result if isinstance(result, torch.Tensor) else result.loss


def measured(model, batch):
    """Bytes that only the graph keeps alive after a forward."""
    with LiveStorages() as live:
        result = forward(model, batch)
    # It keeps what is saved; the outputs go. In torch 2.11 a Function of Python's, as the last one
    # may be, is no longer in the graph when its output has gone: a node after it holds it.
    graph = (result * 1).grad_fn
    del result
    return live.nbytes() if graph else 0


CASES = [
    *(("cnn", preset) for preset in options("preset")),
    *(("gpt2-dropout", preset) for preset in ("actnn_l3", "all_four", "exact", "fewbit3", "gact4")),
    *((name, preset) for name in MODELS for preset in ("balanced", "smallest")),
]


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "preset"), sorted(set(CASES)))
def test_saved_activations_are_those_of_a_real_forward(name, preset):
    model, batch = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    total = audit(model, batch, preset, optimizer=optimizer).totals()["saved activations"]
    assert total.plain == measured(model, batch)
    wrap(model, optimizer, preset)
    first, second = measured(model, batch), measured(model, batch)
    # The graph keeps its payloads after the first forward has recorded the plan, too.
    assert second == total.planned
    # Automatic bits: the first forward also makes statistics, 4 bytes for each site and sample
    # (for a layer that sees tokens, each token), until its backward has run.
    adapts = preset.startswith("actnn_l") and preset >= "actnn_l3"
    assert first >= total.planned if adapts else first == total.planned


OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adam": torch.optim.Adam,
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "nadam": torch.optim.NAdam,
}


def odd_model():
    """Small, long, thin, one-dimensional and frozen parameters."""
    model = nn.Sequential(
        nn.Linear(96, 200), nn.LayerNorm(200), nn.Linear(200, 1500), nn.Linear(1500, 3)
    )
    model.register_parameter("long", nn.Parameter(torch.zeros(9001)))
    model[0].weight.requires_grad_(False)
    return model


STATES = [
    *((name, "balanced") for name in OPTIMIZERS),
    *(("adamw", preset) for preset in ("smallest", "exact", "activations_only")),
]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "preset"), STATES)
def test_states_are_those_of_a_real_step(name, preset, dtype):
    batch = torch.randn(4, 96, dtype=dtype)
    sizes = []
    for wrapped in (False, True):
        model = odd_model().to(dtype)
        optimizer = OPTIMIZERS[name](model.parameters())
        if not wrapped:
            total = audit(model, batch, preset, optimizer=optimizer).totals()["optimizer states"]
            assert not optimizer.state
        else:
            kept_whole = name == "rmsprop"
            with pytest.warns(RuntimeWarning, match="square_avg") if kept_whole else nullcontext():
                _, optimizer = wrap(model, optimizer, preset)
        (model(batch).sum() + model.long.sum()).backward()
        optimizer.step()
        sizes.append(storage_nbytes(state_tensors(optimizer)))
    assert (total.plain, total.planned) == tuple(sizes)


@pytest.mark.parametrize(
    "make",
    [
        optim.AdamW4bit,
        optim.AdamW8bitFactor,
        lambda params: optim.SGD4bit(params, lr=0.1, momentum=0.9),
        lambda params: optim.compress(torch.optim.NAdam(params)),
    ],
)
def test_states_that_their_optimizer_compresses_are_reported_as_it_keeps_them(make):
    model, x = odd_model(), torch.randn(4, 96)
    model.long.requires_grad_(False)
    optimizer = make(list(model.parameters()))
    first = audit(model, x, ["optim=none"], optimizer=optimizer).totals()["optimizer states"]
    model(x).sum().backward()
    optimizer.step()
    assert (
        audit(model, x, ["optim=none"], optimizer=optimizer).totals()["optimizer states"] == first
    )
    assert first.plain == first.planned == optim.state_bytes(optimizer)
    with pytest.raises(TypeError, match="has compressed states already"):
        audit(model, x, "balanced", optimizer=optimizer)


def test_an_optimizer_that_is_unknown_is_reported_as_unknown():
    model = nn.Linear(64, 64)
    report = audit(model, torch.randn(2, 64), optimizer=torch.optim.LBFGS(model.parameters()))
    assert "closure" in report.totals()["optimizer states"].unknown
    assert "closure" in report.totals()["total"].unknown
    assert report.totals()["optimizer states"].plain == 0
    assert not any("optim." in rule for rule in report.unmatched)


@pytest.mark.parametrize("name", ["cnn", "gpt2-dropout", "llama"])
def test_rows_sum_to_the_totals(name):
    model, batch = MODELS[name]()
    report = audit(model, batch)
    totals = report.totals()
    for side in ("plain", "planned"):
        parts = [getattr(totals[key], side) for key in totals if key != "total"]
        assert sum(parts) == getattr(totals["total"], side)
        assert sum(getattr(row, side) for row in report.rows) == sum(parts)
    assert totals["weights"].plain == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert totals["gradients"].plain == sum(p.nbytes for p in model.parameters())
    sites = [site for row in report.rows if row.kind == "activation" for site in row.sites]
    assert len(sites) == len(set(sites))


def test_a_composite_is_one_row_under_the_name_that_the_plan_knows():
    model, batch = gpt2()
    report = audit(model, batch)
    rows = [row for row in report.rows if "h.0.mlp.act / " in row.name]
    assert [row.sites[0] for row in rows] == ["transformer.h.0.mlp.act / gelu_tanh / input"]
    assert any(site.startswith("transformer.h.0.mlp.act / pow") for site in rows[0].sites)
    elements = 4 * 48 * 256
    assert rows[0].planned == elements * 3 // 8
    # pow keeps the input, tanh its output, two products three more tensors
    assert rows[0].plain == measured_alone(model.transformer.h[0].mlp.act, elements)


def measured_alone(module, elements):
    x = torch.randn(elements).requires_grad_() * 1
    with LiveStorages() as live:
        live.adopt([x])
        y = module(x)
    graph = y.grad_fn
    del x, y
    return live.nbytes() if graph else 0


def test_relu_and_the_convolution_that_reads_it_are_one_row():
    model, batch = cnn()
    report = audit(model, batch, optimizer=torch.optim.SGD(model.parameters()))
    (row,) = [row for row in report.rows if any("0.relu / relu" in site for site in row.sites)]
    assert any("1.conv / conv2d" in site for site in row.sites)
    elements = 4 * 16 * 16 * 16
    assert row.plain == 4 * elements
    assert row.planned == elements // 8 + elements // 2 + elements // 128 * 4


def test_join_by_hand():
    def record(module, op, tensor, nbytes, planned, storage):
        site = Site(module, op, tensor)
        return Record(site, (1,), "float32", nbytes, planned, "", "", storage)

    plain = [
        record("a", "relu", "saved", 40, 40, 0),
        record("b", "linear", "input", 0, 0, 0),
        record("b", "linear", "saved", 7, 7, 1),
        record("c", "sin", "input", 16, 16, 2),
    ]
    planned = [
        record("a", "relu", "input", 2, 2, 0),
        record("b", "linear", "input", 40, 5, 1),
        record("b", "linear", "saved", 7, 7, 2),
        record("c", "sin", "input", 16, 3, 3),
    ]
    rows = {row.name: (row.plain, row.planned) for row in activation_rows(plain, planned)}
    assert rows == {
        "b / linear / input (+2)": (40, 7),
        "b / linear / saved": (7, 7),
        "c / sin / input": (16, 3),
    }


def test_what_is_kept_has_its_reason_and_its_bytes():
    model = odd_model()
    report = audit(model, torch.randn(4, 96))
    kept = {(group.kind, group.reason): group for group in report.kept}
    small = kept["state", "of 4,096 elements or fewer"]
    biases = [model[0].bias, *model[1].parameters(), model[2].bias, model[3].bias]
    assert small.nbytes == 2 * sum(p.nbytes for p in biases)
    assert small.count == 2 * len(biases)
    assert kept["weight", "not requested"].nbytes == sum(p.nbytes for p in model.parameters())
    frozen = model[0].weight.nbytes
    gradients = kept["gradient", "not requested"].nbytes
    assert gradients == kept["weight", "not requested"].nbytes - frozen
    assert [group.nbytes for group in report.kept] == sorted(
        (group.nbytes for group in report.kept), reverse=True
    )


def test_rules_that_matched_nothing_are_listed():
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU())
    cfg = {"activations": {"exceptions": [{"module": "1", "op": "silu", "compressor": "keep"}]}}
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    report = audit(model, torch.randn(32, 64), cfg, optimizer=optimizer)
    assert "activations.exceptions.0: module=1 op=silu" in report.unmatched
    assert len(report.unmatched) == 1  # the preset's rules are for any model


def test_largest_rows_are_sorted_and_ties_keep_the_order_of_the_forward():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    report = audit(model, torch.randn(32, 64), optimizer=torch.optim.SGD(model.parameters()))
    gelus = [row.name for row in report.largest(50, "activation") if "gelu" in row.name]
    assert gelus == [f"{i}.1 / gelu / input" for i in range(4)]
    plain = [row.plain for row in report.largest(50)]
    assert plain == sorted(plain, reverse=True)
    assert len(report.largest(3)) == 3


def test_labels_and_a_model_without_parameters():
    model, batch = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    assert audit(model, batch, optimizer=optimizer).loss
    without = audit(model, {"input_ids": batch["input_ids"]}, optimizer=optimizer)
    assert not without.loss
    assert not any("cross_entropy" in row.name for row in without.rows)
    with pytest.raises(ValueError, match="no parameters"):
        audit(nn.ReLU(), torch.randn(4), optimizer=optimizer)


def test_a_model_on_the_meta_device_is_reported_as_a_real_one():
    def reported(device):
        with torch.device(device):
            model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU())
            x = torch.zeros(32, 64)
        return audit(model, x, peak=True)

    real, meta = reported("cpu"), reported("meta")
    assert meta.rows == real.rows
    assert meta.planned_timeline.peak.nbytes == real.planned_timeline.peak.nbytes
