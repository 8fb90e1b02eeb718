"""memtrain-report: its tables, its JSON, and one clear line for every mistake."""

import json
import re
import resource
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import memtrain
from memtrain.audit.live_storages import storage_nbytes
from memtrain.audit.peak import Moment, Timeline
from memtrain.audit.report import CATEGORIES, KeptTensors, Report, Row
from memtrain.cli.models.build_model import build
from memtrain.cli.models.named_models import NAMED_MODELS
from memtrain.cli.models.request import Request
from memtrain.cli.render.json_file import as_json
from memtrain.cli.render.report_data import ReportData
from memtrain.cli.render.text_tables import show
from memtrain.cli.report.main import main
from tests.graphs import graph_nodes


@pytest.fixture(autouse=True)
def _width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_gpt2_prints_within_80_columns_and_writes_its_json(capsys, tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "report.json"
    arguments = [
        "model=gpt2",
        "preset=balanced",
        "batch=8",
        "dropout=0",
        "--no-peak",
    ]  # seq: the model's own
    assert main([*arguments, "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for part in (*CATEGORIES.values(), "ratio", "the 10 largest of", "not compressed, and why"):
        assert part in text
    assert "counted (the batch has labels)" in text
    content = json.loads(path.read_text())
    assert content["settings"]["seq"] == 1024
    weights = content["categories"]["weights"]
    assert weights["plain"] == weights["planned"] == 124_439_808 * 4
    # two fp32 moments, and a step counter for each of 148 parameters
    assert content["categories"]["optimizer states"]["plain"] == 2 * 124_439_808 * 4 + 148 * 4
    saved = content["categories"]["saved activations"]
    assert saved["ratio"] == saved["planned"] / saved["plain"] < 0.15
    for side in ("plain", "planned"):
        assert sum(row[side] for row in content["rows"]) == content["categories"]["total"][side]
    assert list(tmp_path.iterdir()) == [path]


def test_json_has_the_documented_schema():
    rows = (
        Row(name="w", kind="weight", plain=64, planned=64, reason="not requested", sites=("w",)),
        Row(name="a", kind="activation", plain=100, planned=25, compressor="Group()", sites=("b",)),
    )
    kept = (KeptTensors(kind="weight", reason="not requested", nbytes=64, count=1, example="w"),)
    line = Timeline((Moment("forward of a", "forward", 9, {"weights": 8, "inputs": 1}),))
    report = Report(
        rows=rows, kept=kept, unmatched=("activations.rules.0: op=[silu]",), loss=True,
        unknown={"state": "no"}, timeline=line, planned_timeline=line,
    )  # fmt: skip
    moment = {"label": "forward of a", "phase": "forward", "nbytes": 9,
              "parts": {"weights": 8, "inputs": 1}}  # fmt: skip
    content = json.loads(json.dumps(as_json(ReportData(report, {"model": "gpt2"}))))
    assert content == {
        "schema": "memtrain-report",
        "version": 1,
        "settings": {"model": "gpt2"},
        "loss_counted": True,
        "categories": {
            "weights": {"plain": 64, "planned": 64, "unknown": "", "ratio": 1.0},
            "gradients": {"plain": 0, "planned": 0, "unknown": "", "ratio": None},
            "optimizer states": {"plain": 0, "planned": 0, "unknown": "no", "ratio": None},
            "saved activations": {"plain": 100, "planned": 25, "unknown": "", "ratio": 0.25},
            "total": {"plain": 164, "planned": 89, "unknown": "no", "ratio": 89 / 164},
        },
        "peak": {
            "plain": 9, "planned": 9, "ratio": 1.0, "requested": {"plain": 9, "planned": 9},
            "reserved": {"plain": None, "planned": None},
            "moment": {"plain": moment, "planned": moment},
        },
        "measured_peak": None,
        "fits": None,
        "planner": None,
        "timeline": {"plain": [moment], "planned": [moment]},
        "rows": [
            {"name": "w", "kind": "weight", "plain": 64, "planned": 64, "compressor": "",
             "reason": "not requested", "sites": ["w"], "ratio": 1.0},
            {"name": "a", "kind": "activation", "plain": 100, "planned": 25,
             "compressor": "Group()", "reason": "", "sites": ["b"], "ratio": 0.25},
        ],
        "kept": [
            {"kind": "weight", "reason": "not requested", "nbytes": 64, "count": 1,
             "example": "w"},
        ],
        "unmatched_rules": ["activations.rules.0: op=[silu]"],
    }  # fmt: skip
    bare = as_json(ReportData(replace(report, timeline=None, planned_timeline=None), {}))
    assert (bare["peak"], bare["timeline"]) == (None, {})


def test_long_names_fold_and_markup_is_shown_as_it_is(report, settings, capsys):
    name = report.rows[-2].name
    show(Console(width=80), ReportData(report, settings), by="site", top=20)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    bytes_ = r"\s|100B|0\.\d+|KiB|1$"
    assert "".join(name.split()) in re.sub(bytes_, "", text, flags=re.M)
    assert "optimizer states: unknown, left out: no step" in text
    assert "matched nothing: activations.rules.0: op=[silu]" in text
    assert "h.0.attn.weight (weight)" in text
    assert "seed=3" in text


def test_help_teaches_by_examples(capsys):
    for arguments in (["--help"], ["model=gpt2", "-h"], []):
        assert main(arguments) == 0
        text = capsys.readouterr().out
        for part in ("memtrain-report model=gpt2", "py:my_package", "llama-7b", "balanced"):
            assert part in text
        assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model=gpt3"], "did you mean 'gpt2'"),
        (["preset=balanced"], "model= is missing"),
        (["model=gpt2", "bacth=8"], "did you mean 'batch'"),
        (["model=gpt2", "batch"], "no key=value: 'batch'; such as model=gpt2 batch=8"),
        (["gpt2"], "did you mean model=gpt2?"),
        (["model=gpt2", "max_error=2"], "max_error= is for the planner"),
        (["model=gpt2", "smallest"], "did you mean preset=smallest?"),
        (["model=gpt2", "budget=8", "GiB"], "a size is one word: budget=8GiB"),
        (["model=gpt2", "memory=8"], "memory=8 is 8 bytes; did you mean 8GiB?"),
        (["model=gpt2", "batch=0"], "batch=0 is out of range"),
        (["model=gpt2", "batch=many"], "batch"),
        (["model=gpt2", "dtype=float8"], "unknown dtype 'float8'"),
        (["model=gpt2", "attention=flash"], "unknown attention 'flash'"),
        (["model=gpt2", "optimizer=adamm"], "did you mean 'adam"),
        (["model=gpt2", "dropout=1"], "dropout=1"),
        (["model=gpt2", "labels=perhaps"], "labels"),
        (["model=gpt2", "--top", "0"], "--top 0 is out of range"),
        (["model=gpt2", "--top", "few"], "--top"),
        (["model=gpt2", "--jsn", "x"], "unrecognized arguments: --jsn"),
        (["model=gpt2", "--json", "no/such/folder/x.json"], "cannot write --json"),
        (["model=gpt2", "seq=1025"], "takes at most 1024 tokens"),
        (["model=gpt2", "image=224"], "takes text; use seq="),
        (["model=resnet50", "seq=3"], "takes images; use image="),
        (["model=hf:nowhere"], "does not exist"),
        (["model=py:theirs"], "names no function"),
        (["model=py:theirs:biuld"], "has no function 'biuld'"),
        (["model=py:theirs:number"], "has no function 'number'"),
        (["model=py:absent:build"], "No module named 'absent'"),
        (["model=py:theirs:wrong"], "returned Linear; allowed: (model, batch)"),
        (["model=py:theirs:throws"], "RuntimeError: out of cheese"),
        (["model=gpt2", "memory=0B"], "memory=0B is out of range"),
        (["model=gpt2", "device=tpu"], "unknown device 'tpu'"),
        (["model=gpt2", "autocast=fp8"], "unknown autocast 'fp8'; allowed: bfloat16, float16"),
        (["model=gpt2", "--fail-over", "24 potatoes"], "--fail-over='24 potatoes' is not a size"),
        (["model=gpt2", "--by", "colour"], "invalid choice: 'colour'"),
    ],
)
def test_a_mistake_is_one_clear_line(arguments, message, capsys, builder):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("memtrain-report: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_model_that_reads_its_data_is_exit_status_1(capsys, builder):
    assert main(["model=py:theirs:branch"]) == 1
    error = capsys.readouterr().err
    assert "reads a tensor's values (aten._local_scalar_dense.default)" in error
    assert "--measure" in error
    assert error.count("\n") == 1


TWICE = """
import torch

library = torch.library.Library("test_report", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CPU")


class Twice(torch.nn.Linear):
    def forward(self, x):
        return super().forward(torch.ops.test_report.twice(x))


def build():
    return Twice(8, 8), torch.ones(2, 8)
"""


def test_an_op_that_fake_tensors_cannot_run_is_named(capsys, builder):
    (builder / "op_of_theirs.py").write_text(TWICE)
    for more in ([], ["budget=1MB", "device=cpu"]):
        assert main(["model=py:op_of_theirs:build", *more]) == 1
        error = capsys.readouterr().err
        assert "test_report.twice" in error
        assert error.count("\n") == 1


def test_a_users_builder_gives_model_batch_and_optimizer(capsys, builder):
    assert main(["model=py:theirs:build", "batch=32", "optimizer=sgd", "--json", "a.json"]) == 0
    content = json.loads((builder / "a.json").read_text())
    assert content["categories"]["saved activations"]["plain"] == 2 * 32 * 256 * 4
    assert content["loss_counted"] is False
    assert "no labels given" in capsys.readouterr().out
    built = build(Request(model="py:theirs:with_optimizer"))
    assert isinstance(built[1], torch.optim.SGD)
    assert built[2][0].shape == (16, 128)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("preset", "sites"),
    [
        ("balanced", ["1 / gelu / input"]),
        ("all_four", ["0 / linear / input", "1 / gelu / input"]),  # the input in bfloat16
    ],
)
def test_a_compiled_models_sites_bytes_and_peak_are_reported(builder, preset, sites):
    given = ["model=py:theirs:build", "batch=64", "compile=true", f"preset={preset}"]
    assert main([*given, "--json", "a.json"]) == 0
    reported = json.loads((builder / "a.json").read_text())
    rows = [row for row in reported["rows"] if row["kind"] == "activation" and row["planned"]]
    assert [row["name"] for row in rows] == sites
    assert all("Group" in row["compressor"] for row in rows)
    saved, peak = reported["categories"]["saved activations"], reported["peak"]
    for way, wraps in (("plain", False), ("planned", True)):
        torch.compiler.reset()
        model, x = sys.modules["theirs"].build(64)
        optimizer = torch.optim.AdamW(model.parameters())
        if wraps:
            memtrain.wrap(model, optimizer, preset)
        output = torch.compile(model)(x)
        held = [t for node in graph_nodes(output) for t in getattr(node, "saved_tensors", ())]
        measured = storage_nbytes(held, exclude=[output, x, *model.parameters()])
        assert measured == saved[way] > 0
        moment = peak["moment"][way]
        assert moment["label"] == "backward of 1 / gelu"
        assert sum(moment["parts"].values()) == moment["nbytes"] == peak[way]
    torch.compiler.reset()
    assert peak["planned"] < peak["plain"]


def test_a_config_on_disk(builder, capsys):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=99, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(builder)
    for place in (builder, builder / "config.json"):
        model, _, batch = build(Request(model=f"hf:{place}", seq=16, batch=2, labels=False))
        assert type(model).__name__ == "LlamaForCausalLM"
        assert model.config.vocab_size == 99
        assert {name: tuple(x.shape) for name, x in batch.items()} == {"input_ids": (2, 16)}
    short = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=99, n_positions=64)
    short.save_pretrained(builder)
    model, _, batch = build(Request(model=f"hf:{builder}"))  # no longer than its positions
    assert batch["input_ids"].shape == (1, 64)
    (builder / "config.json").write_text("{")
    assert main([f"model=hf:{builder}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_settings_reach_the_model():
    pytest.importorskip("transformers")
    request = Request(
        model="gpt2", dtype="bfloat16", attention="eager", dropout=0.0, seq=8, batch=3
    )
    model, _, batch = build(request)
    config = model.config
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert config._attn_implementation == "eager"
    assert config.attn_pdrop == config.resid_pdrop == config.embd_pdrop == 0
    assert batch["labels"].shape == (3, 8)
    assert model.training
    assert torch.get_default_dtype() == torch.float32
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


def test_without_transformers_the_message_names_what_to_install(monkeypatch, capsys):
    # None in sys.modules is how Python marks a module that cannot be imported
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["model=gpt2"]) == 2
    assert "pip install 'memtrain[models]'" in capsys.readouterr().err


# Parameters as published; the number with a head of classes where the model has one.
SIZES = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-3-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "distilbert": 66_985_530,
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "vit": 86_567_656,
    "vit-large": 304_326_632,
    "swin": 28_288_354,
    "swin-base": 87_768_224,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "convnext": 28_589_128,
    "mobilenet_v2": 3_504_872,
    "efficientnet-b0": 5_288_548,
    "efficientnet-b3": 12_233_232,
    "efficientnet-b7": 66_347_960,
}


