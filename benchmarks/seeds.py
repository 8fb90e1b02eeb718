"""Validation loss of the demo, wrapped against plain, over several seeds.

    python benchmarks/seeds.py [--seeds 3] [override ...]

Runs `memtrain-train` once per seed and prints each pair of final validation losses, the spread of
the plain runs and the mean difference. One row per seed goes to `benchmarks/results/seeds.csv`.
"""

import argparse
import csv
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "seeds.csv"


def run(seed, overrides):
    with tempfile.TemporaryDirectory() as folder:
        program = "import sys; from memtrain.cli.train import main; sys.exit(main(sys.argv[1:]))"
        arguments = [f"seed={seed}", f"output.folder={folder}", *overrides]
        command = [sys.executable, "-c", program, *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (summary,) = Path(folder).rglob("summary.json")
        return json.loads(summary.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    args, overrides = parser.parse_known_args()
    rows = []
    for seed in range(args.seeds):
        summary = run(seed, overrides)
        plain, wrapped = summary["runs"]["plain"], summary["runs"]["wrapped"]
        rows.append(
            {
                "experiment": summary["experiment"], "overrides": " ".join(overrides),
                "seed": seed, "steps": plain["steps"],
                "plain_validation_loss": plain["validation_loss"],
                "wrapped_validation_loss": wrapped["validation_loss"],
                "saved_ratio": summary["ratio"]["saved"],
                "states_ratio": summary["ratio"]["states"],
                "step_ratio": summary["ratio"]["step_seconds"],
                "torch": summary["torch"], "cpu": platform.machine(),
                "date": time.strftime("%Y-%m-%d"),
            }
        )  # fmt: skip
        print(
            f"seed {seed}: plain {plain['validation_loss']:.4f}  "
            f"wrapped {wrapped['validation_loss']:.4f}  "
            f"step time {summary['ratio']['step_seconds']:.2f}x",
            flush=True,
        )
    plain = [row["plain_validation_loss"] for row in rows]
    difference = [
        row["wrapped_validation_loss"] - loss for row, loss in zip(rows, plain, strict=True)
    ]
    print(
        f"spread of plain {max(plain) - min(plain):.4f}; "
        f"wrapped - plain: mean {statistics.mean(difference):+.4f}, "
        f"worst {max(difference, key=abs):+.4f}"
    )
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        if new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
