"""A sweep over float formats: run after run into one CSV file, going on where it stopped."""

import csv
import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from experiments import tradeoff_plot
from experiments.study import StudyConfig
from memtrain.api import precision_state
from memtrain.training.data import Images, build_source
from memtrain.training.display import Display
from memtrain.training.networks import build_model
from memtrain.training.run import Run
from memtrain.training.settings import TrainConfig

WITHOUT_RATIO = ("fp32", "uniform", "operator", "operator_out")


class Cell(NamedTuple):
    """One run of a sweep."""

    family: str
    width: float
    assignment: str
    ratio: float
    promotion: bool
    seed: int


@dataclass(kw_only=True)
class GridConfig:
    """Assignments, each at every ratio, with and without promotion."""

    assignments: list[str] = field(default_factory=lambda: ["size_ordered"])
    """`fp32`, `uniform`, `operator`, `operator_out`, `size_ordered`, `increasing`, `random`."""
    ratios: list[float] = field(default_factory=lambda: [1.0])
    """Low-precision ratios, 0 to 1; the first four assignments have none, and run once."""
    promotions: list[bool] = field(default_factory=lambda: [True])
    """Whether tensors that overflow are promoted."""

    def __post_init__(self) -> None:
        for ratio in self.ratios:
            if not 0 <= ratio <= 1:
                raise ValueError(f"sweep.grids.ratios={self.ratios}: {ratio}; allowed: 0 to 1")
        for name in ("assignments", "ratios", "promotions"):
            if not getattr(self, name):
                raise ValueError(f"sweep.grids.{name}=[] is empty; name at least one")


@dataclass(kw_only=True)
class SweepConfig:
    """Many runs of one experiment: every family and width, every seed, every line of the grids."""

    families: list[str] = field(default_factory=list)
    """Of `model.name=cifar`; none: no sweep."""
    widths: list[float] = field(default_factory=lambda: [1.0])
    """Width multipliers."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """Of weights, order of images, and random assignments."""
    grids: list[GridConfig] = field(default_factory=list)
    """Which assignments, at which ratios."""

    def __post_init__(self) -> None:
        for name in ("widths", "seeds", "grids"):
            if self.families and not getattr(self, name):
                raise ValueError(f"sweep.{name}=[] is empty; name at least one")


@dataclass(kw_only=True)
class SweepTrainConfig(TrainConfig):
    """`memtrain-train`'s keys, and which runs a sweep, or a study, makes."""

    sweep: SweepConfig = field(default_factory=SweepConfig)
    """Many runs instead of two, where it names families."""
    study: StudyConfig = field(default_factory=StudyConfig)
    """Many runs instead of two, where it has a name."""


def cells(sweep: SweepConfig) -> list[Cell]:
    """All runs, each once, seed by seed: what a sweep that is cut short has is complete seeds.

    Args:
        sweep: The sweep.

    Returns:
        The runs in order.

    Example:
        >>> grid = GridConfig(assignments=["uniform", "size_ordered"], ratios=[0.0, 0.5])
        >>> [(cell.assignment, cell.ratio) for cell in cells(SweepConfig(families=["a"], grids=[grid]))]
        [('uniform', 1.0), ('size_ordered', 0.0), ('size_ordered', 0.5)]
    """  # noqa: E501
    found: dict[Cell, None] = {}
    for seed, family, width, grid in product(
        sweep.seeds, sweep.families, sweep.widths, sweep.grids
    ):
        for assignment, promotion in product(grid.assignments, grid.promotions):
            ratios = [1.0] if assignment in WITHOUT_RATIO else grid.ratios
            for ratio in ratios:
                found[Cell(family, width, assignment, ratio, promotion, seed)] = None
    return list(found)


SETTINGS = ("data", "images", "side", "steps", "batch", "lr", "low", "high")
RESULTS = (
    "accuracy", "train_loss", "low_ratio", "aggregate_bits", "promoted", "overflows", "diverged_at",
    "seconds", "torch",
)  # fmt: skip
_BATCH = 500  # images of a validation batch


