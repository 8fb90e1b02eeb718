"""Text on disk, in tokens, as a language model takes it: files, JSON lines, datasets."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memtrain.training import corpus
from memtrain.training.batches import IGNORED
from memtrain.training.pretrained import Pretrained
from memtrain.training.rows import Rows
from memtrain.training.settings import in_range

BYTES = "bytes"
_BYTE_TOKENS = 256


class TextRows(Rows):
    """Rows of tokens for a language model.

    Args:
        found: The corpus.
        masked: Masks tokens for a masked model; None for a causal one.
        sequence: Most tokens of a row.
        packed: Whether rows are the corpus cut at every `sequence` tokens, documents one after
            another; else each document is a row, cut and filled up to the batch's longest.
        edges: Tokens before and after each row.
        pad: Fills rows up.
        tokenizer: Whose tokens they are; None for bytes.
        prompts: Whether some tokens are not learned.
        validation: As `Rows`.
        seed: As `Rows`.

    Raises:
        ValueError: If there are too few tokens.
    """

    unit = "tokens"

    def __init__(  # noqa: PLR0913
        self,
        found: corpus.Corpus,
        masked: Any,
        *,
        sequence: int,
        packed: bool,
        edges: tuple[list[int], list[int]] = ([], []),
        pad: int = 0,
        tokenizer: Any = None,
        prompts: bool = False,
        validation: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.corpus, self.masked, self.packed, self.pad = found, masked, packed, pad
        self.tokenizer, self.ragged = tokenizer, not packed
        self.edges, self.block = edges, sequence - len(edges[0]) - len(edges[1])
        if self.block < 2:
            raise ValueError(f"data.sequence={sequence} leaves {self.block} tokens of text a row")
        self._starts = np.concatenate([[0], found.ends[:-1]]) if len(found.ends) else found.ends
        lengths = np.minimum(found.ends - self._starts, self.block)
        count = len(found.tokens) // self.block if packed else len(found.ends)
        if packed and not count:
            raise ValueError(
                f"the text has {len(found.tokens)} tokens, data.sequence={sequence} asks for more"
            )
        self.length = sequence if packed else int(lengths.max()) + sequence - self.block
        """Tokens of the longest row."""
        self.cut = 0 if packed else int((found.ends - self._starts > self.block).sum())
        """Documents that are longer than a row."""
        rows = torch.arange(count)
        if prompts or not packed:
            rows = rows[self._teach(count)]
        super().__init__(rows, validation, seed)

    def _teach(self, count: int) -> Tensor:
        """Which rows have a token to learn behind the first."""
        found = torch.zeros(count, dtype=torch.bool)
        for row in range(count):
            found[row] = bool((self._row(row)[1:] >= 0).any())
        return found

    def _row(self, row: int) -> np.ndarray:
        start = row * self.block if self.packed else int(self._starts[row])
        end = start + self.block if self.packed else int(self.corpus.ends[row])
        return self.corpus.tokens[start : min(end, start + self.block)]

    def collate(self, rows: Sequence[int], draws: Sequence[torch.Generator]) -> dict[str, Tensor]:
        """`input_ids`, `labels`, and `attention_mask` where rows differ in length."""
        made = [self._labelled(self._row(row), draw) for row, draw in zip(rows, draws, strict=True)]
        return self._filled(made)

    def longest(self, size: int) -> dict[str, Tensor]:
        """`size` rows as long as the longest."""
        row = torch.full((self.length,), self.pad), torch.zeros(self.length, dtype=torch.long)
        return self._filled([row] * size)

    def _filled(self, made: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        fill = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        inputs, labels = [row for row, _ in made], [row for _, row in made]
        batch = {
            "input_ids": fill(inputs, padding_value=self.pad),
            "labels": fill(labels, padding_value=IGNORED),
        }
        if not self.packed:
            batch["attention_mask"] = fill([torch.ones_like(row) for row in inputs])
        return batch

    def _labelled(self, row: np.ndarray, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        signed = torch.from_numpy(np.asarray(row, np.int64))
        before, after = (torch.tensor(edge, dtype=torch.long) for edge in self.edges)
        tokens = torch.cat([before, torch.where(signed < 0, ~signed, signed), after])
        if self.masked is None:
            labels = torch.where(signed < 0, IGNORED, signed)
            labels[0] = IGNORED  # no token foretells it
            return tokens, labels
        return self.masked(tokens, draw)


class Masking:
    """Masks tokens as BERT's training does, by transformers' own collator.

    Args:
        tokenizer: Has a mask token.
        share: Of the tokens, to be foretold.

    Raises:
        ValueError: For a tokenizer without a mask token.
    """

    def __init__(self, tokenizer: Any, share: float) -> None:
        in_range("data.masked", share, above=0, below=1)
        if getattr(tokenizer, "mask_token_id", None) is None:
            raise ValueError(
                "a masked language model needs a tokenizer with a mask token; data.tokenizer= "
                "names its folder"
            )
        from transformers import DataCollatorForLanguageModeling

        self.collator: Any = DataCollatorForLanguageModeling(tokenizer, mlm_probability=share)
        self.special = torch.tensor(tokenizer.all_special_ids)

    def __call__(self, tokens: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """A row with masks in it, and what stood there."""
        special = torch.isin(tokens, self.special)
        self.collator.generator = draw
        inputs, labels = self.collator.torch_mask_tokens(tokens[None].clone(), special[None])
        inputs, labels = inputs[0], labels[0]
        if not (labels != IGNORED).any():  # a short row: its loss would be a mean over nothing
            place = torch.nonzero(~special)[
                int(torch.rand((), generator=draw) * int((~special).sum()))
            ]
            inputs[place], labels[place] = self.collator.tokenizer.mask_token_id, tokens[place]
        return inputs, labels


def text(  # noqa: PLR0913 (each is a key of the config)
    seed: int,
    model: Pretrained | None,
    *,
    path: str,
    files: str = "*",
    sequence: int = 512,
    packed: bool = True,
    tokenizer: str | None = None,
    masked: float = 0.15,
    validation: float = 0.1,
) -> TextRows:
    """Text files: a file, or all files of a folder, each a document.

    Args:
        seed: Of the split, the order and the masks.
        model: Whose tokenizer and task are meant; None for another model: bytes, causal.
        path: A file or a folder.
        files: Which of a folder's files, at any depth, such as `*.py`.
        sequence: Most tokens of a row.
        packed: Rows of exactly `sequence` tokens, documents one after another; else a row each.
        tokenizer: A folder, or `bytes`; by default the model's.
        masked: Share of the tokens that a masked model foretells.
        validation: Fraction of the rows that is held out.

    Returns:
        The rows.

    Raises:
        FileNotFoundError: If there is no such file, or no tokenizer.
        ValueError: For an empty text, one that is not UTF-8, or a value out of range.
    """
    found = corpus.files(Path(path).expanduser(), files)
    reader = _Reader(model, tokenizer, sequence)
    return reader.rows(
        partial(reader.texts, found), found, {"form": "text"},
        packed=packed, masked=masked, validation=validation, seed=seed,
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
    masked: float = 0.15,
    validation: float = 0.1,
) -> TextRows:
    """JSON lines: a record each, of a text, or of a prompt (read, not learned) and a completion.

    Args:
        seed: As `text`.
        model: As `text`.
        path: A file, or a folder of `*.jsonl`.
        text: The field of a text.
        prompt: The field of a prompt; with it `text` does not count.
        completion: The field of what is learned after a prompt.
        sequence: As `text`.
        packed: As `text`.
        tokenizer: As `text`.
        masked: As `text`.
        validation: As `text`.

    Returns:
        The rows.

    Raises:
        FileNotFoundError: As `text`.
        ValueError: As `text`, and for a line that is no JSON object, or lacks a field.
    """
    source = Path(path).expanduser()
    reader = _Reader(model, tokenizer, sequence)
    return reader.records(
        partial(corpus.json_lines, source), corpus.files(source, "*.jsonl"), {"form": "jsonl"},
        corpus.Fields(text=text, prompt=prompt, completion=completion),
        packed=packed, masked=masked, validation=validation, seed=seed,
    )  # fmt: skip


def dataset(  # noqa: PLR0913
    seed: int,
    model: Pretrained | None,
    *,
    path: str,
    split: str = "train",
    text: str = "text",
    prompt: str | None = None,
    completion: str = "completion",
    sequence: int = 512,
    packed: bool = False,
    tokenizer: str | None = None,
    masked: float = 0.15,
    validation: float = 0.1,
) -> TextRows:
    """A dataset that Hugging Face's `save_to_disk` wrote; its records are read as `jsonl`'s.

    Args:
        seed: As `text`.
        model: As `text`.
        path: The folder.
        split: Of a dictionary of datasets.
        text: As `jsonl`.
        prompt: As `jsonl`.
        completion: As `jsonl`.
        sequence: As `text`.
        packed: As `text`.
        tokenizer: As `text`.
        masked: As `text`.
        validation: As `text`.

    Returns:
        The rows.

    Raises:
        ModuleNotFoundError: If `datasets` is not installed.
        FileNotFoundError: As `text`.
        ValueError: As `jsonl`.
    """
    source = Path(path).expanduser()
    reader = _Reader(model, tokenizer, sequence)
    return reader.records(
        partial(corpus.dataset_records, source, split), corpus.files(source),
        {"form": "dataset", "split": split},
        corpus.Fields(text=text, prompt=prompt, completion=completion),
        packed=packed, masked=masked, validation=validation, seed=seed,
    )  # fmt: skip


class _Reader:
    """Text to tokens, as a model and its tokenizer want them."""

    def __init__(self, model: Pretrained | None, tokenizer: str | None, sequence: int) -> None:
        in_range("data.sequence", sequence, at_least=2)
        self.model, self.sequence = model, sequence
        if model is not None and model.trained_task == "ImageClassification":
            raise ValueError(f"model=hf:{model.path} takes images; allowed: data=images:<folder>")
        longest = model.longest if model is not None else None
        if longest is not None and sequence > longest:
            raise ValueError(f"data.sequence={sequence}: the model takes at most {longest} tokens")
        plain = tokenizer == BYTES or (tokenizer is None and model is None)
        if plain:
            self.tokenizer, vocabulary = None, model.config.vocab_size if model else None
            if vocabulary is not None and vocabulary < _BYTE_TOKENS:
                raise ValueError(
                    f"data.tokenizer=bytes has {_BYTE_TOKENS} tokens, the model {vocabulary}"
                )
        elif model is None:
            raise ValueError(f"data.tokenizer={tokenizer!r}; allowed with model=py: bytes")
        else:
            self.tokenizer = model.tokenizer(tokenizer)

    @property
    def is_masked(self) -> bool:
        """Whether tokens are masked to be foretold."""
        return self.model is not None and self.model.trained_task == "MaskedLM"

    def document(self, piece: str, *, ended: bool = True, prompt: str = "") -> np.ndarray:
        """Tokens of a piece of a document, a prompt's as `~token`, and its end where it ends."""
        asked = np.asarray(self._ids(prompt), np.int32) if prompt else np.empty(0, np.int32)
        learned = self._ids(piece)
        end = None if self.tokenizer is None else self.tokenizer.eos_token_id
        if ended and not self.is_masked and end is not None:
            learned = [*learned, end]
        return np.concatenate([~asked, np.asarray(learned, np.int32)])

    def _ids(self, words: str) -> list[int]:
        if self.tokenizer is None:
            return list(words.encode())
        return self.tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]

    def texts(self, found: Sequence[Path]) -> Iterator[tuple[np.ndarray, bool]]:
        """Tokens of files, a piece at a time."""
        for piece, ended in corpus.texts(found, raw=self.tokenizer is None):
            if isinstance(piece, bytes):
                yield np.frombuffer(piece, np.uint8).astype(np.int32), ended
            else:
                yield self.document(piece, ended=ended), ended

    def records(
        self,
        read: Callable[[], Iterator[tuple[str, Any]]],
        sources: Sequence[Path],
        words: Mapping[str, Any],
        fields: corpus.Fields,
        **settings: Any,
    ) -> TextRows:
        """Rows of records: what `read` gives, by `fields`."""

        def documents() -> Iterator[tuple[np.ndarray, bool]]:
            for where, record in read():
                prompt, learned = fields.of(record, where)
                yield self.document(learned, prompt=prompt), True

        told = {**words, "fields": repr(fields)}
        prompts = fields.prompt is not None
        return self.rows(documents, sources, told, prompts=prompts, **settings)

    def rows(  # noqa: PLR0913
        self,
        documents: Any,
        sources: Sequence[Path],
        words: Mapping[str, Any],
        *,
        packed: bool,
        masked: float,
        validation: float,
        seed: int,
        prompts: bool = False,
    ) -> TextRows:
        """Rows of documents, from the cache where it has them."""
        told = {**words, "tokens": self._words(), "masked": self.is_masked}
        found = corpus.written(documents, told, sources)
        if not len(found.tokens):
            raise ValueError(f"data.path: {', '.join(map(str, sources[:3]))} has no text in it")
        edges, pad = ([], []), 0
        if self.tokenizer is not None:
            ends = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
            if self.is_masked and None not in ends:
                edges = [ends[0]], [ends[1]]
            own = self.tokenizer.pad_token_id
            pad = next((x for x in (own, self.tokenizer.eos_token_id) if x is not None), 0)
        return TextRows(
            found, Masking(self.tokenizer, masked) if self.is_masked else None,
            sequence=self.sequence, packed=packed, edges=edges, pad=pad, tokenizer=self.tokenizer,
            prompts=prompts, validation=validation, seed=seed,
        )  # fmt: skip

    def _words(self) -> str:
        """Marks that tell this tokenizer from others."""
        if self.tokenizer is None:
            return BYTES
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            return backend.to_str()
        return repr((type(self.tokenizer).__name__, sorted(self.tokenizer.get_vocab().items())))
