"""The examples of docs/integrations.md, run as a user would: bytes, losses, resumed runs."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = EXAMPLES.parent / "docs" / "integrations.md"
NEEDS = {
    "transformers_trainer": ("transformers", "accelerate"),
    "trl_sft": ("trl",),
    "peft_lora": ("peft", "accelerate"),
    "accelerate_loop": ("accelerate",),
    "accelerate_ddp": ("accelerate",),
    "lightning_fit": ("lightning",),
}
TWO_PROCESSES = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def test_every_example_has_its_test_and_its_rows():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*NEEDS, "tiny"}
    page = PAGE.read_text()
    assert [name for name in NEEDS if f"examples/{name}.py" not in page] == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", NEEDS)
def test_an_example_saves_bytes_learns_and_resumes_bit_for_bit(name):
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    launcher = TWO_PROCESSES if name.endswith("_ddp") else []
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"preset"')]
    assert {row["preset"] for row in rows} >= {"balanced"}
    for row in rows:
        assert row["bytes"] < 0.15, row
        assert row["resume"] == "bit-equal", row
        # plain PyTorch's own progress is the yardstick: at least 90% of it, as for every preset
        assert row["first loss"] - row["loss"] > 0.9 * (row["first loss"] - row["plain"]), row
