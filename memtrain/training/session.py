"""A whole call of `memtrain-train`: folder, runs one after another, checkpoints, results."""

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console

from memtrain import api
from memtrain.audit.live_storages import storage_nbytes
from memtrain.audit.process_memory import (
    hand_back_freed_pages,
    large_blocks_mapped,
    memory_is_short,
    resident_nbytes,
    restart_resident_peak,
)
from memtrain.kernels.random.generators import random_state, set_random_state
from memtrain.planner import Fit
from memtrain.training import checkpoint, overview, results, run_folder
from memtrain.training.data import build_source
from memtrain.training.display import Display
from memtrain.training.float32_products import float32_products
from memtrain.training.processes import ALONE, Processes
from memtrain.training.rows import Rows
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
        processes: Those that train together; the first one writes and speaks.

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
        processes: Processes = ALONE,
    ) -> None:
        if config.output.tensorboard:
            results.import_tensorboard()
        if config.budget is not None:
            training = config.training
            device = pick_device(training.device).type
            own = config.planner.with_rates(device, autocast=training.autocast)
            config = replace(config, planner=own)
        self.config, self.state, self.processes = config, state, processes
        self.console = console if console and processes.first else Console(quiet=True)
        self.source = build_source(config.data, config.seed, config.model)
        self.own = isinstance(self.source, Rows)
        """Whether a model of one's own is trained: it is told what that takes, and its checkpoints
        are folders."""
        if config.training.parallel == "fsdp" and not self.own:
            raise ValueError(
                f"training.parallel=fsdp with the packaged model={config.model['name']}; allowed: "
                "training.parallel=ddp, or a model of your own (model=hf:FOLDER, model=py:FUNCTION)"
            )
        self.summaries: dict[str, dict[str, Any]] = dict(state["summaries"]) if state else {}
        self.rows: list[Metrics] = (
            [Metrics(*row) for row in state["finished_rows"]] if state else []
        )
        self.fit: Fit | None = None
        self._lines: list[str] = []
        self._forecasts: dict[str, int] = {}  # run -> bytes at its predicted peak
        self._resident: dict[str, int | None] = {}  # run -> bytes of the process at its peak
        self._board: Any = None
        self._made: tuple[Run, dict[str, Any]] | None = None  # a single run is made once
        nbytes = max(map(self._check, config.training.runs))
        folder = Path(config.output.folder) / str(config.experiment)
        self.folder: Path = processes.told(new_folder(folder) if processes.first else None)
        try:
            if processes.first:
                checkpoint.probe(self.folder, nbytes + 2**20)
        except OSError:
            self.folder.rmdir()
            raise
        if processes.first:
            OmegaConf.save(OmegaConf.create(asdict(config)), self.folder / "config.yaml")
        self._stop = False
        self._lost: dict[str, OSError] = {}  # file -> why it could not be written
        self._kept_as = "checkpoint" if self.own else checkpoint.NAME
        self._saved = ""  # what the newest checkpoint holds

    def _check(self, name: str) -> int:
        """Make a run, so that a wrong plan shows now and not after the plain run.

        Returns:
            Bytes that it may leave on disk.
        """
        run = self._run(name)
        self.fit = run.fit or self.fit
        if run.forecast is not None:
            self._forecasts[name] = run.forecast.nbytes
        if self.own:
            self._lines += overview.described(run) if not self._lines else []
            self._lines += [f"{name}: {line}" for line in overview.foretold(run)]
        if len(self.config.training.runs) == 1:
            self._made = run, random_state()
        return on_disk(run)

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint."""
        newest = checkpoint.newest(self.folder) if self.own else None
        return newest or self.folder / checkpoint.NAME

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
        metrics = nullcontext(lambda row: None)
        if self.processes.first:
            metrics = results.metrics_file(self.folder / "metrics.csv", earlier)
        display = Display(self.console, self.source.unit, quiet=output.quiet)
        board = results.board(self.folder) if output.tensorboard and self.processes.first else None
        with metrics as write, board or nullcontext() as self._board, self._signals(), display:
            display.say(f"writing to {self.folder}")
            for line in self._lines:
                display.say(line)
            self._bring_models(display)
            for name in training.runs:
                if name not in self.summaries:
                    resumed = current if current and current["run"] == name else None
                    self._train_one(name, resumed, write, display)
        self._finish(display)
        if self._lost:
            raise OSError(self._losses())
        return self.summaries

    def _train_one(
        self, name: str, state: dict[str, Any] | None, write: Write, display: Display
    ) -> None:
        training = self.config.training
        run = self._run(name, state)
        hand_back_freed_pages()  # of the run before, and of weights that were converted
        if state:
            self._load(run, state)
        watched = run.device.type == "cpu" and not run.finished and restart_resident_peak()

        def note(row: Metrics) -> None:
            self._keep("metrics.csv", lambda: write(row), display)
            if self._board is not None:
                results.show_on(self._board, row)

        display.begin(name, run.step, training.steps)
        with (
            float32_products() if run.slow_products else nullcontext(),
            large_blocks_mapped() if memory_is_short() else nullcontext(),
        ):
            if not state:
                self._validate(run, note, display)
            while not run.finished and not self._stopped():
                row = run.train_step()
                note(row)
                display.step(row, training.steps, run.kept)
                if run.finished or is_due(run.step, training.eval_every):
                    self._validate(run, note, display)
                if is_due(run.step, training.checkpoint_every) and not run.finished:
                    self._save(run, display)
        stopped = self._stopped()
        if not stopped:
            display.say(results.result(name, run.summary()))
        self._save(run, display)
        if stopped:
            resume = f"memtrain-train resume={self.folder}"
            raise KeyboardInterrupt(
                f"interrupted; {self._losses() if self._lost else f'continue with: {resume}'}"
            )
        self.summaries[name] = run.summary()
        self._resident[name] = resident_nbytes(peak=True) if watched else None
        self.rows += run.rows
        self._save_model(run, self._model_file(self.folder, name), display)

    def _run(self, name: str, state: Mapping[str, Any] | None = None) -> Run:
        """A run at its start; the one that was made to be checked, where there is only one."""
        if self._made is not None:
            run, random = self._made
            self._made = None
            set_random_state(random)
            return run
        current = self.state and self.state["current"]["run"] == name
        weights = self.state.get("weights") if self.state and current else None
        return Run(
            name,
            self.config,
            self.source,
            self.fit,
            processes=self.processes,
            foretell=self.own and state is None,
            weights=Path(weights) if weights else None,
        )

    def _stopped(self) -> bool:
        """Whether any process was asked to stop: then all do, after the same step."""
        self._stop = self.processes.any(self._stop)
        return self._stop

    def _bring_models(self, display: Display) -> None:
        """Copy the models of the runs that were finished before this call."""
        for name in self.summaries if self.processes.first else ():
            earlier = self._model_file(Path(self.state["folder"] if self.state else "."), name)
            target = self._model_file(self.folder, name)
            if earlier.exists():
                copy = shutil.copytree if earlier.is_dir() else shutil.copyfile
                self._keep(target.name, partial(copy, earlier, target), display)
            else:
                display.warn(f"{str(earlier)!r} is gone: the new folder will not have it")

    def _model_file(self, folder: Path, name: str) -> Path:
        return folder / (f"{name}_model" if self.own else f"{name}_model.pt")

    def _validate(self, run: Run, write: Write, display: Display) -> None:
        if not run.validations:
            return
        row = run.validate()
        write(row)
        display.validation(row)
        if self.own and run.best is not None and run.best[1] == run.step:
            self._save_model(run, self.folder / f"{run.name}_best", display)

    def _save_model(self, run: Run, path: Path, display: Display) -> None:
        if self.own:
            self._keep(path.name, lambda: run_folder.write_model(path, run), display)
            return
        if self.processes.first:  # all hold the same weights
            weights = run.model.state_dict()
            self._keep(path.name, lambda: checkpoint.write_whole(path, weights, "model"), display)

    def _save(self, run: Run, display: Display) -> None:
        content = {
            "config": asdict(self.config),
            "summaries": self.summaries,
            "finished_rows": [list(row) for row in self.rows],
            "random": self.processes.gathered(random_state()),
        }

        def write() -> None:
            if self.own:
                done = run.step + sum(summary["steps"] for summary in self.summaries.values())
                run_folder.write_newest(self.folder, done, run, content)
            elif self.processes.first:
                whole = {**content, "current": run.state()}
                checkpoint.write_checkpoint(self.checkpoint, whole)
            self._saved = f"step {run.step} of {self.config.training.steps} of the {run.name} run"

        self._keep(self._kept_as, write, display)

    def _load(self, run: Run, state: dict[str, Any]) -> None:
        if self.own:
            run_folder.load_run(run, self.state or {})
        else:
            run.load_state(state)
        random = (self.state or {}).get("random", ())  # older single files have none
        if len(random) == self.processes.world:
            set_random_state(random[self.processes.rank])

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

    def _losses(self) -> str:
        """Tell what could not be written and why, what is kept, and what to do."""
        why = next(iter(self._lost.values()))
        reason = os.strerror(why.errno) if why.errno else str(why)
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        kept = sorted(item.name for item in found if not item.name.startswith("."))
        saved = self.checkpoint.exists()
        lost = [name for name in self._lost if not (saved and name == self._kept_as)]
        stale = [f"a newer {self._kept_as}"] * (len(lost) < len(self._lost))
        whole = [name for name in kept if name not in lost]
        then = f"memtrain-train resume={self.folder} continues from {self._saved}"
        if not saved:
            then = "run it again, there is no checkpoint (output.folder= takes another disk)"
        return (
            f"could not write {', '.join([*stale, *lost])}: {reason}; "
            f"{self.folder} holds {', '.join(whole) or 'nothing'}; make room, then {then}"
        )

    def _finish(self, display: Display) -> None:
        """Print the results, then write them."""
        self.console.print(results.table(str(self.config.experiment), self.summaries))
        found = self.fit if "wrapped" in self.summaries else None
        for name, summary in self.summaries.items():
            peak = summary["bytes"]["peak"]
            if name == "wrapped" and found is not None:
                told = results.promise(found, peak, self._forecasts.get(name))
                told += results.resident(self._resident.get(name))
                self.console.print(told, highlight=False, soft_wrap=True)
            elif name in self._forecasts:
                told = f"{name}: {results.promised(self._forecasts[name], peak)}"
                told += results.resident(self._resident.get(name))
                self.console.print(told, highlight=False, soft_wrap=True)
        if not self.processes.first:
            return
        summary, plot, plan = (
            self.folder / name for name in ("summary.json", "plot.png", "plan.yaml")
        )
        facts = {
            "experiment": str(self.config.experiment),
            "resumed": self.state is not None,
            "resident": self._resident,
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


def on_disk(run: Run) -> int:
    """Bytes that a run may leave: two checkpoints while one is replaced, models of all runs."""
    weights = storage_nbytes(run.model.parameters())
    held = 3 * weights  # with two moments
    if run.name == "wrapped":
        plan = api.plan_of(run.model)
        held = sum(entry.planned for kind in ("weight", "state") for entry in plan.entries(kind))
    best = isinstance(run.source, Rows) and run.validations > 0  # is written beside the last one
    return 2 * held + len(run.config.training.runs) * (1 + best) * weights


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
