"""A call of `memtrain-train`: the output folder, the runs, checkpoints and results."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console

from memtrain.audit.live_storages import storage_nbytes
from memtrain.audit.process_memory import hand_back_freed_pages, large_blocks_mapped
from memtrain.config.sizes import format_size
from memtrain.kernels.random.generators import random_state, set_random_state
from memtrain.planner import Fit
from memtrain.training import checkpoint, pretrained, results
from memtrain.training.data import build_source
from memtrain.training.forecast import describe, describe_peak
from memtrain.training.run import Metrics, Run, is_due
from memtrain.training.settings import TrainConfig

Write = Callable[[Metrics], None]
_LARGE = 2**30
"""Bytes of weights from which on large blocks are unmapped when they are freed."""
_PERIOD = 10.0
"""Seconds between printed steps."""


class Session:
    """Trains what a config describes, and writes the results into a new folder.

    The constructor checks everything that can be checked before training: the config, the data,
    each model and its plan, and that the folder can be written.

    Example:
        >>> import tempfile
        >>> from memtrain.training.settings import compose, from_mapping
        >>> folder = tempfile.mkdtemp()
        >>> overrides = ["experiment=smoke", "training.runs=[plain]", f"output.folder={folder}"]
        >>> session = Session(from_mapping(compose([*overrides, "output.quiet=true"])))
        >>> session.train()["plain"]["steps"]
        8
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        state: Mapping[str, Any] | None = None,
        console: Console | None = None,
    ) -> None:
        self.config, self.state = config, state
        self.console = console or Console(quiet=True)
        self.source = build_source(config.data, config.seed, config.model)
        self.summaries: dict[str, dict[str, Any]] = dict(state["summaries"]) if state else {}
        self.rows: list[Metrics] = (
            [Metrics(*row) for row in state["finished_rows"]] if state else []
        )
        self.fit: Fit | None = None
        self._lines: list[str] = []
        self._forecasts: dict[str, int] = {}  # run -> bytes at its predicted peak
        self._made: tuple[Run, dict[str, Any]] | None = None  # a single run is built once
        for name in config.training.runs:
            self._check(name)
        self.folder = new_folder(Path(config.output.folder) / str(config.experiment))
        OmegaConf.save(OmegaConf.create(asdict(config)), self.folder / "config.yaml")
        self._stop = False
        self._printed = time.monotonic()

    def _check(self, name: str) -> None:
        """Build a run, so that a wrong plan shows now and not after the baseline's run."""
        run = self._run(name, predict=True)
        self.fit = run.fit or self.fit
        if run.forecast is not None:
            self._forecasts[name] = run.forecast.nbytes
        self._lines += describe(run) if not self._lines else []
        self._lines += [f"{name}: {line}" for line in describe_peak(run)]
        if len(self.config.training.runs) == 1:
            self._made = run, random_state()

    @property
    def checkpoint(self) -> Path:
        """The checkpoint's file."""
        return self.folder / checkpoint.NAME

    def stop(self) -> None:
        """Request a stop after the current step."""
        self._stop = True

    def train(self) -> dict[str, dict[str, Any]]:
        """Do all remaining runs, and return `Run.summary()` by run name.

        SIGINT, SIGTERM and `stop()` write a checkpoint and raise KeyboardInterrupt, whose message
        says how to continue. A loss that is NaN or infinite raises FloatingPointError.
        """
        current = self.state["current"] if self.state else None
        earlier = [*self.rows, *(Metrics(*row) for row in (current or {}).get("rows", ()))]
        write = results.metrics_file(self.folder / "metrics.csv", earlier)
        with self._signals():
            for line in (f"writing to {self.folder}", *self._lines):
                self._say(line)
            for name in self.config.training.runs:
                if name not in self.summaries:
                    resumed = current if current and current["run"] == name else None
                    self._train_one(name, resumed, write)
        self._finish()
        return self.summaries

    def _train_one(self, name: str, state: dict[str, Any] | None, write: Write) -> None:
        training = self.config.training
        run = self._run(name)
        hand_back_freed_pages()  # of the run before, and of converted weights
        if state:
            run.load_state(state)
        large = storage_nbytes(run.model.parameters()) > _LARGE
        with large_blocks_mapped() if large else nullcontext():
            if not state:
                self._validate(run, write)
            while not run.finished and not self._stop:
                row = run.train_step()
                write(row)
                self._show_step(run, row)
                if run.finished or is_due(run.step, training.eval_every):
                    self._validate(run, write)
                if is_due(run.step, training.checkpoint_every) and not run.finished:
                    self._save(run)
        stopped = self._stop
        if not stopped:
            self._say(results.losses_line(name, run.summary()))
        self._save(run)
        if stopped:
            raise KeyboardInterrupt(
                f"interrupted; continue with: memtrain-train resume={self.folder}"
            )
        self.summaries[name] = run.summary()
        self.rows += run.rows
        self._save_model(run, f"{name}_model")

    def _run(self, name: str, *, predict: bool = False) -> Run:
        """Build a run at its start, or return the one that was built to be checked."""
        if self._made is not None:
            run, random = self._made
            self._made = None
            set_random_state(random)
            return run
        return Run(name, self.config, self.source, self.fit, predict=predict)

    def _show_step(self, run: Run, row: Metrics) -> None:
        """Print a step and the bytes that it keeps alive, every few seconds."""
        steps = self.config.training.steps
        if time.monotonic() - self._printed > _PERIOD or row.step in (2, steps):
            speed = f"{row.tokens / row.seconds:,.0f}" if row.seconds else "-"
            alive = f"{format_size(run.kept)} live" if run.kept else ""
            text = f"loss {row.loss:.3f}  {speed} {self.source.unit}/s  {alive}"
            self._say(f"{row.run:<7} step {row.step}/{steps}  {text}")

    def _say(self, text: str) -> None:
        if not self.config.output.quiet:
            self._printed = time.monotonic()
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _validate(self, run: Run, write: Write) -> None:
        if not run.validations:
            return
        row = run.validate()
        write(row)
        self._say(f"{row.run:<7} step {row.step}  validation loss {row.loss:.4f}")

    def _save_model(self, run: Run, name: str) -> None:
        weights = run.model.state_dict()

        def fill(folder: Path) -> None:
            pretrained.save(run.model, folder, weights, self.source.tokenizer)

        checkpoint.write_folder(self.folder / name, fill)

    def _save(self, run: Run) -> None:
        content = {
            "config": asdict(self.config),
            "summaries": self.summaries,
            "finished_rows": [list(row) for row in self.rows],
            "current": run.state(),
        }
        checkpoint.write_checkpoint(self.checkpoint, content)

    def _finish(self) -> None:
        """Print the results, then write them."""
        self.console.print(results.table(str(self.config.experiment), self.summaries))
        fit = self.fit if "wrapped" in self.summaries else None
        for name, summary in self.summaries.items():
            if name in self._forecasts:
                budget = f"budget {format_size(fit.budget)}" if fit and name == "wrapped" else name
                promise = results.promise_line(self._forecasts[name], summary["bytes"]["peak"])
                self.console.print(f"{budget}: {promise}", highlight=False, soft_wrap=True)
        facts = {
            "experiment": str(self.config.experiment),
            "resumed": self.state is not None,
            "torch": torch.__version__,
        }
        results.write_summary(self.folder / "summary.json", self.summaries, **facts)
        if fit is not None:
            fit.plan.save(self.folder / "plan.yaml")
        self.console.print(f"results: {self.folder}", highlight=False, soft_wrap=True)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Stop after the step on SIGINT and SIGTERM; a second signal acts as without memtrain."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python installs handlers in the main thread only
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def handle(number: int, _frame: FrameType | None) -> None:
            self.stop()
            signal.signal(number, before[signal.Signals(number)])

        for number in before:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def new_folder(parent: Path) -> Path:
    """Create a folder named by the time below `parent`; an existing one is never reused."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in range(1, 1000):
        folder = parent / (stamp if number == 1 else f"{stamp}_{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not folder.is_dir():
                raise
            continue
        except OSError as error:
            raise OSError(f"cannot make output folder {str(folder)!r}: {error}") from error
        return folder
    raise FileExistsError(f"{str(parent)!r} has a thousand folders named {stamp}")
