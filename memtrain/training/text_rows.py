"""Text files and JSON lines in tokens, as a causal language model takes them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memtrain.training.batches import IGNORED
from memtrain.training.pretrained import Pretrained
from memtrain.training.rows import Rows
from memtrain.training.settings import in_range

BYTES = "bytes"
_BYTE_TOKENS = 256
_PIECE = 2**20
"""Bytes of a text that are tokenised at once."""
Tokens = np.ndarray


class TextRows(Rows):
    """Rows of tokens for a causal language model.

    Args:
        documents: Pieces of documents (int32; `~token` for a token that is read but not learned),
            and whether the document ends with the piece.
        sequence: Most tokens per row.
        packed: Whether rows are the documents, one after another, cut at every `sequence` tokens;
            else each document is a row, cut and padded to the longest of the batch.
        pad: The padding token.
        tokenizer: The tokenizer; None for bytes.
        validation: As `Rows`.
        seed: As `Rows`.

    Raises:
        ValueError: If there are too few tokens.

    Memory:
        4 bytes per token.
    """

    unit = "tokens"

    def __init__(
        self,
        documents: Iterable[tuple[Tokens, bool]],
        *,
        sequence: int,
        packed: bool,
        pad: int = 0,
        tokenizer: Any = None,
        validation: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.sequence, self.packed, self.pad, self.tokenizer = sequence, packed, pad, tokenizer
        self.ragged = not packed
        self.tokens, self.ends = _joined(documents)
        """All tokens, int32, and where each document ends, int64."""
        self.starts = np.concatenate([[0], self.ends[:-1]]) if len(self.ends) else self.ends
        lengths = self.ends - self.starts
        count = len(self.tokens) // sequence if packed else len(self.ends)
        if packed and not count:
            raise ValueError(
                f"the text has {len(self.tokens)} tokens; allowed: at least one row of "
                f"data.sequence={sequence}"
            )
        self.length = sequence if packed else min(sequence, int(lengths.max(initial=0)))
        """Tokens of the longest row."""
        self.cut = 0 if packed else int((lengths > sequence).sum())
        """Documents that are longer than a row."""
        # A row needs a token to learn after its first: no token predicts the first.
        teaches = [bool((self._row(row)[1:] >= 0).any()) for row in range(count)]
        super().__init__(torch.arange(count)[torch.tensor(teaches).bool()], validation, seed)

    def _row(self, row: int) -> Tokens:
        start = row * self.sequence if self.packed else int(self.starts[row])
        end = start + self.sequence if self.packed else int(self.ends[row])
        return self.tokens[start : min(end, start + self.sequence)]

    def collate(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return `input_ids`, `labels`, and `attention_mask` where rows differ in length."""
        return self._padded([torch.from_numpy(np.asarray(self._row(r), np.int64)) for r in rows])

    def longest(self, size: int) -> dict[str, Tensor]:
        """Return `size` rows as long as the longest."""
        return self._padded([torch.full((self.length,), self.pad)] * size)

    def _padded(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        fill = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        inputs = [torch.where(row < 0, ~row, row) for row in rows]
        labels = [torch.where(row < 0, IGNORED, row) for row in rows]
        for row in labels:
            row[0] = IGNORED
        batch = {
            "input_ids": fill(inputs, padding_value=self.pad),
            "labels": fill(labels, padding_value=IGNORED),
        }
        if not self.packed:
            batch["attention_mask"] = fill([torch.ones_like(row) for row in inputs])
        return batch


def _joined(documents: Iterable[tuple[Tokens, bool]]) -> tuple[Tokens, np.ndarray]:
    pieces, ends, length = [np.empty(0, np.int32)], [], 0
    for piece, ended in documents:
        pieces.append(np.asarray(piece, np.int32))
        length += len(piece)
        if ended:
            ends.append(length)
    return np.concatenate(pieces), np.asarray(ends, np.int64)


def text(  # noqa: PLR0913 (each is a key of the config)
    seed: int,
    model: Pretrained | None,
    *,
    path: str,
    files: str = "*",
    sequence: int = 512,
    packed: bool = True,
    tokenizer: str | None = None,
    validation: float = 0.1,
) -> TextRows:
    """Read text files: a file, or all files of a folder, each a document.

    Args:
        seed: Seeds the split and the order.
        model: The transformers model, for its tokenizer; None for another model: bytes.
        path: A file or a folder.
        files: Which of a folder's files, at any depth, such as `*.py`.
        sequence: Most tokens per row.
        packed: Rows of exactly `sequence` tokens, documents one after another; else a document per
            row.
        tokenizer: A folder, or `bytes`; the model's by default.
        validation: Fraction of the rows that is held out.

    Returns:
        The rows.

    Raises:
        FileNotFoundError: If there is no such file, or no tokenizer.
        ValueError: For an empty text, one that is not UTF-8, or a value out of range.
    """
    found, encode = _files(path, files), _Encoder(model, tokenizer, sequence)
    return encode.rows(
        ((encode(piece, ended=ended), ended) for piece, ended in _texts(found, encode.tokenizer)),
        path, sequence=sequence, packed=packed, validation=validation, seed=seed,
    )  # fmt: skip


def jsonl(  # noqa: PLR0913
    seed: int,
    model: Pretrained | None,
    *,
    path: str,
    text: str = "text",
    prompt: str | None = None,
    completion: str = "completion",
    sequence: int = 512,
    packed: bool = False,
    tokenizer: str | None = None,
    validation: float = 0.1,
) -> TextRows:
    """Read JSON lines: each record is a text, or a prompt (read, not learned) and a completion.

    Args:
        seed: As `text`.
        model: As `text`.
        path: A file, or a folder of `*.jsonl`.
        text: The field of a text.
        prompt: The field of a prompt; then `text` is not read.
        completion: The field that is learned after a prompt.
        sequence: As `text`.
        packed: As `text`.
        tokenizer: As `text`.
        validation: As `text`.

    Returns:
        The rows.

    Raises:
        FileNotFoundError: As `text`.
        ValueError: As `text`, and for a line that is not a JSON object, or lacks a field.
    """
    found, encode = _files(path, "*.jsonl"), _Encoder(model, tokenizer, sequence)

    def documents() -> Iterator[tuple[Tokens, bool]]:
        for where, record in _records(found):
            asked = "" if prompt is None else _field(record, prompt, where)
            learned = _field(record, text if prompt is None else completion, where)
            yield encode(learned, ended=True, prompt=asked), True

    return encode.rows(
        documents(), path, sequence=sequence, packed=packed, validation=validation, seed=seed
    )


def _files(path: str, pattern: str) -> list[Path]:
    """Return a file itself, or a folder's visible files in the order of their names.

    Raises:
        FileNotFoundError: If there is none.
    """
    root = Path(path).expanduser()
    if root.is_file():
        return [root]
    found = sorted(
        item
        for item in root.rglob(pattern)
        if item.is_file() and not any(part.startswith(".") for part in item.relative_to(root).parts)
    )
    if not found:
        what = f"has no files {pattern}" if root.is_dir() else "does not exist"
        raise FileNotFoundError(f"data.path={path!r} {what}")
    return found


def _texts(found: Iterable[Path], tokenizer: Any) -> Iterator[tuple[str | bytes, bool]]:
    """Yield pieces of a few MiB that end with a line, and whether a file ends with the piece."""
    for file in found:
        with file.open("rb") as stream:
            offset, piece = 0, stream.read(_PIECE) + stream.readline()
            while piece:
                after = stream.read(_PIECE) + stream.readline()
                try:
                    yield piece if tokenizer is None else piece.decode(), not after
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"{str(file)!r} is not UTF-8 at byte {offset + error.start}; data.files= "
                        "selects a folder's files, data.tokenizer=bytes takes any"
                    ) from error
                offset, piece = offset + len(piece), after


