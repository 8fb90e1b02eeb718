"""The examples of docs/integrations.md, run as a user would: bytes, losses, resumed runs."""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memtrain.config.sources import options

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = EXAMPLES.parent / "docs" / "integrations.md"
NEEDS = {
    "transformers_trainer": ("transformers", "accelerate"),
    "transformers_compile": ("transformers", "accelerate"),
    "transformers_fsdp": ("transformers", "accelerate"),
    "trl_sft": ("trl",),
    "trl_dpo": ("trl",),
    "trl_grpo": ("trl",),
    "peft_lora": ("peft", "accelerate"),
    "accelerate_loop": ("accelerate",),
    "accelerate_compile": ("accelerate",),
    "accelerate_ddp": ("accelerate",),
    "accelerate_fsdp": ("accelerate",),
    "torchtitan_loop": ("torchtitan",),
    "axolotl_train": ("axolotl",),
    "lightning_fit": ("lightning",),
    "lightning_compile": ("lightning",),
    "diffusers_train": ("diffusers",),
}
# A row's loss may miss 90% of plain's progress by so much. GRPO's are mean rewards of 64 sampled
# answers of 32 tokens, each a coin: three standard errors of the difference of two such means.
SAMPLED = {"trl_grpo": 3 * (2 * 0.25 / (64 * 32)) ** 0.5}
# With two, inductor's graphs may end in other last bits from run to run, plain PyTorch's too.
ONE_THREAD = {"transformers_compile", "accelerate_compile", "lightning_compile"}
TWO_PROCESSES = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def test_every_example_has_its_test_and_its_rows():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*NEEDS, "tiny"}
    page = PAGE.read_text()
    assert [name for name in NEEDS if f"examples/{name}.py" not in page] == []


def documented_bytes(name):
    """The ratio of saved bytes under `balanced` in an example's row on the page."""
    (row,) = [line for line in PAGE.read_text().splitlines() if f"/{name}.py`" in line]
    return float(re.match(r"[\d.]+", row.split(" | ")[1])[0])


def skip_without_packages(name):
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.mark.nightly
@pytest.mark.parametrize("preset", options("preset"))
@pytest.mark.parametrize(
    "name", ["transformers_trainer", "peft_lora", "accelerate_loop", "lightning_fit"]
)
@pytest.mark.filterwarnings("ignore")  # of what a preset finds nothing of in this model
def test_every_preset_resumes_bit_for_bit(name, preset, tmp_path, monkeypatch):
    skip_without_packages(name)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    run = importlib.import_module(name).run
    losses, model = run(preset, str(tmp_path), False)
    again, resumed = run(preset, str(tmp_path), True)
    assert 0 < len(again) < len(losses)
    assert again == losses[-len(again) :]
    found, expected = resumed.state_dict(), model.state_dict()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", NEEDS)
def test_an_example_saves_bytes_learns_and_resumes_bit_for_bit(name):
    skip_without_packages(name)
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    if name in ONE_THREAD:
        environment["OMP_NUM_THREADS"] = "1"
    launcher = TWO_PROCESSES if name.endswith(("_ddp", "_fsdp")) else []
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)  # noqa: T201 - the page's rows, which -rP shows
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"preset"')]
    assert {row["preset"] for row in rows} >= {"balanced"}
    (balanced,) = [row["bytes"] for row in rows if row["preset"] == "balanced"]
    assert balanced == documented_bytes(name)
    for row in rows:
        assert row["bytes"] < 0.15, row
        assert row["resume"] == "bit-equal", row
        # plain PyTorch's own progress is the yardstick: at least 90% of it, as for every preset
        progress = row["first loss"] - row["loss"] + SAMPLED.get(name, 0.0)
        assert progress > 0.9 * (row["first loss"] - row["plain"]), row
