"""A study: short runs over tasks, variants and seeds into one CSV file, and its table.

A line of the file is one run. An interrupted run leaves none; the same call goes on where it
stopped. Differences are told from a baseline, seed by seed, with a 95% interval.
"""

import csv
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from memtrain.training.batches import loss_of
from memtrain.training.data import Images, Text, build_source
from memtrain.training.networks import GPT
from memtrain.training.run import learning_rate

Row = dict[str, Any]
KEY = ("task", "variant", "seed", "lr", "steps")
"""The columns that tell runs apart, in the order of `Study.train`'s arguments."""
LOSS = "validation_loss"


class Task(NamedTuple):
    """A task to learn: data, a model, and the numbers of a run."""

    data: dict[str, Any]
    model: Callable[[], nn.Module]
    lr: float
    steps: int
    batch: int
    weight_decay: float

    def source(self, seed: int) -> Images | Text:
        """The data, split by the seed."""
        source = build_source(self.data, seed)
        assert isinstance(source, Images | Text)  # noqa: S101 (no other is named below)
        return source


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


@torch.no_grad()
def validate(model: nn.Module, source: Images | Text) -> tuple[float, float]:
    """Loss and accuracy on all held-out images, or on 40 batches of 16 held-out texts."""
    model.eval()
    batches: Iterable[tuple[Tensor, Tensor]]
    if isinstance(source, Images):
        batches = [source.parts["validation"]]
    else:
        batches = [source.batch("validation", index, 16) for index in range(40)]
    dtype = next(model.parameters()).dtype
    losses, hits = [], []
    for inputs, targets in batches:
        given = inputs.to(dtype) if inputs.is_floating_point() else inputs
        found = model(given).flatten(0, -2).float()
        losses.append(nn.functional.cross_entropy(found, targets.flatten()).item())
        hits.append((found.argmax(1) == targets.flatten()).float().mean().item())
    return sum(losses) / len(losses), sum(hits) / len(hits)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups of which vectors are not decayed."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def descend(
    model: nn.Module,
    optimizer: Any,
    batch: Callable[[int], tuple[Tensor, Tensor]],
    *,
    peak: float,
    steps: int,
) -> tuple[list[float], list[float]]:
    """Train so many steps.

    Args:
        model: Plain or wrapped.
        optimizer: Its optimizer.
        batch: Step -> its inputs and targets.
        peak: The highest learning rate, after 20 steps of warm-up.
        steps: So many.

    Returns:
        Each step's loss, and its processor time in seconds.
    """
    losses, seconds = [], []
    for step in range(steps):
        rate = learning_rate(step, peak=peak, warmup=20, steps=steps, final=0.05)
        for group in optimizer.param_groups:
            group["lr"] = rate
        given = batch(step)
        started = time.process_time()
        optimizer.zero_grad()
        loss = loss_of(model, given)
        loss.backward()
        optimizer.step()
        seconds.append(time.process_time() - started)
        losses.append(loss.item())
    return losses, seconds


def quality(held_out: tuple[float, float], losses: Sequence[float]) -> Row:
    """The columns of held-out loss and accuracy, and of the loss in the last tenth of training."""
    last = losses[-max(1, len(losses) // 10) :]
    return {LOSS: held_out[0], "accuracy": held_out[1], "train_loss": sum(last) / len(last)}


class Study(NamedTuple):
    """Variants to train, and how their table is told."""

    about: str
    """Printed where a call is wrong."""
    variants: Sequence[str]
    baseline: str
    """The variant that differences are from."""
    train: Callable[[str, str, int, float, int], Row]
    """Task, variant, seed, highest learning rate and steps -> a line of the file."""
    columns: tuple[str, ...]
    """Of the file: `KEY`, then what `train` measures, `validation_loss` among it."""
    shown: Mapping[str, str]
    """Columns whose mean the table tells besides the loss, and their format."""
    output: Path

    def main(self, arguments: Sequence[str]) -> int:
        """Read the command line and run, or print the table; the exit status."""
        keys = ("tasks", "variants", "seeds", "lr", "steps", "output")
        given: dict[str, str] = {}
        for item in arguments:
            name, _, value = item.partition("=")
            given |= {name: value} if item != "--table" else {}
        if unknown := [name for name in given if name not in keys]:
            _say(
                f"unknown: {', '.join(unknown)}; allowed: --table, {', '.join(keys)}\n{self.about}"
            )
            return 2
        output = Path(given.get("output", self.output))
        if "--table" in arguments:
            _say("\n".join(self.table(read(output))))
            return 0
        tasks = given.get("tasks", ",".join(TASKS)).split(",")
        variants = given.get("variants", ",".join(self.variants)).split(",")
        seeds = [int(seed) for seed in given.get("seeds", "0,1,2,3,4").split(",")]
        for names, known in ((tasks, TASKS), (variants, self.variants)):
            if wrong := [name for name in names if name not in known]:
                _say(f"unknown: {', '.join(wrong)}; allowed: {', '.join(known)}")
                return 2
        cells = []
        for seed, name, variant in product(seeds, tasks, variants):  # complete seeds first
            task = TASKS[name]
            rate, steps = float(given.get("lr", task.lr)), int(given.get("steps", task.steps))
            cells.append((name, variant, seed, rate, steps))
        self.run(cells, output)
        return 0

    def run(self, cells: Sequence[tuple[str, str, int, float, int]], output: Path) -> int:
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
            row = dict(zip(KEY, cell, strict=True)) | self.train(*cell)
            new = not output.exists()
            with output.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, self.columns)
                if new:
                    writer.writeheader()
                writer.writerow(row)
            told = ", ".join(f"{row[name]:{form}} {name}" for name, form in self._means.items())
            _say(f"{number}/{len(left)} {' '.join(map(str, cell))}: {told}")
        return len(left)

    def table(self, rows: Sequence[dict[str, str]]) -> list[str]:
        """Lines of Markdown: means over seeds, and what the loss differs from the baseline's by."""
        found: dict[tuple[str, ...], dict[str, dict[str, str]]] = defaultdict(dict)
        for row in rows:
            found[row["task"], row["lr"], row["steps"], row["variant"]][row["seed"]] = row
        heads = ["task", "lr", "variant", "seeds", *self._means, f"minus {self.baseline}"]
        lines = [f"| {' | '.join(heads).replace('_', ' ')} |", f"|{' --- |' * len(heads)}"]
        for (task, lr, steps, variant), seeds in found.items():
            plain = found.get((task, lr, steps, self.baseline), {})
            pairs = [
                float(row[LOSS]) - float(plain[s][LOSS]) for s, row in seeds.items() if s in plain
            ]
            means = [
                f"{statistics.mean(float(row[name]) for row in seeds.values()):{form}}"
                for name, form in self._means.items()
            ]
            cells = [
                f"{task}, {steps} steps",
                lr,
                variant,
                str(len(seeds)),
                *means,
                _interval(pairs),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        return lines

    @property
    def _means(self) -> dict[str, str]:
        return {LOSS: ".4f", **self.shown}


_T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 1.96)
"""Student's t by degrees of freedom; from 10 on the normal distribution's."""


def _interval(values: Sequence[float]) -> str:
    """Mean and 95% interval; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    width = _T95[min(len(values) - 1, 10)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):+.4f} +- {width:.4f}"


def read(output: Path) -> list[dict[str, str]]:
    """The lines of a CSV file; none where there is no file."""
    if not output.exists():
        return []
    with output.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _say(text: str) -> None:
    Console(soft_wrap=True, highlight=False, markup=False).print(text)