class Sweep:
    """Trains every run of a config's sweep that its results do not hold yet.

    Results go to `<output.folder>/<experiment>/results.csv`, a line as soon as a run is done, and
    `tradeoff.png`. A run is in it if a line has its cell and its settings. Making a sweep checks
    the config, the data, and every model.

    Args:
        config: The whole config.
        console: Where progress goes.

    Raises:
        ValueError: For anything in the config that is wrong.
        OSError: If the folder cannot be made.
    """

    def __init__(self, config: SweepTrainConfig, *, console: Console | None = None) -> None:
        self.config, self.console = config, console or Console(quiet=True)
        self.cells = cells(config.sweep)
        source = build_source(config.data, config.seed)
        if not isinstance(source, Images):
            raise ValueError(f"data.name={config.data['name']!r}; allowed with a sweep: images")
        self.source: Images = source
        for cell in {cell._replace(seed=0) for cell in self.cells}:
            self.config_of(cell)
        for spec in {(cell.family, cell.width): cell for cell in self.cells}.values():
            build_model(self.config_of(spec).model, 0, "images")
        self.folder = Path(config.output.folder) / str(config.experiment)
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def results(self) -> Path:
        """The CSV file."""
        return self.folder / "results.csv"

    def config_of(self, cell: Cell) -> SweepTrainConfig:
        """A run's own config: the sweep's, with the cell's values."""
        operator = cell.assignment.startswith("operator")  # the paper's leaves both ends high
        precision = replace(
            self.config.precision,
            assignment=cell.assignment,
            ratio=cell.ratio,
            seed=cell.seed,
            promotion=self.config.precision.promotion if cell.promotion else None,
            keep_first=operator or self.config.precision.keep_first,
            keep_last=operator or self.config.precision.keep_last,
        )
        model = {**self.config.model, "family": cell.family, "width": cell.width}
        return replace(self.config, model=model, precision=precision, seed=cell.seed)

    def settings(self) -> dict[str, Any]:
        """Settings that all runs share, as the CSV file has them."""
        config, parts = self.config, self.source.parts
        images = parts["train"][0]
        return {
            "data": config.data["name"],
            "images": len(images),
            "side": images.shape[-1],
            "steps": config.training.steps,
            "batch": config.training.batch,
            "lr": config.optimizer.lr,
            "low": config.precision.low,
            "high": config.precision.high,
        }

    def rows(self) -> list[dict[str, str]]:
        """The lines of the CSV file that have this sweep's settings."""
        if not self.results.exists():
            return []
        with self.results.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        own = {key: str(value) for key, value in self.settings().items()}
        return [row for row in rows if own.items() <= row.items()]

    def train(self) -> int:
        """Do the runs that are not done, and draw.

        Returns:
            How many were done now.

        Raises:
            OSError: If a line cannot be written.
        """
        done = {_key(row): row for row in self.rows()}
        left = [cell for cell in self.cells if _key(cell._asdict()) not in done]
        display = Display(self.console, "images", quiet=self.config.output.quiet)
        display.say(f"{len(left)} of {len(self.cells)} runs to do, into {self.results}")
        gc.freeze()  # looking through all that is loaded took a fifth of a small run's time
        for number, cell in enumerate(left, 1):
            outcome = _same(cell, done)
            if outcome is None:
                outcome = run_cell(self.config_of(cell), Images(self.source.parts, cell.seed))
            row = {**cell._asdict(), **self.settings(), **outcome}
            self._append(row)
            done[_key(row)] = row
            accuracy = float(outcome["accuracy"])
            display.say(f"{number}/{len(left)} {_words(cell)}: accuracy {accuracy:.3f}")
        if self.config.output.plot:
            try:
                tradeoff_plot.draw(self.folder / "tradeoff.png", self.rows())
            except ModuleNotFoundError as error:
                display.warn(f"no tradeoff.png: {error}")
        return len(left)

    def _append(self, row: Mapping[str, Any]) -> None:
        columns = (*Cell._fields, *SETTINGS, *RESULTS)
        new = not self.results.exists()
        with self.results.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            if new:
                writer.writeheader()
            writer.writerow(row)


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cell of a line, as the CSV file writes it."""
    return tuple(str(row[name]) for name in Cell._fields)


def _same(cell: Cell, done: Mapping[tuple[str, ...], Mapping[str, Any]]) -> dict[str, Any] | None:
    """The row of a run without promotion, if the one with it promoted nothing: the same."""
    if cell.promotion:
        return None
    row = done.get(_key(cell._replace(promotion=True)._asdict()), {})
    return {name: row[name] for name in RESULTS} if str(row.get("promoted")) == "0" else None


def run_cell(config: TrainConfig, source: Images) -> dict[str, Any]:
    """Train one run to its end, or to a loss that is no number.

    Args:
        config: Its own config; with `precision.assignment=fp32` it is not wrapped.
        source: The images.

    Returns:
        The columns `RESULTS`. A run that diverged has the accuracy of the model it came to.
    """
    start, diverged = time.perf_counter(), ""
    name = "wrapped" if config.precision.active else "plain"
    run = Run(name, config, source)
    while not run.finished:
        try:
            run.train_step()
        except FloatingPointError:
            diverged = run.step
            break
    rounded = precision_state(run.model) if name == "wrapped" else None
    losses = [row.loss for row in run.rows][-max(1, config.training.steps // 10) :]
    return {
        "accuracy": accuracy(run, source),
        "train_loss": sum(losses) / len(losses) if losses else "",
        "low_ratio": rounded.average_ratio if rounded else 0.0,
        "aggregate_bits": rounded.bits if rounded else "",
        "promoted": len(rounded.promotions) if rounded else 0,
        "overflows": rounded.scale.overflows if rounded else 0,
        "diverged_at": diverged,
        "seconds": time.perf_counter() - start,
        "torch": torch.__version__,
    }


@torch.no_grad()
def accuracy(run: Run, source: Images) -> float:
    """The share of all validation images whose class the model tells."""
    images, targets = source.parts["validation"]
    run.model.eval()
    hits = 0
    for inputs, classes in zip(images.split(_BATCH), targets.split(_BATCH), strict=True):
        hits += int((run.model(inputs.to(run.device)).argmax(1).cpu() == classes).sum())
    return hits / len(targets)


def _words(cell: Cell) -> str:
    ratio = (
        f" {cell.ratio:g}" if cell.assignment in ("size_ordered", "increasing", "random") else ""
    )
    promotion = "" if cell.promotion else " without promotion"
    return f"{cell.family} x{cell.width:g} {cell.assignment}{ratio}{promotion}, seed {cell.seed}"
