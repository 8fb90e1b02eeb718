"""A study: short runs over tasks, variants and seeds into one CSV file, and its table.

A line of the file is one run. An interrupted run leaves none; the same call goes on where it
stopped. Differences are told from a baseline, seed by seed, with a 95% interval.
"""

import csv
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from experiments import curves_plot
from experiments.pareto_plot import Point, draw
from experiments.seeds import Seeds, by_run, difference, interval, mean, paired, table
from experiments.tasks import TASKS
from memtrain.training.batches import loss_of
from memtrain.training.data import Images, Text
from memtrain.training.run import learning_rate

Row = dict[str, Any]
Cell = tuple[str, str, int, float, int]
"""A run: its task, variant, seed, learning rate and steps."""
KEY = ("task", "variant", "seed", "lr", "steps")
"""The columns that tell runs apart, in the order of `Study.train`'s arguments."""
_RUN = ("task", "lr", "steps")
"""Those of what variants are compared in."""
LOSS = "validation_loss"
LOSSES = "losses"
"""The column of a file of curves, and what a run's line leaves out: the loss of each step."""


@dataclass(kw_only=True)
class TaskConfig:
    """The numbers of a task's runs."""

    lr: float = 1e-3
    """The highest learning rate."""
    steps: int = 1
    """So many."""


@dataclass(kw_only=True)
class StudyConfig:
    """The runs of a study: every task and variant with every seed."""

    name: str = ""
    """The study; none: no study."""
    tasks: dict[str, TaskConfig] = field(default_factory=dict)
    """By name, of `TASKS`."""
    variants: list[str] = field(default_factory=list)
    """Of the study's."""
    seeds: list[int] = field(default_factory=list)
    """Of the data's split and order, and of the weights."""

    def __post_init__(self) -> None:
        for name in ("tasks", "variants", "seeds"):
            if self.name and not getattr(self, name):
                raise ValueError(f"study.{name} is empty; name at least one")
        if unknown := [name for name in self.tasks if name not in TASKS]:
            raise ValueError(f"study.tasks.{unknown[0]} is unknown; allowed: {', '.join(TASKS)}")

    def cells(self) -> list[Cell]:
        """All runs, seed by seed: what a study that is cut short has is complete seeds."""
        return [
            (name, variant, seed, task.lr, task.steps)
            for seed in self.seeds
            for name, task in self.tasks.items()
            for variant in self.variants
        ]


