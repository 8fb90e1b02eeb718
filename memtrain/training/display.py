"""Progress of runs: bars in a terminal, lines elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from memtrain.training.results import mib
from memtrain.training.run import Metrics

_PERIOD = 10.0  # seconds between lines where there is no terminal


class Display:
    """Shows the steps of one run after another.

    Args:
        console: The output; bars are drawn if it is a terminal, else lines are printed.
        unit: `"tokens"` or `"rows"`.
        quiet: Whether to print warnings only.
    """

    def __init__(self, console: Console, unit: str, *, quiet: bool = False) -> None:
        self.console, self.unit, self.quiet = console, unit, quiet
        self._bars: Progress | None = None
        if console.is_terminal and not quiet:
            columns = (
                TextColumn("{task.description:<7}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(compact=True),
            )
            self._bars = Progress(*columns, console=console, expand=True)
        self._printed = time.monotonic()
        self._speed: float | None = None

    def __enter__(self) -> Self:
        """Show the bars."""
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the bars and leave them on the screen."""
        if self._bars:
            self._bars.stop()

    def begin(self, run: str, done: int, steps: int) -> None:
        """Begin a run, or continue it after `done` steps."""
        self._speed = None
        if self._bars:
            self._bars.add_task(run, total=steps, completed=done, text="")

    def step(self, row: Metrics, steps: int, live: int) -> None:
        """Show a step.

        Args:
            row: The step's metrics.
            steps: Steps of the whole run.
            live: Bytes that the run keeps alive, as last counted.
        """
        if row.seconds:
            now = row.tokens / row.seconds
            self._speed = now if self._speed is None else 0.9 * self._speed + 0.1 * now
        speed = f"{self._speed:,.0f}" if self._speed else "-"
        alive = f"{mib(live)} live" if live else ""
        text = f"loss {row.loss:.3f}  {speed} {self.unit}/s  {alive}"
        if self._bars:
            self._bars.update(self._bars.task_ids[-1], completed=row.step, text=text)
        elif time.monotonic() - self._printed > _PERIOD or row.step in (2, steps):
            self.say(f"{row.run:<7} step {row.step}/{steps}  {text}")

    def validation(self, row: Metrics) -> None:
        """Print a validation where there are no bars."""
        if not self._bars:
            self.say(f"{row.run:<7} step {row.step}  validation loss {row.loss:.4f}")

    def say(self, text: str) -> None:
        """Print a line, above the bars if there are any, unless quiet."""
        if not self.quiet:
            self._printed = time.monotonic()
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)
