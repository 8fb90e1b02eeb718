"""Optimizer states of fewer and fewer bits, trained with over seeds: run after run into one CSV.

    python -m experiments.optimizer_states            every task, variant and seed; the same call
                                                      goes on where it stopped
    python -m experiments.optimizer_states tasks=digits variants=fp32,factored_2bit seeds=0,1
    python -m experiments.optimizer_states --table    means and 95% intervals of what is done

Other keys: `output=FILE` (outputs/optimizer_states.csv), `lr=RATE` and `steps=N` in place of each
task's own. A line of the file is one run; an interrupted run leaves none.
"""

import csv
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import memtrain
from memtrain.optim import Lion, state_bytes
from memtrain.training.batches import loss_of
from memtrain.training.data import Images, Text, build_source
from memtrain.training.networks import GPT
from memtrain.training.run import learning_rate

OUTPUT = Path("outputs/optimizer_states.csv")
COLUMNS: tuple[str, ...] = (
    "task", "variant", "seed", "lr", "steps", "validation_loss", "accuracy", "train_loss",
    "bytes_per_parameter", "seconds", "torch",
)  # fmt: skip
KEY = COLUMNS[:5]


class Variant(NamedTuple):
    """An optimizer, and how its states are kept: options of the config group `optim`, or rules."""

    optim: Any = ""
    betas: tuple[float, float] = (0.9, 0.99)
    make: Callable[..., Optimizer] = AdamW
    rate: float = 1.0
    """Its learning rate, times the task's; its weight decay is divided by it."""


_EXACT = {"state": "exp_avg", "compressor": "identity"}
_FACTORED = {"state": "exp_avg_sq", "compressor": "factored"}
_8BIT = {"state": "exp_avg|exp_avg_sq", "compressor": "B256/DE8"}
VARIANTS = {
    "fp32": Variant(),
    "factored_exact_moment": Variant({"rules": [_FACTORED, _EXACT]}),
    "no_momentum": Variant({"rules": [_FACTORED, _EXACT]}, betas=(0.0, 0.99)),
    "8bit": Variant({"rules": [_8BIT]}),
    "rank1_4bit": Variant("rank1_4bit"),
    "factored_8bit": Variant("factored_8bit"),
    "factored_4bit": Variant("factored_4bit"),
    "factored_2bit": Variant("factored_2bit"),
    "lion": Variant(betas=(0.9, 0.99), make=Lion, rate=0.2),
    "lion_4bit": Variant("factored_4bit", betas=(0.9, 0.99), make=Lion, rate=0.2),
}
"""Name of a variant -> what it is. 4-bit AdamW of the paper is `rank1_4bit`."""


class Task(NamedTuple):
    """A task to learn: data, a model, and the numbers of a run."""

    data: dict[str, Any]
    model: Callable[[], nn.Module]
    lr: float
    steps: int
    batch: int
    weight_decay: float


