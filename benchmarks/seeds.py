"""Validation loss of the demo, wrapped against plain, over several seeds.

Runs `memtrain-train` once per seed. Settings: `--set seeds=3` and any override of memtrain-train.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Benchmark, Job, Options, Row


def train(seed, overrides):
    with tempfile.TemporaryDirectory() as folder:
        program = "import sys; from memtrain.cli.train import main; sys.exit(main(sys.argv[1:]))"
        arguments = [f"seed={seed}", f"output.folder={folder}", *overrides]
        command = [sys.executable, "-c", program, *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (summary,) = Path(folder).rglob("summary.json")
        return json.loads(summary.read_text())


def jobs(options: Options) -> list[Job]:
    overrides = [item for item in options.overrides if not item.startswith("seeds=")]
    counts = [int(item[6:]) for item in options.overrides if item.startswith("seeds=")]
    if options.quick:
        counts, overrides = counts or [1], ["experiment=smoke", *overrides]

    def rows(seed) -> list[Row]:
        summary = train(seed, [f"training.device={options.device}", *overrides])
        plain, wrapped = summary["runs"]["plain"], summary["runs"]["wrapped"]
        return [
            {
                "experiment": summary["experiment"],
                "overrides": " ".join(overrides),
                "seed": seed,
                "steps": plain["steps"],
                "plain_validation_loss": plain["validation_loss"],
                "wrapped_validation_loss": wrapped["validation_loss"],
                "wrapped_minus_plain": wrapped["validation_loss"] - plain["validation_loss"],
                "saved_ratio": summary["ratio"]["saved"],
                "states_ratio": summary["ratio"]["states"],
                "step_ratio": summary["ratio"]["step_seconds"],
            }
        ]

    return [Job(f"seed {seed}", lambda seed=seed: rows(seed)) for seed in range((counts or [3])[0])]


BENCHMARK = Benchmark(
    "seeds",
    "validation loss of the demo, wrapped against plain, over seeds",
    jobs,
    ("seed", "plain_validation_loss", "wrapped_validation_loss", "wrapped_minus_plain",
     "step_ratio"),
)  # fmt: skip
