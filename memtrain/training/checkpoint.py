"""Checkpoints: plain dicts, written whole or not at all, that continue a run to the last bit."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

FORMAT = 1
NAME = "checkpoint.pt"


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
    path = path / NAME if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"resume={str(where)!r}: there is no checkpoint {str(path)!r}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch raises half a dozen types for a damaged file; all mean the same to the user.
        raise ValueError(f"{str(path)!r} is not a readable checkpoint: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{str(path)!r} is no memtrain-train checkpoint of format {FORMAT}")
    return {**content, "folder": str(path.parent)}


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
