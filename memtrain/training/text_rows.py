"""Text files in tokens, as a causal language model takes them."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memtrain.config.errors import in_range
from memtrain.training.batches import IGNORED
from memtrain.training.pretrained import Pretrained
from memtrain.training.rows import Rows

BYTES = "bytes"
_BYTE_TOKENS = 256
_PIECE = 2**20
"""Bytes of a text that are tokenised at once."""


def text(
    seed: int,
    model: Pretrained | None,
    *,
    path: str,
    files: str = "*",
    sequence: int = 512,
    tokenizer: str | None = None,
    validation: float = 0.1,
) -> Rows:
    """Read text files: a file, or the files of a folder whose names match `files`, at any depth.

    Documents follow one another, and each row is `sequence` tokens of them. A document ends with
    the tokenizer's end token. `tokenizer` is a folder or `bytes`; by default it is the model's, and
    `bytes` without a transformers model. Tokens take 4 bytes each.
    """
    found = _files(path, files)
    in_range("data.sequence", sequence, at_least=2)
    longest = model.longest if model is not None else None
    if longest is not None and sequence > longest:
        raise ValueError(f"data.sequence={sequence}: the model takes at most {longest} tokens")
    loaded = _tokenizer(model, tokenizer)
    pieces = [_encode(piece, loaded, ended=ended) for piece, ended in _texts(found, loaded)]
    if not any(map(len, pieces)):
        raise ValueError(f"data.path={path!r} has no text in it")
    tokens = torch.from_numpy(np.concatenate(pieces))
    count = len(tokens) // sequence
    if not count:
        raise ValueError(
            f"the text has {len(tokens)} tokens; allowed: at least one row of "
            f"data.sequence={sequence}"
        )
    table = tokens[: count * sequence].view(count, sequence)

    def collate(rows: Sequence[int]) -> dict[str, Tensor]:
        inputs = table[list(rows)].long()
        labels = inputs.clone()
        labels[:, 0] = IGNORED
        return {"input_ids": inputs, "labels": labels}

    return Rows(count, collate, validation=validation, seed=seed, unit="tokens", tokenizer=loaded)


def _files(path: str, pattern: str) -> list[Path]:
    """Return a file itself, or a folder's visible files in the order of their names."""
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


def _tokenizer(model: Pretrained | None, where: str | None) -> Any:
    """Load the tokenizer of a text; None for bytes."""
    if where == BYTES or (where is None and model is None):
        vocabulary = model.config.vocab_size if model else _BYTE_TOKENS
        if vocabulary < _BYTE_TOKENS:
            raise ValueError(
                f"data.tokenizer=bytes has {_BYTE_TOKENS} tokens, the model {vocabulary}"
            )
        return None
    if model is None:
        raise ValueError(f"data.tokenizer={where!r}; allowed with model=py: bytes")
    return model.tokenizer(where)


def _encode(piece: Any, tokenizer: Any, *, ended: bool) -> np.ndarray:
    """Return the tokens of a piece, with the tokenizer's end token if its document has ended."""
    if tokenizer is None:
        return np.frombuffer(piece, np.uint8).astype(np.int32)
    ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    return np.asarray([*ids, *([end] if ended and end is not None else [])], np.int32)
