"""A whole call of `memtrain-train`: folder, runs one after another, checkpoints, results."""

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console

from memtrain.audit.live_storages import storage_nbytes
from memtrain.audit.process_memory import hand_back_freed_pages
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
        self._lost: dict[str, OSError] = {}  # file -> why it could not be written
        self._saved = ""  # what the newest checkpoint holds

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
            OSError: After the last run, if a file could not be written: which and why, what is
                kept, and what to do.
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
        if self._lost:
            raise OSError(self._told())
        return self.summaries

    def _train_one(
        self, name: str, state: dict[str, Any] | None, write: Write, display: Display
    ) -> None:
        training = self.config.training
        run = Run(name, self.config, self.source, self.fit)
        hand_back_freed_pages()  # of the run before, and of weights that were converted
        if state:
            run.load_state(state)

        def note(row: Metrics) -> None:
            self._keep("metrics.csv", lambda: write(row), display)

        display.begin(name, run.step, training.steps)
        if not state:
            self._validate(run, note, display)
        while not run.finished and not self._stop:
            row = run.train_step()
            note(row)
            display.step(row, training.steps, run.kept)
            if run.finished or is_due(run.step, training.eval_every):
                self._validate(run, note, display)
            if is_due(run.step, training.checkpoint_every) and not run.finished:
                self._save(run, display)
        if not self._stop:
            display.say(results.result(name, run.summary()))
        self._save(run, display)
        if self._stop:
            resume = f"memtrain-train resume={self.folder}"
            raise KeyboardInterrupt(
                f"interrupted; {self._told() if self._lost else f'continue with: {resume}'}"
            )
        self.summaries[name] = run.summary()
        self.rows += run.rows
        path = self._model_file(self.folder, name)
        weights = run.model.state_dict()
        self._keep(path.name, lambda: checkpoint.write_whole(path, weights, "model"), display)

    def _bring_models(self, display: Display) -> None:
        """Copy the models of the runs that were finished before this call."""
        for name in self.summaries:
            earlier = self._model_file(Path(self.state["folder"] if self.state else "."), name)
            if earlier.is_file():
                copy = partial(shutil.copyfile, earlier, self._model_file(self.folder, name))
                self._keep(f"{name}_model.pt", copy, display)
            else:
                display.warn(f"{str(earlier)!r} is gone: the new folder will not have it")

    @staticmethod
    def _model_file(folder: Path, name: str) -> Path:
        return folder / f"{name}_model.pt"

    def _validate(self, run: Run, write: Write, display: Display) -> None:
        row = run.validate()
        write(row)
        display.validation(row)

    def _save(self, run: Run, display: Display) -> None:
        content = {
            "config": asdict(self.config),
            "summaries": self.summaries,
            "finished_rows": [list(row) for row in self.rows],
            "current": run.state(),
        }

        def write() -> None:
            checkpoint.write_checkpoint(self.checkpoint, content)
            self._saved = f"step {run.step} of {self.config.training.steps} of the {run.name} run"

        self._keep(self.checkpoint.name, write, display)

    def _keep(self, name: str, write: Callable[[], object], display: Display) -> None:
        """Write a file; a failure costs a warning, and is told again at the end."""
        if name == "metrics.csv" and name in self._lost:
            return  # a line is missing: those after it would not follow
        try:
            write()
        except OSError as error:
            if name not in self._lost:
                display.warn(str(error))
            self._lost[name] = error
        else:
            self._lost.pop(name, None)

    def _told(self) -> str:
        """Tell what could not be written and why, what is kept, and what to do."""
        why = next(iter(self._lost.values()))
        reason = os.strerror(why.errno) if why.errno else str(why)
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        kept = sorted(item.name for item in found if not item.name.startswith("."))
        lost = [name for name in self._lost if name not in kept or name != self.checkpoint.name]
        stale = [f"a newer {self.checkpoint.name}"] * (len(lost) < len(self._lost))
        whole = [name for name in kept if name not in lost]
        then = f"memtrain-train resume={self.folder} continues from {self._saved}"
        if self.checkpoint.name not in kept:
            then = "run it again, there is no checkpoint (output.folder= takes another disk)"
        return (
            f"could not write {', '.join([*stale, *lost])}: {reason}; "
            f"{self.folder} holds {', '.join(whole) or 'nothing'}; make room, then {then}"
        )

    def _finish(self, display: Display) -> None:
        """Print the results, then write them."""
        self.console.print(results.table(str(self.config.experiment), self.summaries))
        found = self.fit if "wrapped" in self.summaries else None
        if found is not None:
            peak = self.summaries["wrapped"]["bytes"]["peak"]
            self.console.print(results.promise(found, peak), highlight=False, soft_wrap=True)
        summary, plot, plan = (
            self.folder / name for name in ("summary.json", "plot.png", "plan.yaml")
        )
        facts = {
            "experiment": str(self.config.experiment),
            "resumed": self.state is not None,
            "torch": torch.__version__,
        }
        write = partial(results.write_summary, summary, self.summaries, **facts)
        self._keep(summary.name, write, display)
        if found is not None:
            self._keep(plan.name, lambda: found.plan.save(plan), display)
        if self.config.output.plot:
            try:
                draw = partial(results.draw, plot, self.rows, self.summaries)
                self._keep(plot.name, draw, display)
            except ModuleNotFoundError as error:
                display.warn(f"no plot.png: {error}")
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
