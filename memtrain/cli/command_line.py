"""Common parts of the command-line programs: arguments, consoles, atomic files."""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def consoles() -> tuple[Console, Console]:
    """Return consoles for standard output and standard error.

    Characters that the output's encoding lacks are escaped, and a closed pipe raises
    BrokenPipeError. Errors are not wrapped to the terminal's width.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    output = Console()
    output.on_broken_pipe = _raise_broken_pipe  # rich would end the process with status 1
    return output, Console(stderr=True, soft_wrap=True, highlight=False)


def _raise_broken_pipe() -> None:
    raise BrokenPipeError


def discard_output() -> None:
    """Discard, after a BrokenPipeError, what Python would flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def working(errors: Console, what: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show an activity and its duration while it runs, on a terminal only.

    Yields a function of a stage, the number of its current part and the number of its parts.
    """
    utf8 = errors.encoding.startswith("utf")
    columns = (
        SpinnerColumn("dots" if utf8 else "line"),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[part]}", markup=False),
        TimeElapsedColumn(),
    )
    silent = not errors.is_terminal or errors.is_dumb_terminal
    with Progress(*columns, console=errors, transient=True, disable=silent) as progress:
        task = progress.add_task(what, total=None, part="")

        def report(stage: str, done: int, total: int) -> None:
            part = f"{done} of at most {total}" if total else ""
            progress.update(
                task,
                description=f"{what}: {stage}",
                completed=done - 1,
                total=total or None,
                part=part,
            )

        yield report


def check_writable(path: Path, option: str) -> None:
    """Raise OSError for a path that is a folder, or whose folder is missing or read-only."""
    why = ""
    if path.is_dir():
        why = "a folder"
    elif not path.parent.is_dir():
        why = "no such folder"
    elif not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        why = "no permission"
    if why:
        raise OSError(f"cannot write {option} {str(path)!r}: {why}")