def convolutions() -> nn.Sequential:
    """A CNN of 122,000 parameters for 8 x 8 digits."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


TASKS = {
    "digits": Task({"name": "digits"}, convolutions, 1e-3, 600, 16, 0.01),
    "gpt": Task(
        {"name": "stdlib", "sequence": 96},
        lambda: GPT(layers=3, width=128, heads=4, context=96),
        2e-3,
        300,
        16,
        0.1,
    ),
}


def train(name: str, variant: str, seed: int, lr: float, steps: int) -> dict[str, Any]:
    """Train one run.

    Args:
        name: Of `TASKS`.
        variant: Of `VARIANTS`.
        seed: Of the data's split and order, and of the weights.
        lr: The highest learning rate, of AdamW.
        steps: So many.

    Returns:
        A line of the CSV file.
    """
    task, own = TASKS[name], VARIANTS[variant]
    started = time.perf_counter()
    source = build_source(task.data, seed)
    assert isinstance(source, Images | Text)  # noqa: S101 (no other is named above)
    torch.manual_seed(seed)
    model = task.model()
    parameters = list(model.parameters())
    optimizer: Any = own.make(
        [
            {"params": [p for p in parameters if p.dim() > 1]},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=lr * own.rate,
        betas=own.betas,
        weight_decay=task.weight_decay / own.rate,
    )
    if own.optim:
        chosen = own.optim
        config = ["preset=optimizer_only", f"optim={chosen}"]
        if isinstance(chosen, dict):
            config = {"preset": "exact", "optim": chosen}
        model, optimizer = memtrain.wrap(model, optimizer, config)
    losses = []
    for step in range(steps):
        rate = learning_rate(step, peak=lr * own.rate, warmup=20, steps=steps, final=0.05)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = loss_of(model, source.batch("train", step, task.batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    held_out = validate(model, source)
    last = losses[-max(1, steps // 10) :]
    return {
        "task": name,
        "variant": variant,
        "seed": seed,
        "lr": lr,
        "steps": steps,
        "validation_loss": held_out[0],
        "accuracy": held_out[1],
        "train_loss": sum(last) / len(last),
        "bytes_per_parameter": state_bytes(optimizer) / sum(p.numel() for p in parameters),
        "seconds": time.perf_counter() - started,
        "torch": torch.__version__,
    }


@torch.no_grad()
def validate(model: nn.Module, source: Images | Text) -> tuple[float, float]:
    """Loss and accuracy on all held-out images, or on 40 batches of 16 held-out texts."""
    model.eval()
    batches: Iterable[tuple[Tensor, Tensor]]
    if isinstance(source, Images):
        batches = [source.parts["validation"]]
    else:
        batches = [source.batch("validation", index, 16) for index in range(40)]
    losses, hits = [], []
    for inputs, targets in batches:
        found = model(inputs).flatten(0, -2)
        losses.append(nn.functional.cross_entropy(found, targets.flatten()).item())
        hits.append((found.argmax(1) == targets.flatten()).float().mean().item())
    return sum(losses) / len(losses), sum(hits) / len(hits)


def _say(text: str) -> None:
    Console(soft_wrap=True, highlight=False, markup=False).print(text)


def read(output: Path) -> list[dict[str, str]]:
    """The lines of a CSV file; none where there is no file."""
    if not output.exists():
        return []
    with output.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def run(cells: Sequence[tuple[str, str, int, float, int]], output: Path) -> int:
    """Train the cells that the file does not hold, each into a line.

    Args:
        cells: Task, variant, seed, learning rate and steps of each.
        output: The CSV file.

    Returns:
        How many were trained now.
    """
    done = {tuple(row[name] for name in KEY) for row in read(output)}
    left = [cell for cell in cells if tuple(map(str, cell)) not in done]
    output.parent.mkdir(parents=True, exist_ok=True)
    for number, cell in enumerate(left, 1):
        row = train(*cell)
        new = not output.exists()
        with output.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow(row)
        shown = f"{row['validation_loss']:.4f}, {row['bytes_per_parameter']:.2f} B/param"
        _say(f"{number}/{len(left)} {' '.join(map(str, cell))}: {shown}")
    return len(left)


_T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 1.96)
"""Student's t by degrees of freedom; from 10 on the normal distribution's."""


def table(rows: Sequence[dict[str, str]]) -> list[str]:
    """Lines of Markdown: means over seeds, and 95% intervals of what differs from fp32, by seed."""
    found: dict[tuple[str, ...], dict[str, dict[str, str]]] = defaultdict(dict)
    for row in rows:
        found[row["task"], row["lr"], row["steps"], row["variant"]][row["seed"]] = row
    lines = [
        "| task | lr | variant | bytes per parameter | seeds | validation loss | minus fp32 | accuracy |",  # noqa: E501
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (task, lr, steps, variant), seeds in found.items():
        loss = {seed: float(row["validation_loss"]) for seed, row in seeds.items()}
        plain = found.get((task, lr, steps, "fp32"), {})
        pairs = [loss[s] - float(plain[s]["validation_loss"]) for s in loss if s in plain]
        difference = ""
        if len(pairs) > 1:
            width = _T95[min(len(pairs) - 1, 10)] * statistics.stdev(pairs) / math.sqrt(len(pairs))
            difference = f"{statistics.mean(pairs):+.4f} +- {width:.4f}"
        accuracy = statistics.mean(float(row["accuracy"]) for row in seeds.values())
        nbytes = float(next(iter(seeds.values()))["bytes_per_parameter"])
        cells = (
            f"{task}, {steps} steps", lr, variant, f"{nbytes:.2f}", str(len(loss)),
            f"{statistics.mean(loss.values()):.4f}", difference, f"{accuracy:.4f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Read the command line and run, or print the table; the exit status."""
    keys = ("tasks", "variants", "seeds", "lr", "steps", "output")
    given: dict[str, str] = {}
    for item in arguments:
        name, _, value = item.partition("=")
        given |= {name: value} if item != "--table" else {}
    if unknown := [name for name in given if name not in keys]:
        _say(f"unknown: {', '.join(unknown)}; allowed: --table, {', '.join(keys)}\n{__doc__}")
        return 2
    output = Path(given.get("output", OUTPUT))
    if "--table" in arguments:
        _say("\n".join(table(read(output))))
        return 0
    tasks = given.get("tasks", ",".join(TASKS)).split(",")
    variants = given.get("variants", ",".join(VARIANTS)).split(",")
    seeds = [int(seed) for seed in given.get("seeds", "0,1,2,3,4").split(",")]
    for name, known in ((tasks, TASKS), (variants, VARIANTS)):
        if wrong := [one for one in name if one not in known]:
            _say(f"unknown: {', '.join(wrong)}; allowed: {', '.join(known)}")
            return 2
    cells = []
    for seed, name, variant in product(seeds, tasks, variants):  # complete seeds first
        task = TASKS[name]
        rate, steps = float(given.get("lr", task.lr)), int(given.get("steps", task.steps))
        cells.append((name, variant, seed, rate, steps))
    run(cells, output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
