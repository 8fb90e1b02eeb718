"""Consoles that live with pipes, files, and terminals without colour or UTF-8."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class _Output(Console):
    """Raises BrokenPipeError where rich would end the process with status 1."""

    def on_broken_pipe(self) -> None:
        """The reader has gone."""
        raise BrokenPipeError


def consoles() -> tuple[Console, Console]:
    """Standard output, and standard error for messages and progress.

    What the output's encoding cannot spell (a module's name, in ASCII) is escaped.

    Returns:
        Output at the terminal's width, 80 columns where there is none; errors unwrapped.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return _Output(), Console(stderr=True, soft_wrap=True, highlight=False)


def drop_output() -> None:
    """After a BrokenPipeError: what Python would flush at exit goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def working(errors: Console, what: str) -> Iterator[None]:
    """Tell what goes on and for how long, on a terminal only; gone when it is done.

    Args:
        errors: Where to.
        what: Words such as `tracing the forward`.

    Example:
        >>> with working(Console(stderr=True), "adding"):
        ...     print(1 + 1)
        2
    """
    utf8 = errors.encoding.startswith("utf")
    columns = (
        SpinnerColumn("dots" if utf8 else "line"),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
    silent = not errors.is_terminal or errors.is_dumb_terminal
    with Progress(*columns, console=errors, transient=True, disable=silent) as progress:
        progress.add_task(what, total=None)
        yield
