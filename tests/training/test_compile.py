"""`memtrain-train compile=...`: both runs inside torch.compile, counted, resumed, refused."""

import csv
import io
from functools import partialmethod

import pytest
import torch
from rich.console import Console
from torch import nn
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from memtrain import api
from memtrain.training.session import Session
from memtrain.training.settings import compose, from_mapping
from tests.training.runs import at_step, resumed

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("fresh_compiler"),
]


@pytest.fixture
def op_by_op(monkeypatch):
    """Graphs run op by op: no code is generated."""
    backend = "aot_eager_decomp_partition"
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))


def losses(session):
    with (session.folder / "metrics.csv").open(newline="") as file:
        return [
            (row["run"], row["split"], row["step"], row["loss"]) for row in csv.DictReader(file)
        ]


@pytest.mark.nightly
def test_bytes_of_compiled_runs_are_counted(smoke, op_by_op):
    short = [
        "training.steps=2",
        "training.meter_every=1",
        "training.eval_every=0",
        "model.layers=1",
    ]
    session = Session(smoke("compile=true", *short, "output.quiet=true"))
    plain, wrapped = session.train().values()
    assert counters["stats"]["unique_graphs"] > 0
    # beside the model's there is the loss's: its logits twice, on 4 x 32 tokens of 256
    outside = 2 * 4 * 32 * 256 * 4
    assert wrapped["bytes"]["saved"] - outside < (plain["bytes"]["saved"] - outside) / 3
    assert wrapped["bytes"]["peak"] < plain["bytes"]["peak"]
    for summary in (plain, wrapped):
        kept = sum(summary["bytes"][name] for name in ("weights", "states", "saved"))
        assert kept < summary["bytes"]["peak"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["compile=true", "budget=1GiB"], "compile=true with budget=1GiB"),
        (["compile=block"], "compile='block' is unknown.*blocks"),
    ],
)
def test_what_does_not_go_together_is_refused(smoke, given, message):
    with pytest.raises(ValueError, match=message):
        smoke(*given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["compile=true", "preset=gact4"], "compile=true with bits: auto in activations"),
        (["compile=true", "precision=uniform"], "compile=true with precision.assignment="),
        (["compile=true", "preset=checkpointed"], "compile=true with activations.recompute="),
        (["compile=blocks", "model.layers=1"], "compile=blocks: GPT repeats no blocks"),
    ],
)
def test_models_and_plans_that_cannot_be_compiled_are_refused(smoke, given, message):
    with pytest.raises(ValueError, match=message):
        Session(smoke(*given))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "preset", "backend"), [("true", "balanced", None), ("blocks", "all_four", "op_by_op")]
)
def test_a_compiled_run_goes_on_bit_for_bit(smoke, request, how, preset, backend):
    if backend is not None:  # else inductor
        request.getfixturevalue(backend)
    own = [f"compile={how}", f"preset={preset}", "training.runs=[wrapped]", "training.accumulate=2"]
    straight, stopped = (Session(smoke(*own)) for _ in range(2))
    straight.train()
    with at_step(5, stopped.stop), pytest.raises(KeyboardInterrupt):
        stopped.train()
    again = resumed(stopped.folder)
    again.train()
    assert losses(again) == losses(straight)
    ends = [torch.load(s.folder / "wrapped_model/model.pt") for s in (straight, again)]
    assert all(map(torch.equal, *(end.values() for end in ends)))


@pytest.mark.nightly
def test_a_compiled_transformers_model_is_predicted_and_resumes(tmp_path, op_by_op):
    (tmp_path / "a.txt").write_text("".join(f"line {n}: {n * n}\n" for n in range(600)))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))
    llama.save_pretrained(tmp_path / "llama")
    given = [
        f"model=hf:{tmp_path}/llama", f"data=text:{tmp_path}/a.txt", "data.tokenizer=bytes",
        "data.sequence=64", "training.batch=4", "training.steps=6", "training.warmup=1",
        "training.eval_every=3", "training.eval_batches=1", "training.meter_every=1",
        "compile=blocks", f"output.folder={tmp_path}/outputs",
    ]  # fmt: skip
    screen = io.StringIO()
    straight = Session(from_mapping(compose(given)), console=Console(file=screen, width=200))
    straight.train()
    reported = screen.getvalue()
    assert "wrapped: promised peak" in reported
    assert "measured" in reported.partition("wrapped: promised peak")[2]
    stopped = Session(from_mapping(compose(given)))
    with at_step(3, stopped.stop), pytest.raises(KeyboardInterrupt):
        stopped.train()
    again = resumed(stopped.folder)
    again.train()
    assert losses(again) == losses(straight)
    saved = straight.summaries["wrapped"]["bytes"]["saved"]
    run = straight._run("wrapped")
    run.train_step()
    planned = sum(row.planned for row in api.plan_of(run.model).entries("activation"))
    assert planned / 2 < saved < 2 * planned
