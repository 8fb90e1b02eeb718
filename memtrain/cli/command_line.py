"""Command-line programs' common parts: arguments, consoles for pipes and files, whole files."""

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print its usage and exit."""

    def error(self, message: str) -> Any:
        """Refuse the arguments."""
        raise ValueError(f"{message}; see {self.prog} --help")


def consoles() -> tuple[Console, Console]:
    """Standard output, and standard error for messages and progress.

    What the output's encoding cannot spell (a module's name, in ASCII) is escaped, and a reader
    that has gone is a BrokenPipeError.

    Returns:
        Output at the terminal's width, 80 columns where there is none; errors unwrapped.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    output = Console()
    output.on_broken_pipe = _raise_broken_pipe  # rich would end the process with status 1
    return output, Console(stderr=True, soft_wrap=True, highlight=False)


def _raise_broken_pipe() -> None:
    raise BrokenPipeError


def drop_output() -> None:
    """After a BrokenPipeError: what Python would flush at exit goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def working(errors: Console, what: str) -> Iterator[Callable[[str, int, int], None]]:
    """Tell what goes on and for how long, on a terminal only; gone when it is done.

    Args:
        errors: Where to.
        what: Words such as `tracing the forward`.

    Yields:
        A function that is told a stage, and how many of how many of its parts begin: a bar shows
        that, where there are any.

    Example:
        >>> with working(Console(stderr=True), "adding") as told:
        ...     told("one and one", 1, 2)
        ...     print(1 + 1)
        2
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

        def told(stage: str, done: int, total: int) -> None:
            part = f"{done} of at most {total}" if total else ""
            progress.update(
                task,
                description=f"{what}: {stage}",
                completed=done - 1,
                total=total or None,
                part=part,
            )

        yield told


def check_writable(path: Path, option: str) -> None:
    """Refuse a path before the work whose result it shall hold.

    Args:
        path: A file to be.
        option: Who asks, for the message.

    Raises:
        OSError: If it is a folder, or its own folder is missing or not writable.

    Example:
        >>> check_writable(Path("/no/such/folder/a.json"), "--json")
        Traceback (most recent call last):
        OSError: cannot write --json '/no/such/folder/a.json': no such folder
    """
    why = ""
    if path.is_dir():
        why = "a folder"
    elif not path.parent.is_dir():
        why = "no such folder"
    elif not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        why = "no permission"
    if why:
        raise OSError(f"cannot write {option} {str(path)!r}: {why}")


@contextmanager
def replaced(path: Path, option: str) -> Iterator[Path]:
    """A file beside `path` to write into; it takes the place of `path` if the block succeeds.

    Args:
        path: The file; an older one stays as it is unless the new one is whole.
        option: Who asks, for the message.

    Yields:
        The path to write to.

    Raises:
        OSError: If it cannot be written; names the path.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.txt"
        >>> with replaced(path, "--csv") as partial:
        ...     _ = partial.write_text("whole")
        >>> path.read_text()
        'whole'
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise OSError(f"cannot write {option} {str(path)!r}: {error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()
