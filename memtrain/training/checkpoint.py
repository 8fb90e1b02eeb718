"""Checkpoints: one file, written completely or not at all, that continues a run bit for bit."""

import os
import re
import shutil
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

FORMAT = 2
NAME = "checkpoint.pt"


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint beside `path`, then move it there: an older file survives any failure.

    An OSError names the path, and has the `errno` of its cause.
    """
    partial = path.with_suffix(".tmp")
    try:
        with partial.open("wb") as file:
            torch.save({**content, "format": FORMAT}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch's zip writer raises RuntimeError when cut off
        with suppress(OSError):  # the folder itself may have been removed
            partial.unlink()
        raise _os_error(f"cannot write checkpoint {str(path)!r}", error) from error


def write_folder(path: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write a folder beside `path`, then move it there; an existing one is replaced."""
    partial, older = (path.with_name(f".{path.name}.{suffix}") for suffix in ("tmp", "old"))
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        partial.mkdir(parents=True)
        fill(partial)
        if path.exists():
            path.rename(older)
        partial.rename(path)
        shutil.rmtree(older, ignore_errors=True)
    except Exception as error:  # each library raises its own type for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise _os_error(f"cannot write model {str(path)!r}", error) from error


def _os_error(what: str, error: Exception) -> OSError:
    """Return an OSError with the message and the `errno` of the system's error, if there is one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    first = (str(cause or error).strip().splitlines() or [type(error).__name__])[0]
    found = OSError(f"{what}: {first}")
    number = re.search(r"os error (\d+)", first)  # in safetensors' message
    found.errno = int(number[1]) if number else cause and cause.errno
    return found


def read_checkpoint(where: str | Path) -> dict[str, Any]:
    """Load a checkpoint, of an output folder or a file, without running any code in it.

    The model's tensors are mapped from the file; the others are copies on the CPU.
    """
    path = Path(where)
    path = path / NAME if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"resume={str(where)!r}: there is no checkpoint {str(path)!r}")
    try:
        with zipfile.ZipFile(path) as file:  # torch.load compares no checksum
            if damaged := file.testzip():
                raise OSError(f"the checksum of {damaged!r} in it does not match")
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises half a dozen types for a damaged file
        raise ValueError(f"{str(path)!r} is not a readable checkpoint: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{str(path)!r} is not a memtrain-train checkpoint of format {FORMAT}")
    lacking = {"config", "summaries", "finished_rows", "current"} - content.keys()
    if lacking or not isinstance(content["current"], dict) or "model" not in content["current"]:
        what = ", ".join(sorted(lacking)) or "current.model"
        raise ValueError(f"{str(path)!r} is not a complete checkpoint: it lacks {what}")
    # A model may fill most of the memory: its weights are copied into the parameters one by one.
    weights = content["current"].pop("model")
    content = tree_map_only(Tensor, Tensor.clone, content)
    content["current"]["model"] = weights
    return content
