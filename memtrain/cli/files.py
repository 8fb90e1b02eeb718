"""Files that are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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
