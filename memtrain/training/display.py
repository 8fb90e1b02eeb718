"""Progress of runs, a line every few seconds."""

import time

from rich.console import Console

from memtrain.config.sizes import format_size
from memtrain.training.run import Metrics

_PERIOD = 10.0  # seconds between lines


class Display:
    """Prints the steps of one run after another; `unit` is `"tokens"` or `"rows"`."""

    def __init__(self, console: Console, unit: str, *, quiet: bool = False) -> None:
        self.console, self.unit, self.quiet = console, unit, quiet
        self._printed = time.monotonic()
        self._speed: float | None = None

    def begin(self) -> None:
        """Begin a run."""
        self._speed = None

    def step(self, row: Metrics, steps: int, live: int) -> None:
        """Print a step and the bytes that it keeps alive, unless a line was printed just before."""
        if row.seconds:
            now = row.tokens / row.seconds
            self._speed = now if self._speed is None else 0.9 * self._speed + 0.1 * now
        if time.monotonic() - self._printed > _PERIOD or row.step in (2, steps):
            speed = f"{self._speed:,.0f}" if self._speed else "-"
            alive = f"{format_size(live)} live" if live else ""
            text = f"loss {row.loss:.3f}  {speed} {self.unit}/s  {alive}"
            self.say(f"{row.run:<7} step {row.step}/{steps}  {text}")

    def validation(self, row: Metrics) -> None:
        """Print a validation."""
        self.say(f"{row.run:<7} step {row.step}  validation loss {row.loss:.4f}")

    def say(self, text: str) -> None:
        """Print a line, unless quiet."""
        if not self.quiet:
            self._printed = time.monotonic()
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)
