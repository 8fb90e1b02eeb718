"""A study: short runs over tasks, variants and seeds into one CSV file, and its table.

A row of the file is one run. An interrupted run leaves no row; the same call continues with the
runs that are missing. Differences from a baseline are computed seed by seed, with a 95% interval.
"""

import csv
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from experiments.corpus import Text
from experiments.seeds import Seeds, by_run, difference, mean, paired, table
from experiments.tasks import TASKS, Images
from memtrain.training.recipe import learning_rate

Row = dict[str, Any]
Cell = tuple[str, str, int, float, int]
"""A run: its task, variant, seed, learning rate and steps."""
KEY = ("task", "variant", "seed", "lr", "steps")
"""The columns that identify a run, in the order of `Study.train`'s arguments."""
LOSS = "validation_loss"


@torch.no_grad()
def validate(model: nn.Module, source: Images | Text) -> tuple[float, float]:
    """Return loss and accuracy on all held-out images, or on 40 batches of 16 held-out texts."""
    model.eval()
    batches: Iterable[tuple[Tensor, Tensor]]
    if isinstance(source, Images):
        batches = [source.parts["validation"]]
    else:
        batches = [source.batch("validation", index, 16) for index in range(40)]
    like = next(model.parameters())
    losses, hits = [], []
    for inputs, classes in batches:
        x, targets = inputs.to(like.device), classes.to(like.device)
        x = x.to(like.dtype) if x.is_floating_point() else x
        logits = model(x).flatten(0, -2).float()
        losses.append(nn.functional.cross_entropy(logits, targets.flatten()).item())
        hits.append((logits.argmax(1) == targets.flatten()).float().mean().item())
    return sum(losses) / len(losses), sum(hits) / len(hits)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices with weight decay, vectors without."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of a model's logits, mean over the targets."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def descend(
    model: nn.Module,
    optimizer: Any,
    batch: Callable[[int], tuple[Tensor, Tensor]],
    *,
    peak: float,
    steps: int,
    adapt: Callable[[Callable[[], object]], object] | None = None,
) -> tuple[list[float], list[float]]:
    """Train for a number of steps.

    Args:
        model: Unmodified or wrapped.
        optimizer: Its optimizer.
        batch: Maps a step to its inputs and targets.
        peak: The highest learning rate, after 20 steps of warm-up.
        steps: Number of steps.
        adapt: Called before each step with its forward and backward, untimed: GACT's measurements.

    Returns:
        The loss of each step, and the processor time of each step in seconds.
    """
    losses, seconds = [], []
    for step in range(steps):
        rate = learning_rate(step, peak=peak, warmup=20, steps=steps, final=0.05)
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # torchao's
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        inputs = batch(step)
        if adapt:
            adapt(lambda inputs=inputs: loss_of(model, inputs).backward())
        started = time.process_time()
        optimizer.zero_grad()
        loss = loss_of(model, inputs)
        loss.backward()
        optimizer.step()
        seconds.append(time.process_time() - started)
        losses.append(loss.item())
    return losses, seconds


