"""Text on disk as token files: read once, a piece at a time, and mapped into memory afterwards."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memtrain.audit.peak.disk_cache import cache_folder
from memtrain.config.sources import nearest

_PIECE = 2**20
"""Bytes of a text that are tokenised at once."""
_VERSION = 1
Tokens = np.ndarray
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Corpus:
    """Tokens of documents, one after another, mapped from a file.

    Memory:
        None of its own: the system keeps the pages that are in use. On disk 4 bytes a token and 8
        a document.
    """

    tokens: Tokens
    """int32: a token, or `~token` where it is read but not learned (a prompt's)."""
    ends: Tokens
    """int64: where each document ends."""


def texts(found: Iterable[Path], *, raw: bool = False) -> Iterator[tuple[str | bytes, bool]]:
    """Pieces of files, each a document.

    Args:
        found: The files.
        raw: Bytes, not text.

    Yields:
        A piece of at most a few MiB that ends with a line, and whether a document ends with it.

    Raises:
        ValueError: For a file that is not UTF-8, with the byte's place.
    """
    for file in found:
        with file.open("rb") as stream:
            place, piece = 0, stream.read(_PIECE) + stream.readline()
            while piece:
                after = stream.read(_PIECE) + stream.readline()
                if raw:
                    yield piece, not after
                else:
                    yield _decoded(piece, file, place), not after
                place += len(piece)
                piece = after


def _decoded(piece: bytes, file: Path, place: int) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{str(file)!r} is not UTF-8 at byte {place + error.start}; data.files= chooses among "
            "a folder's files, data.tokenizer=bytes takes any"
        ) from error


def files(path: Path, pattern: str = "*") -> list[Path]:
    """A file itself, or a folder's files in the order of their names, hidden ones left out.

    Args:
        path: A file or a folder.
        pattern: Which of a folder's, at any depth, such as `*.jsonl`.

    Raises:
        FileNotFoundError: If there is none.
    """
    if path.is_file():
        return [path]
    found = sorted(
        item
        for item in path.rglob(pattern)
        if item.is_file() and not any(part.startswith(".") for part in item.relative_to(path).parts)
    )
    if not found:
        what = f"has no files {pattern}" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"data.path={str(path)!r} {what}")
    return found


def json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Records of a JSON-lines file, or of a folder's `*.jsonl`; empty lines are left out.

    Yields:
        Where the record stands (`file:line`), and the record.

    Raises:
        FileNotFoundError: As `files`.
        ValueError: For a line that is no JSON object, with its number.
    """
    for file in files(path, "*.jsonl"):
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{file}:{number}"
                try:
                    record = json.loads(line)
                except ValueError as error:  # of JSON, and of UTF-8
                    raise ValueError(f"{where}: this line is not JSON: {error}") from error
                if not isinstance(record, dict):
                    kind = type(record).__name__
                    raise ValueError(f"{where}: a line must be a JSON object, not a {kind}")
                yield where, record


def dataset_records(path: Path, split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Records of a dataset that Hugging Face's `save_to_disk` wrote, read as they are needed.

    Args:
        path: The folder.
        split: Of a dictionary of datasets.

    Yields:
        Where the record stands, and the record.

    Raises:
        ModuleNotFoundError: If `datasets` is not installed.
        FileNotFoundError: If the folder holds no dataset.
        ValueError: For a split that it lacks.
    """
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("data=dataset needs datasets: pip install datasets") from error
    try:
        found = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise FileNotFoundError(
            f"data.path={str(path)!r} is no dataset on disk: {error}"
        ) from error
    if isinstance(found, dict):
        if split not in found:
            raise ValueError(f"data.split={split!r} is unknown; {nearest(split, [*found])}")
        found = found[split]
    for number, record in enumerate(found):
        yield f"{path}, record {number}", record


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Which fields of a record are read."""

    text: str = "text"
    """All of it is learned; without a `prompt`."""
    prompt: str | None = None
    """Read, not learned."""
    completion: str = "completion"
    """Learned; with a `prompt`."""

    def of(self, record: Mapping[str, Any], where: str) -> tuple[str, str]:
        """The prompt (empty without one) and what is learned.

        Raises:
            ValueError: For a record that lacks a field, or has something else than text in it.
        """
        names = [self.text] if self.prompt is None else [self.prompt, self.completion]
        for name in names:
            if name not in record:
                raise ValueError(
                    f"{where}: no field {name!r}; it has {', '.join(map(str, record)) or 'none'} "
                    "(data.text, data.prompt and data.completion name the fields)"
                )
            if not isinstance(record[name], str):
                kind = type(record[name]).__name__
                raise ValueError(f"{where}: field {name!r} is a {kind}, not text")
        return (
            ("", record[names[0]]) if self.prompt is None else (record[names[0]], record[names[1]])
        )


def written(
    documents: Callable[[], Iterable[tuple[Tokens, bool]]],
    words: Mapping[str, Any],
    sources: Iterable[Path],
) -> Corpus:
    """A corpus from the cache, or written there.

    Args:
        documents: Makes pieces of documents, as in `Corpus.tokens`, and whether one ends there.
        words: What tells this corpus from others, besides its files.
        sources: The files that it is made of; their sizes and times count.

    Returns:
        The corpus.

    Raises:
        OSError: If it cannot be written.
    """
    told = [
        (str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in sources
    ]
    name = hashlib.sha256(repr((_VERSION, sorted(words.items()), told)).encode()).hexdigest()[:32]
    base = cache_folder()
    folder = (base or _scratch()) / "tokens" / name
    if not (folder / "ends.npy").is_file():
        _write(folder, documents())
    count = (folder / "tokens.bin").stat().st_size // 4
    tokens = np.memmap(folder / "tokens.bin", np.int32, "r") if count else np.empty(0, np.int32)
    return Corpus(tokens, np.load(folder / "ends.npy", mmap_mode="r"))


_SCRATCH: list[tempfile.TemporaryDirectory[str]] = []


def _scratch() -> Path:
    """A folder that goes with the process, where there is no cache."""
    if not _SCRATCH:
        _SCRATCH.append(tempfile.TemporaryDirectory(prefix="memtrain-"))
    return Path(_SCRATCH[0].name)


def _write(folder: Path, documents: Iterable[tuple[Tokens, bool]]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}", dir=folder.parent))
    ends, length = [], 0
    try:
        with (partial / "tokens.bin").open("wb") as file:
            for piece, ended in documents:
                file.write(np.asarray(piece, np.int32).tobytes())
                length += len(piece)
                if ended:
                    ends.append(length)
        np.save(partial / "ends.npy", np.asarray(ends, np.int64))
        if not folder.exists():
            partial.rename(folder)
    except OSError as error:
        raise OSError(f"cannot write tokens into {str(folder)!r}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