@torch.no_grad()
def validate(model: nn.Module, source: Images | Text) -> tuple[float, float]:
    """Loss and accuracy on all held-out images, or on 40 batches of 16 held-out texts."""
    model.eval()
    batches: Iterable[tuple[Tensor, Tensor]]
    if isinstance(source, Images):
        batches = [source.parts["validation"]]
    else:
        batches = [source.batch("validation", index, 16) for index in range(40)]
    like = next(model.parameters())
    losses, hits = [], []
    for inputs, classes in batches:
        given, targets = inputs.to(like.device), classes.to(like.device)
        given = given.to(like.dtype) if given.is_floating_point() else given
        found = model(given).flatten(0, -2).float()
        losses.append(nn.functional.cross_entropy(found, targets.flatten()).item())
        hits.append((found.argmax(1) == targets.flatten()).float().mean().item())
    return sum(losses) / len(losses), sum(hits) / len(hits)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Groups of the parameters that are trained, of which vectors are not decayed."""
    parameters = [p for p in model.parameters() if p.requires_grad]
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
    reset: int = 0,
    adapt: Callable[[Callable[[], object]], object] | None = None,
) -> tuple[list[float], list[float]]:
    """Train so many steps.

    Args:
        model: Plain or wrapped.
        optimizer: Its optimizer.
        batch: Step -> its inputs and targets.
        peak: The highest learning rate, after 20 steps of warm-up.
        steps: So many.
        reset: After so many the optimizer's states begin anew, again and again; 0: never.
        adapt: Called before each step with its forward and backward, untimed: GACT's measurements.

    Returns:
        Each step's loss, and its processor time in seconds.
    """
    losses, seconds = [], []
    for step in range(steps):
        if reset and step and not step % reset:
            optimizer.state.clear()
        rate = learning_rate(step, peak=peak, warmup=20, steps=steps, final=0.05)
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # torchao's
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        given = batch(step)
        if adapt:
            adapt(lambda given=given: loss_of(model, given).backward())
        started = time.process_time()
        optimizer.zero_grad()
        loss = loss_of(model, given)
        loss.backward()
        optimizer.step()
        seconds.append(time.process_time() - started)
        losses.append(loss.item())
    return losses, seconds


def quality(held_out: tuple[float, float], losses: Sequence[float]) -> Row:
    """The columns of held-out loss and accuracy, and of the loss in the last tenth of training.

    Each step's loss is with them, as `LOSSES`.
    """
    last = losses[-max(1, len(losses) // 10) :]
    row = {LOSS: held_out[0], "accuracy": held_out[1], "train_loss": sum(last) / len(last)}
    return row | {LOSSES: losses}


class Study(NamedTuple):
    """Variants to train, and how their table is told."""

    about: str
    """Printed where a call is wrong."""
    tasks: Sequence[str]
    """Of `TASKS`, that a call without `tasks=` trains."""
    variants: Sequence[str]
    baseline: str
    """The variant that differences are from."""
    train: Callable[[str, str, int, float, int], Row]
    """Task, variant, seed, highest learning rate and steps -> a line of the file, and `LOSSES`."""
    columns: tuple[str, ...]
    """Of the file: `KEY`, then what `train` measures, `validation_loss` among it."""
    shown: Mapping[str, str]
    """Columns whose mean the table tells besides the loss, and their format."""
    costs: tuple[str, ...]
    """Columns of which less is better; the plot is over the first."""
    output: Path

    def main(self, arguments: Sequence[str]) -> int:
        """Read the command line and run, or print the table; the exit status."""
        keys = ("tasks", "variants", "seeds", "lr", "steps", "baseline", "output", "curves")
        given: dict[str, str] = {}
        for item in arguments:
            name, _, value = item.partition("=")
            given |= {name: value} if item not in ("--table", "--plot") else {}
        if unknown := [name for name in given if name not in keys]:
            allowed = ", ".join(("--table", "--plot", *keys))
            _say(f"unknown: {', '.join(unknown)}; allowed: {allowed}\n{self.about}")
            return 2
        output = Path(given.get("output", self.output))
        curves = Path(given["curves"]) if "curves" in given else None
        tasks = given.get("tasks", ",".join(self.tasks)).split(",")
        variants = given.get("variants", ",".join(self.variants)).split(",")
        baseline = given.get("baseline", self.baseline)
        seeds = [int(seed) for seed in given.get("seeds", "0,1,2,3,4").split(",")]
        for names, known in ((tasks, TASKS), ([*variants, baseline], self.variants)):
            if wrong := [name for name in names if name not in known]:
                _say(f"unknown: {', '.join(wrong)}; allowed: {', '.join(known)}")
                return 2
        drawn = curves if curves and "--plot" in arguments else output
        rows = [row for row in read(drawn) if row["task"] in tasks and row["variant"] in variants]
        if "--table" in arguments:
            _say("\n".join(self._replace(baseline=baseline).table(rows)))
            return 0
        if "--plot" in arguments and curves:
            curves_plot.draw(curves.with_suffix(".png"), _curves(rows), baseline)
            return 0
        if "--plot" in arguments:
            draw(output.with_suffix(".png"), self.points(rows), self.costs[0])
            return 0
        cells = []
        for seed, name, variant in product(seeds, tasks, variants):  # complete seeds first
            task = TASKS[name]
            rate = float(given.get("lr", task.lr))
            for steps in given.get("steps", str(task.steps)).split(","):
                cells.append((name, variant, seed, rate, int(steps)))
        self.run(cells, output, curves)
        return 0

    def run(self, cells: Sequence[Cell], output: Path, curves: Path | None = None) -> int:
        """Train the cells that the file does not hold, each into a line.

        Args:
            cells: Each once.
            output: The CSV file.
            curves: Another, into which each step's loss goes of what is trained now.

        Returns:
            How many were trained now.
        """
        done = {tuple(row[name] for name in KEY) for row in read(output)}
        left = [cell for cell in cells if tuple(map(str, cell)) not in done]
        for number, cell in enumerate(left, 1):
            key: Row = dict(zip(KEY, cell, strict=True))
            row = key | self.train(*cell)
            losses = row.pop(LOSSES)
            if curves:  # first: a run that is broken off here is trained again
                told = " ".join(f"{loss:.5g}" for loss in losses)
                _append(curves, (*KEY, LOSSES), key | {LOSSES: told})
            _append(output, self.columns, row)
            told = ", ".join(f"{row[name]:{form}} {name}" for name, form in self._means.items())
            _say(f"{number}/{len(left)} {' '.join(map(str, cell))}: {told}")
        return len(left)

    def table(self, rows: Sequence[dict[str, str]]) -> list[str]:
        """Lines of Markdown: means over seeds, and what the loss differs from the baseline's by.

        A variant is beaten by one that costs no more in any column of `costs`, less in one, and
        whose mean loss over the seeds of both is no higher.
        """
        means = self._means
        heads = ["task", "lr", "variant", "seeds", *means, f"minus {self.baseline}", "beaten by"]
        told = [
            (
                f"{task}, {steps} steps",
                lr,
                variant,
                str(len(seeds)),
                *(f"{mean(seeds, name):{form}}" for name, form in means.items()),
                difference(seeds, variants.get((self.baseline,), {}), LOSS),
                ", ".join(name for (name,), one in variants.items() if self._beats(one, seeds)),
            )
            for (task, lr, steps), variants in by_run(rows, _RUN, ["variant"]).items()
            for (variant,), seeds in variants.items()
        ]
        return table([head.replace("_", " ") for head in heads], told)

    def _beats(self, one: Seeds, other: Seeds) -> bool:
        mine, theirs = ([mean(seeds, name) for name in self.costs] for seeds in (one, other))
        cheaper = mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))
        differences = paired(one, other, LOSS)
        return cheaper and bool(differences) and statistics.mean(differences) <= 0

    def points(self, rows: Sequence[dict[str, str]]) -> dict[str, list[Point]]:
        """Title of a task -> its variants' points of the plot."""
        found: dict[str, list[Point]] = {}
        for (task, _, steps), variants in by_run(rows, _RUN, ["variant"]).items():
            plain = variants.get((self.baseline,), {})
            found[f"{task}, {steps} steps"] = [
                Point(
                    variant,
                    mean(seeds, self.costs[0]),
                    mean(seeds, LOSS),
                    (interval(paired(seeds, plain, LOSS)) or (0, 0))[1],
                )
                for (variant,), seeds in variants.items()
            ]
        return found

    @property
    def _means(self) -> dict[str, str]:
        return {LOSS: ".4f", **self.shown}