def _records(found: Iterable[Path]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield `file:line` and the record of each line that is not empty."""
    for file in found:
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


def _field(record: Mapping[str, Any], name: str, where: str) -> str:
    if name not in record:
        raise ValueError(
            f"{where}: no field {name!r}; it has {', '.join(map(str, record)) or 'none'} "
            "(data.text, data.prompt and data.completion name the fields)"
        )
    if not isinstance(record[name], str):
        raise ValueError(f"{where}: field {name!r} is a {type(record[name]).__name__}, not text")
    return record[name]


class _Encoder:
    """Encodes text with a model's tokenizer, or as bytes."""

    def __init__(self, model: Pretrained | None, tokenizer: str | None, sequence: int) -> None:
        in_range("data.sequence", sequence, at_least=2)
        longest = model.longest if model is not None else None
        if longest is not None and sequence > longest:
            raise ValueError(f"data.sequence={sequence}: the model takes at most {longest} tokens")
        self.tokenizer = None
        if tokenizer == BYTES or (tokenizer is None and model is None):
            vocabulary = model.config.vocab_size if model else _BYTE_TOKENS
            if vocabulary < _BYTE_TOKENS:
                raise ValueError(
                    f"data.tokenizer=bytes has {_BYTE_TOKENS} tokens, the model {vocabulary}"
                )
        elif model is None:
            raise ValueError(f"data.tokenizer={tokenizer!r}; allowed with model=py: bytes")
        else:
            self.tokenizer = model.tokenizer(tokenizer)

    def __call__(self, piece: str | bytes, *, ended: bool, prompt: str = "") -> Tokens:
        """Return tokens of a piece, after its prompt's as `~token`, with the end token if ended."""
        asked = np.asarray(self._ids(prompt), np.int32) if prompt else np.empty(0, np.int32)
        learned = np.asarray(self._ids(piece), np.int32)
        end = self.tokenizer.eos_token_id if ended and self.tokenizer is not None else None
        tail = np.asarray([] if end is None else [end], np.int32)
        return np.concatenate([~asked, learned, tail])

    def _ids(self, words: str | bytes) -> Any:
        if self.tokenizer is not None:
            return self.tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
        return np.frombuffer(words.encode() if isinstance(words, str) else words, np.uint8)

    def rows(
        self, documents: Iterable[tuple[Tokens, bool]], path: str, **settings: Any
    ) -> TextRows:
        """Make rows of documents."""
        ids = () if self.tokenizer is None else (self.tokenizer.pad_token_id,)
        ids += () if self.tokenizer is None else (self.tokenizer.eos_token_id,)
        pad = next((number for number in ids if number is not None), 0)
        documents = list(documents)
        if not any(len(piece) for piece, _ in documents):
            raise ValueError(f"data.path={path!r} has no text in it")
        return TextRows(documents, pad=pad, tokenizer=self.tokenizer, **settings)
