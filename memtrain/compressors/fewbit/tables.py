"""Few-bit tables kept: known by name, cached on disk, and in the npz files that they travel in."""

import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from memtrain.compressors.fewbit.step_function import Approximation, from_table

_FIELDS = ("boundaries", "levels", "parity", "shift", "error")


def folder() -> Path:
    """Return the folder of solved tables: `$MEMTRAIN_CACHE`, or the platform's cache.

    Example:
        >>> folder().is_absolute()
        True
    """
    if own := os.environ.get("MEMTRAIN_CACHE"):
        return Path(own).expanduser().resolve()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(base).expanduser() / "memtrain").resolve()


def key(*parts: object) -> str:
    """Hash values to a file name; arrays by their bytes.

    Example:
        >>> key("gelu", 3) == key("gelu", 3) != key("gelu", 4)
        True
    """
    digest = hashlib.sha256()
    for part in parts:
        raw = part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()[:32]


def cached(name: str, compute: Callable[[], Approximation]) -> Approximation:
    """Return the cached table of a name, or compute and store it.

    A file that is damaged is computed anew and replaced. A folder that cannot be written is left
    alone: the table is then computed once a process. Writers at the same time do no harm: each
    writes a file of its own and renames it.

    Args:
        name: Made by `key`.
        compute: What to do where there is no file.

    Returns:
        The table.

    Example:
        >>> import tempfile
        >>> from unittest.mock import patch
        >>> with patch.dict(os.environ, MEMTRAIN_CACHE=tempfile.mkdtemp()):
        ...     cached("name", lambda: from_table([0.0], [0.0, 1.0])).levels
        (0.0, 1.0)
    """
    path = folder() / f"fewbit-{name}.npz"
    # Whatever a damaged file makes numpy raise (zip, zlib, pickle, key and value errors).
    with suppress(Exception):
        return load_npz(path)["table"]
    result = compute()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_npz(path, {"table": result})
    return result


def save_npz(path: str | os.PathLike[str], tables: Mapping[str, Approximation]) -> None:
    """Write tables to one npz file, whole or not at all.

    Args:
        path: The file; an older one is replaced.
        tables: By name; each becomes arrays `NAME/boundaries`, `NAME/levels`, `NAME/parity`,
            `NAME/shift` and `NAME/error`.

    Raises:
        OSError: If it cannot be written; names the path.
        ValueError: If a name is empty or holds a slash.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "tables.npz"
        >>> save_npz(path, {"step": from_table([0.0], [0.0, 1.0])})
        >>> load_npz(path)["step"].levels
        (0.0, 1.0)
    """
    arrays = {}
    for name, table in tables.items():
        if not name or "/" in name:
            raise ValueError(f"table name {name!r} is not allowed; it must have letters and no '/'")
        for item in _FIELDS:
            arrays[f"{name}/{item}"] = np.array(getattr(table, item))
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        with partial.open("wb") as file:
            np.savez(file, **arrays)
        partial.replace(target)
    except OSError as error:
        raise OSError(f"cannot write {str(target)!r}: {error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def load_npz(path: str | os.PathLike[str]) -> dict[str, Approximation]:
    """Read the tables of an npz file: `save_npz`'s, or fewbit's.

    fewbit's files hold `gelu03-borders` and `gelu03-levels` (name and two digits of bits); the
    borders' ends are those of the interval and are left out here. Their tables are named
    `gelu03`, and their error is not known.

    Args:
        path: The file.

    Returns:
        Tables by name.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no npz file, holds no table, or a table that `from_table` refuses.
    """
    try:
        # Opened here: np.load leaves a damaged file open.
        with Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = dict(file)
    except OSError:
        raise
    except Exception as error:  # zipfile, zlib, EOF and value errors: numpy promises none of them
        raise ValueError(f"{os.fspath(path)!r} is no npz file: {error}") from error
    ours = {name.rpartition("/")[0] for name in arrays if name.endswith("/levels")}
    theirs = {name.rpartition("-")[0] for name in arrays if name.endswith("-levels")}
    try:
        tables = {name: _ours(arrays, name) for name in sorted(ours)}
        tables |= {name: _theirs(arrays, name) for name in sorted(theirs)}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{os.fspath(path)!r} holds a table that is damaged: {error}") from error
    if not tables:
        raise ValueError(
            f"{os.fspath(path)!r} holds no table; its arrays: {', '.join(arrays) or 'none'}; "
            "allowed: NAME/boundaries and NAME/levels, or NAME-borders and NAME-levels"
        )
    return tables


def _ours(arrays: dict[str, np.ndarray], name: str) -> Approximation:
    boundaries, levels, parity, shift, error = (arrays[f"{name}/{item}"] for item in _FIELDS)
    return from_table(
        boundaries.tolist(), levels.tolist(), str(parity), float(shift), error=float(error)
    )


def _theirs(arrays: dict[str, np.ndarray], name: str) -> Approximation:
    inner = arrays[f"{name}-borders"][1:-1]
    return from_table(inner.tolist(), arrays[f"{name}-levels"].tolist())


TABLES: dict[str, Approximation] = {}


def register_table(name: str, table: Approximation, *, replace: bool = False) -> None:
    """Make a table known by a name, for `DerivativeCode(table_name=name)` and configs.

    Names live as long as the process: register before a config or a pickled plan is read.

    Args:
        name: Not empty.
        table: From `from_table`, `load_npz` or `solve`.
        replace: Whether a different table of that name may be replaced.

    Raises:
        ValueError: If the name is empty, or taken by another table.
        TypeError: If `table` is no Approximation.

    Example:
        >>> register_table("doctest", from_table([0.0], [0.0, 1.0]))
        >>> named_table("doctest").levels
        (0.0, 1.0)
    """
    if not name or not isinstance(name, str):
        raise ValueError(f"table name {name!r} is not allowed; it must be a string with letters")
    if not isinstance(table, Approximation):
        raise TypeError(f"table is a {type(table).__name__}; allowed: Approximation")
    if not replace and TABLES.get(name, table) != table:
        raise ValueError(f"table name {name!r} is taken by another table; replace=True replaces it")
    TABLES[name] = table


def named_table(name: str) -> Approximation:
    """Return the table registered under `name`.

    Raises:
        ValueError: If this process does not know the name.

    Example:
        >>> named_table("nothing")
        Traceback (most recent call last):
        ValueError: table 'nothing' is not registered in this process...
    """
    if name not in TABLES:
        raise ValueError(
            f"table {name!r} is not registered in this process; call "
            f"memtrain.compressors.fewbit.tables.register_table first; registered: "
            f"{', '.join(TABLES) or 'none'}"
        )
    return TABLES[name]
