"""Checkpoints: plain dicts, written whole or not at all, that continue a run to the last bit."""

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

FORMAT = 1
NAME = "checkpoint.pt"
FOLDERS = "checkpoint-"
"""Names of folders of checkpoints begin with it, of a model of one's own; the step follows."""
PROGRESS = "progress.pt"
STATES = "states"


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint beside `path`, then move it there: an older one survives any failure.

    Args:
        path: The checkpoint's place.
        content: Dicts, lists, tensors, numbers and strings.

    Raises:
        OSError: If it cannot be written (a full disk, a folder that is gone); names the path.
    """
    write_whole(path, {**content, "format": FORMAT}, "checkpoint")


def write_whole(path: Path, content: Any, what: str) -> None:
    """Save tensors beside `path`, then move the file there.

    Args:
        path: The file's place; an older one survives any failure.
        content: As `torch.save` takes it.
        what: Names the file in messages.

    Raises:
        OSError: If it cannot be written; names the path, and has the `errno` of the cause.
    """
    partial = path.with_suffix(".tmp")
    try:
        with partial.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch's zip writer raises RuntimeError when cut off
        with suppress(OSError):  # the folder itself may be gone
            partial.unlink()
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        told = OSError(f"cannot write {what} {str(path)!r}: {cause or error}")
        told.errno = None if cause is None else cause.errno
        raise told from error


def read_checkpoint(where: str | Path) -> dict[str, Any]:
    """Load a checkpoint, without running any code in it.

    Args:
        where: An output folder, or the file in it.

    Returns:
        What was written, its tensors on the CPU; and `folder`, where the file lies.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If the file is no checkpoint of memtrain-train.
    """
    path = Path(where)
    if path.is_dir():
        inner = newest(path)
        path = path / PROGRESS if (path / PROGRESS).is_file() else path
        path = path / NAME if path.is_dir() and inner is None else path
        path = inner / PROGRESS if inner is not None and path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"resume={str(where)!r}: there is no checkpoint {str(path)!r}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch raises half a dozen types for a damaged file; all mean the same to the user.
        raise ValueError(f"{str(path)!r} is not a readable checkpoint: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{str(path)!r} is no memtrain-train checkpoint of format {FORMAT}")
    if path.name != PROGRESS:
        return {**content, "folder": str(path.parent)}
    return {**content, "folder": str(path.parent.parent), "weights": str(path.parent)}


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint folder in an output folder."""
    found = [item for item in folder.glob(f"{FOLDERS}*") if (item / PROGRESS).is_file()]
    return max(found, default=None)


def write_folder(path: Path, fill: Callable[[Path], object], what: str, processes: Any) -> None:
    """Fill a folder beside `path`, then move it there: it is whole, or not there.

    Args:
        path: The folder's place; one that is there is replaced.
        fill: Writes into the folder that it is given; called by every process.
        what: Names the folder in messages.
        processes: Those that write together.

    Raises:
        OSError: In every process, if one cannot write; names the path. Nothing is left behind.
    """
    partial = path.with_name(f".{path.name}.tmp")
    failed: Exception | None = None
    if processes.first:
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            failed = error
    if not processes.any(failed is not None):
        try:
            fill(partial)
        except Exception as error:  # noqa: BLE001 (each library has its own for a full disk)
            failed = error
    found = next((text for text in processes.gathered(failed and _cause(failed)) if text), None)
    if found is None and processes.first:
        try:
            _sync(partial)
            older = path.with_name(f".{path.name}.old")
            shutil.rmtree(older, ignore_errors=True)
            if path.exists():
                path.rename(older)
            partial.rename(path)
            shutil.rmtree(older, ignore_errors=True)
        except OSError as error:
            failed = error
    found = found or processes.told(failed and _cause(failed))
    if found is None:
        return
    if processes.first:
        shutil.rmtree(partial, ignore_errors=True)
    number, text = found
    told = OSError(f"cannot write {what} {str(path)!r}: {text}")
    told.errno = number
    raise told from failed


def _cause(error: BaseException) -> tuple[int | None, str]:
    """The number and the words of the error that the system gave."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        return cause.errno, str(cause)
    found = re.search(r"os error (\d+)", str(error))  # safetensors' words
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (int(found[1]) if found else None), first


def _sync(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())


def probe(folder: Path, nbytes: int) -> None:
    """Show, before hours are spent, that results can be written.

    Args:
        folder: Where results will go; it exists.
        nbytes: How much they may need.

    Raises:
        OSError: If nothing can be written there, or the disk has less room.
    """
    trial = folder / ".probe"
    try:
        with trial.open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(f"cannot write into output folder {str(folder)!r}: {error}") from error
    finally:
        trial.unlink(missing_ok=True)
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise OSError(
            f"output folder {str(folder)!r} has {free / 2**20:.0f} MiB free; "
            f"checkpoints may need {nbytes / 2**20:.0f} MiB"
        )