def quality(held_out: tuple[float, float], losses: Sequence[float]) -> Row:
    """Return the columns of held-out loss and accuracy, and of the last tenth's training loss."""
    last = losses[-max(1, len(losses) // 10) :]
    return {LOSS: held_out[0], "accuracy": held_out[1], "train_loss": sum(last) / len(last)}


class Study(NamedTuple):
    """Variants to train, and the columns of their table."""

    about: str
    """Printed for a wrong call."""
    tasks: Sequence[str]
    """Tasks of `TASKS` that a call without `tasks=` trains."""
    variants: Sequence[str]
    """Every known variant."""
    train: Callable[[str, str, int, float, int], Row]
    """Maps task, variant, seed, highest learning rate and steps to a row of the file."""
    columns: tuple[str, ...]
    """Columns of the file: `KEY`, then what `train` measures, `validation_loss` among it."""
    shown: Mapping[str, str]
    """Columns whose mean the table shows besides the loss, and their format."""
    costs: tuple[str, ...]
    """Columns of which less is better."""
    output: Path
    """The CSV file without `output=`."""
    baseline: str = "plain"
    """The variant that differences are from."""
    default: Sequence[str] = ()
    """Variants that a call without `variants=` trains; all of them where empty."""

    def main(self, arguments: Sequence[str]) -> int:
        """Read the command line and run, or print the table; return the exit status."""
        keys = ("tasks", "variants", "seeds", "lr", "steps", "baseline", "output")
        values: dict[str, str] = {}
        for item in arguments:
            name, _, value = item.partition("=")
            values |= {name: value} if item != "--table" else {}
        if unknown := [name for name in values if name not in keys]:
            allowed = ", ".join(("--table", *keys))
            _say(f"unknown: {', '.join(unknown)}; allowed: {allowed}\n{self.about}")
            return 2
        output = Path(values.get("output", self.output))
        tasks = values.get("tasks", ",".join(self.tasks)).split(",")
        variants = values.get("variants", ",".join(self.default or self.variants)).split(",")
        baseline = values.get("baseline", self.baseline)
        seeds = [int(seed) for seed in values.get("seeds", "0,1,2,3,4").split(",")]
        for names, known in ((tasks, TASKS), ([*variants, baseline], self.variants)):
            if wrong := [name for name in names if name not in known]:
                _say(f"unknown: {', '.join(wrong)}; allowed: {', '.join(known)}")
                return 2
        if "--table" in arguments:
            rows = [
                row for row in read(output) if row["task"] in tasks and row["variant"] in variants
            ]
            _say("\n".join(self._replace(baseline=baseline).table(rows)))
            return 0
        cells = []
        for seed, name, variant in product(seeds, tasks, variants):  # complete seeds first
            task = TASKS[name]
            rate = float(values.get("lr", task.lr))
            for steps in values.get("steps", str(task.steps)).split(","):
                cells.append((name, variant, seed, rate, int(steps)))
        self.run(cells, output)
        return 0

    def run(self, cells: Sequence[Cell], output: Path) -> int:
        """Train the cells that the file lacks, each into a row; return their number."""
        done = {tuple(row[name] for name in KEY) for row in read(output)}
        remaining = [cell for cell in cells if tuple(map(str, cell)) not in done]
        for number, cell in enumerate(remaining, 1):
            row: Row = dict(zip(KEY, cell, strict=True)) | self.train(*cell)
            _append(output, self.columns, row)
            means = ", ".join(f"{row[name]:{form}} {name}" for name, form in self._means.items())
            _say(f"{number}/{len(remaining)} {' '.join(map(str, cell))}: {means}")
        return len(remaining)

    def table(self, rows: Sequence[dict[str, str]]) -> list[str]:
        """Return lines of Markdown: means over seeds, and loss differences from the baseline.

        A variant is beaten by one that costs no more in any column of `costs`, less in one, and
        whose mean loss over the seeds of both is no higher.
        """
        means = self._means
        heads = ["task", "lr", "variant", "seeds", *means, f"minus {self.baseline}", "beaten by"]
        cells = [
            (
                f"{task}, {steps} steps",
                lr,
                variant,
                str(len(seeds)),
                *(f"{mean(seeds, name):{form}}" for name, form in means.items()),
                difference(seeds, variants.get((self.baseline,), {}), LOSS),
                ", ".join(name for (name,), one in variants.items() if self._beats(one, seeds)),
            )
            for (task, lr, steps), variants in by_run(
                rows, ("task", "lr", "steps"), ["variant"]
            ).items()
            for (variant,), seeds in variants.items()
        ]
        return table([head.replace("_", " ") for head in heads], cells)

    def _beats(self, one: Seeds, other: Seeds) -> bool:
        mine, theirs = ([mean(seeds, name) for name in self.costs] for seeds in (one, other))
        cheaper = mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))
        differences = paired(one, other, LOSS)
        return cheaper and bool(differences) and statistics.mean(differences) <= 0

    @property
    def _means(self) -> dict[str, str]:
        return {LOSS: ".4f", **self.shown}


def read(output: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file; none where there is no file."""
    if not output.exists():
        return []
    with output.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _append(path: Path, columns: Sequence[str], row: Row) -> None:
    """Add a row to a CSV file, and the heads to a new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerow(row)


def _say(text: str) -> None:
    Console(soft_wrap=True, highlight=False, markup=False).print(text)
