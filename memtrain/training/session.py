"""A whole call of `memtrain-train`: folder, runs one after another, checkpoints, results."""

import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console

from memtrain.audit.live_storages import storage_nbytes
from memtrain.planner import Fit
from memtrain.training import checkpoint, results
from memtrain.training.data import build_source
from memtrain.training.display import Display
from memtrain.training.run import Metrics, Run, is_due, pick_device
from memtrain.training.settings import TrainConfig

Write = Callable[[Metrics], None]


class Session:
    """Trains what a config describes, and leaves the results in a new folder.

    Making one checks everything that can be checked before training: the config, the data, each
    model and its plan, and that the folder can be written.

    Args:
        config: The whole config.
        state: A checkpoint's content, to continue from it.
        console: Where progress and the table go.

    Raises:
        ValueError: For anything in the config that is wrong.
        OSError: If the output folder cannot be written, or the disk has too little room.

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
        if config.budget is not None:
            training = config.training
            device = pick_device(training.device).type
            own = config.planner.with_rates(device, autocast=training.autocast)
            config = replace(config, planner=own)
        self.config, self.state, self.console = config, state, console or Console(quiet=True)
        self.source = build_source(config.data, config.seed)
        self.fit: Fit | None = None
        nbytes = 0
        for name in config.training.runs:  # wrong plans show now, not after the plain run
            run = Run(name, config, self.source)
            self.fit = run.fit or self.fit
            nbytes = max(nbytes, storage_nbytes(run.model.parameters()))
        self.summaries: dict[str, dict[str, Any]] = dict(state["summaries"]) if state else {}
        self.rows: list[Metrics] = (
            [Metrics(*row) for row in state["finished_rows"]] if state else []
        )
        self.folder = new_folder(Path(config.output.folder) / str(config.experiment))
        try:
            # weights and two moments, twice while one is replaced, and the finished models
            checkpoint.probe(self.folder, 8 * nbytes + 2**20)
        except OSError:
            self.folder.rmdir()
            raise
        OmegaConf.save(OmegaConf.create(asdict(config)), self.folder / "config.yaml")
        self._stop = False

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint."""
        return self.folder / checkpoint.NAME

    def stop(self) -> None:
        """Ask to stop after the present step."""
        self._stop = True

    def train(self) -> dict[str, dict[str, Any]]:
        """Do all runs that are not done yet.

        Returns:
            Run name -> `Run.summary()`.

        Raises:
            KeyboardInterrupt: After SIGINT, SIGTERM or `stop()`; a checkpoint has been written, and
                the message says how to continue.
            OSError: If the last checkpoint or the results cannot be written.
            FloatingPointError: If a loss is NaN or infinite.
        """
        training, output = self.config.training, self.config.output
        current = self.state["current"] if self.state else None
        earlier = [*self.rows, *(Metrics(*row) for row in (current or {}).get("rows", ()))]
        metrics = results.metrics_file(self.folder / "metrics.csv", earlier)
        display = Display(self.console, self.source.kind, quiet=output.quiet)
        with metrics as write, self._signals(), display:
            display.say(f"writing to {self.folder}")
            self._bring_models(display)
            for name in training.runs:
                if name not in self.summaries:
                    resumed = current if current and current["run"] == name else None
                    self._train_one(name, resumed, write, display)
        self._finish(display)
        return self.summaries

    def _train_one(
        self, name: str, state: dict[str, Any] | None, write: Write, display: Display
    ) -> None:
        training = self.config.training
        run = Run(name, self.config, self.source, self.fit)
        if state:
            run.load_state(state)
        display.begin(name, run.step, training.steps)
        if not state:
            self._validate(run, write, display)
        while not run.finished and not self._stop:
            row = run.train_step()
            write(row)
            display.step(row, training.steps, run.kept)
            if run.finished or is_due(run.step, training.eval_every):
                self._validate(run, write, display)
            if is_due(run.step, training.checkpoint_every) and not run.finished:
                self._try_save(run, display)
        self._save(run)
        if self._stop:
            resume = f"memtrain-train resume={self.folder}"
            raise KeyboardInterrupt(f"interrupted; continue with: {resume}")
        self.summaries[name] = run.summary()
        self.rows += run.rows
        torch.save(run.model.state_dict(), self._model_file(self.folder, name))

    def _bring_models(self, display: Display) -> None:
        """Copy the models of the runs that were finished before this call."""
        for name in self.summaries:
            earlier = self._model_file(Path(self.state["folder"] if self.state else "."), name)
            if earlier.is_file():
                shutil.copyfile(earlier, self._model_file(self.folder, name))
            else:
                display.warn(f"{str(earlier)!r} is gone: the new folder will not have it")

    @staticmethod
    def _model_file(folder: Path, name: str) -> Path:
        return folder / f"{name}_model.pt"

    def _validate(self, run: Run, write: Write, display: Display) -> None:
        row = run.validate()
        write(row)
        display.validation(row)

    def _save(self, run: Run) -> None:
        content = {
            "config": asdict(self.config),
            "summaries": self.summaries,
            "finished_rows": [list(row) for row in self.rows],
            "current": run.state(),
        }
        checkpoint.write_checkpoint(self.checkpoint, content)

    def _try_save(self, run: Run, display: Display) -> None:
        """A failure on the way costs a warning: the run goes on, and the older file stays."""
        try:
            self._save(run)
        except OSError as error:
            display.warn(str(error))

    def _finish(self, display: Display) -> None:
        if self.config.output.plot:
            try:
                results.draw(self.folder / "plot.png", self.rows, self.summaries)
            except ModuleNotFoundError as error:
                display.warn(f"no plot.png: {error}")
        results.write_summary(
            self.folder / "summary.json",
            self.summaries,
            experiment=str(self.config.experiment),
            resumed=self.state is not None,
            torch=torch.__version__,
        )
        self.console.print(results.table(str(self.config.experiment), self.summaries))
        if self.fit is not None and "wrapped" in self.summaries:
            peak = self.summaries["wrapped"]["bytes"]["peak"]
            self.console.print(results.promise(self.fit, peak), highlight=False, soft_wrap=True)
            self.fit.plan.save(self.folder / "plan.yaml")
        self.console.print(f"results: {self.folder}", highlight=False, soft_wrap=True)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask to stop; the second one acts at once, as without us."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python installs handlers in the main thread only
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def ask(number: int, _frame: FrameType | None) -> None:
            self.stop()
            signal.signal(number, before[signal.Signals(number)])

        for number in before:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def new_folder(parent: Path) -> Path:
    """Make a folder named by the time; one that exists is never used again.

    Args:
        parent: Made too if it is not there.

    Returns:
        The new, empty folder.

    Raises:
        OSError: If it cannot be made.
    """
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
    raise FileExistsError(f"{str(parent)!r} holds a thousand folders named {stamp}")
