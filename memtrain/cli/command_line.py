"""Common parts of the command-line programs: arguments, consoles, atomic files."""

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
    """Return consoles for standard output and standard error.

    Characters that the output's encoding lacks are escaped, and a closed pipe raises
    BrokenPipeError.
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

    Example:
        >>> with working(Console(stderr=True), "adding") as report:
        ...     report("one and one", 1, 2)
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
    """Refuse an output path before any work is done.

    Raises:
        OSError: If it is a folder, or its folder is missing or not writable.

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
def atomic_file(path: Path, option: str) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` if the block succeeds.

    Raises:
        OSError: If it cannot be written; names the path.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.txt"
        >>> with atomic_file(path, "--csv") as partial:
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
