"""`memtrain-train` as processes: torchrun, kill -9 and SIGTERM."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
]
SHORT = [
    "data.tokenizer=bytes", "data.sequence=32", "training.batch=6", "training.warmup=1",
    "training.eval_every=2", "training.eval_batches=2", "training.checkpoint_every=2",
    "training.meter_every=0", "optimizer.lr=1e-2", "training.final_lr=1", "output.plot=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A tiny model in a folder and a text, as arguments."""
    root = tmp_path_factory.mktemp("own")
    (root / "a.txt").write_text("".join(f"line {n}: {n * n}\n" for n in range(600)))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 64}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, **heads)).save_pretrained(root / "llama")
    return [f"model=hf:{root / 'llama'}", f"data=text:{root / 'a.txt'}", *SHORT]


def start(arguments, world=1):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command = [sys.executable, *(launcher if world > 1 else []), "-m", "memtrain.cli.train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [*command, *arguments], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def train(folder, arguments, world=1):
    """The output folder of a call that ends well."""
    process = start([*arguments, f"output.folder={folder}"], world)
    text, _ = process.communicate(timeout=400)
    assert process.returncode == 0, text
    return next(folder.glob("*/*"))


def losses(folder, split="train"):
    with (folder / "metrics.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["split"] == split]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_processes_train_as_one_and_go_on_as_another_number(given, tmp_path, parallel):
    own = [*given, "preset=optimizer_only", f"training.parallel={parallel}"]
    whole = train(tmp_path / "whole", [*own, "training.steps=6"])
    two = train(tmp_path / "two", [*own, "training.steps=4"], world=2)
    # sums in another order, through four steps of AdamW and codes that they may tip over
    assert losses(two) == pytest.approx(losses(whole)[:4], rel=1e-3)
    AutoModelForCausalLM.from_pretrained(two / "wrapped_model")
    more = train(tmp_path / "one", [f"resume={two}", "training.steps=6"])
    assert losses(more)[:4] == losses(two)
    assert losses(more) == pytest.approx(losses(whole), rel=1e-2)
    again = train(tmp_path / "three", [f"resume={more}", "training.steps=7"], world=3)
    assert losses(again)[:6] == losses(more)
    assert losses(again)[6] < losses(again)[0]


def test_weights_of_two_bytes_are_sharded_and_go_on(given, tmp_path):
    own = [*given, "preset=all_four", "training.parallel=fsdp"]
    whole = train(tmp_path / "whole", [*own, "training.steps=4"], world=2)
    half = train(tmp_path / "half", [*own, "training.steps=2"], world=2)
    more = train(tmp_path / "more", [f"resume={half}", "training.steps=4"], world=2)
    assert losses(more) == losses(whole)


def test_a_packaged_network_in_two_processes_goes_on(tmp_path):
    given = ["experiment=smoke", "model.dropout=0.1", "training.runs=[wrapped]"]
    given += ["training.final_lr=1", "output.plot=false"]
    whole = train(tmp_path / "whole", given, world=2)
    half = train(tmp_path / "half", [*given, "training.steps=4"], world=2)
    more = train(tmp_path / "more", [f"resume={half}", "training.steps=8"], world=2)
    assert losses(more) == losses(whole)
    assert (more / "wrapped_model.pt").is_file()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_compiled_replicas_and_shards_go_on(given, tmp_path, parallel):
    how = {"ddp": "true", "fsdp": "blocks"}[parallel]
    own = [*given, f"compile={how}", f"training.parallel={parallel}", "training.runs=[wrapped]"]
    whole = train(tmp_path / "whole", [*own, "training.steps=4"], world=2)
    half = train(tmp_path / "half", [*own, "training.steps=2"], world=2)
    more = train(tmp_path / "more", [f"resume={half}", "training.steps=4"], world=2)
    assert losses(more) == losses(whole)
    assert losses(whole)[-1] < losses(whole)[0]


def test_killed_and_stopped_runs_go_on(given, tmp_path):
    process = start([*given, "training.steps=10000", f"output.folder={tmp_path}/killed"])
    wait(process, tmp_path / "killed", "checkpoint-*/progress.pt")
    process.kill()
    process.communicate()
    folder = next((tmp_path / "killed").glob("finetune/*"))
    done = len(losses(folder))
    kept = int(max(folder.glob("checkpoint-*")).name.removeprefix("checkpoint-"))
    assert done - kept <= 2
    process = start(
        [f"resume={folder}", "training.steps=10000", f"output.folder={tmp_path}/stopped"]
    )
    wait(process, tmp_path / "stopped", "checkpoint-*/progress.pt")
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 130, text
    stopped = next((tmp_path / "stopped").glob("finetune/*"))
    steps = len(losses(stopped))
    assert (stopped / f"checkpoint-{steps:08}").is_dir()
    assert losses(stopped)[:kept] == losses(folder)[:kept]
    more = train(tmp_path / "more", [f"resume={stopped}", f"training.steps={steps + 1}"])
    assert losses(more)[:steps] == losses(stopped)


@pytest.mark.parametrize("where", ["step", "save"])
def test_a_process_that_dies_leaves_a_checkpoint_that_goes_on(given, tmp_path, where):
    own = [*given, "preset=all_four", "training.parallel=ddp"]
    process = start([*own, "training.steps=10000", f"output.folder={tmp_path}/killed"], world=2)
    wait(process, tmp_path / "killed", "checkpoint-*/progress.pt")
    if where == "save":  # the next one has begun, and is not whole
        wait(process, tmp_path / "killed", ".checkpoint-*.tmp", pause=0.0)
    os.kill(workers(process.pid)[1], signal.SIGKILL)
    text, _ = process.communicate(timeout=400)
    assert process.returncode not in (0, 130), text
    folder = next((tmp_path / "killed").glob("finetune/*"))
    kept = int(max(folder.glob("checkpoint-*")).name.removeprefix("checkpoint-"))
    more = train(tmp_path / "more", [f"resume={folder}", f"training.steps={kept + 3}"], world=2)
    whole = train(tmp_path / "whole", [*own, f"training.steps={kept + 3}"], world=2)
    assert losses(more) == losses(whole)


def workers(launcher):
    """The processes that torchrun started, by rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    ranks = {}
    for child in map(int, children):
        given = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks |= {int(x.partition(b"=")[2]): child for x in given if x.startswith(b"RANK=")}
    return ranks


def wait(process, folder, pattern, pause=0.05):
    deadline = time.monotonic() + 200
    while not list(folder.rglob(pattern)):
        assert time.monotonic() < deadline, "no checkpoint"
        assert process.poll() is None, process.communicate()[0]
        time.sleep(pause)