ONE_A_FAMILY = ("gpt2", "llama-3-8b", "mistral-7b", "opt-1.3b", "t5-base", "bert-large",
                "distilbert", "roberta-base", "vit-large", "swin-base", "resnet18", "resnet50",
                "convnext", "mobilenet_v2", "efficientnet-b0")  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ONE_A_FAMILY else pytest.mark.nightly)
        for name in NAMED_MODELS
    ],
)
def test_every_named_model_is_of_its_published_size(name):
    pytest.importorskip("transformers")
    model, _, _ = build(Request(model=name))
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]


def test_short_names_of_dtypes_are_taken():
    for short, long in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")):
        assert Request(dtype=short).dtype == long
    assert Request(autocast="bf16").step == Request(autocast="bfloat16").step


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMED_MODELS)
def test_every_named_model_is_traced(name, tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main([f"model={name}", "--no-peak", "--json", str(path)]) == 0
    categories = json.loads(path.read_text())["categories"]
    assert categories["saved activations"]["ratio"] < 0.3
    assert categories["weights"]["plain"] >= 4 * SIZES[name]


@pytest.mark.parametrize(
    "options", [pytest.param(["--no-peak"], id="sums"), pytest.param([], id="peak")]
)
@pytest.mark.nightly
def test_llama_7b_takes_under_two_gib_of_memory(options):
    pytest.importorskip("transformers")
    command = [
        sys.executable,
        "-c",
        "import sys; from memtrain.cli.report.main import main; sys.exit(main())",
        "model=llama-7b",
        "seq=2048",
        *options,
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, check=False, timeout=240, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_maxrss < 2 * 2**20  # KiB; the largest child so far
    # processor time, which other work on the machine does not stretch
    assert after.ru_utime - before.ru_utime < 60
    assert "25.10 GiB" in done.stdout  # 6,738,415,616 weights of 4 bytes


def test_verify_prints_the_gradient_of_each_site(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def build(batch=8):\n"
        "    layers = torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)\n"
        "    return torch.nn.Sequential(*layers), torch.randn(batch, 16, 64)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["model=py:mine:build", "batch=4", "verify=true", "--no-peak"]) == 0
    text = capsys.readouterr().out
    table = text[text.index("gradient quality") :]
    assert [name in table for name in ("all", "2 / linear / input", "1 / gelu / input")] == [
        True
    ] * 3
    assert max(map(len, text.splitlines())) <= 80
    assert main(["model=py:mine:build", "preset=exact", "verify=true", "--no-peak"]) == 0
    table = capsys.readouterr().out
    assert "1.000000" in table[table.index("gradient quality") :]
    assert "quantisation noise" not in table
    one = ["preset=smallest", "activations.rules.1.compressor.bits=1"]
    assert main(["model=py:mine:build", *one, "verify=true", "--no-peak"]) == 0
    reported = " ".join(capsys.readouterr().out.split())
    assert "of the gradient's squared norm, most of it from 2 / linear / input (" in reported