class Runs:
    """The runs of a config.

    Args:
        config: Of a study.
        study: The one that it names.
        folder: Of the CSV file.

    Raises:
        ValueError: For an unknown variant.
    """

    def __init__(self, config: StudyConfig, study: Study, folder: Path) -> None:
        if unknown := [name for name in config.variants if name not in study.variants]:
            allowed = ", ".join(study.variants)
            raise ValueError(f"study.variants: {unknown[0]!r} is unknown; allowed: {allowed}")
        self.cells, self.study, self.output = config.cells(), study, folder / study.output.name

    def train(self) -> int:
        """Train those that the file does not hold; how many."""
        return self.study.run(self.cells, self.output)


def read(output: Path) -> list[dict[str, str]]:
    """The lines of a CSV file; none where there is no file."""
    if not output.exists():
        return []
    with output.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _append(path: Path, columns: Sequence[str], row: Row) -> None:
    """Add a line to a CSV file, and the heads to a new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerow(row)


def _curves(rows: Sequence[dict[str, str]]) -> dict[str, dict[str, list[float]]]:
    """Title of a task and seed -> variant -> each step's loss, of the lines of a file of curves."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        runs = found.setdefault(f"{row['task']}, seed {row['seed']}", {})
        runs[row["variant"]] = [float(loss) for loss in row[LOSSES].split()]
    return found


def _say(text: str) -> None:
    Console(soft_wrap=True, highlight=False, markup=False).print(text)
