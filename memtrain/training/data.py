"""Data of `memtrain-train`. A batch is a pure function of (seed, step): resuming is exact."""

import random
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memtrain.training import rows, text_rows
from memtrain.training.networks import described
from memtrain.training.rows import ALL, Rows, generator
from memtrain.training.settings import build_named, in_range

# Packages of others, and tests, which are mostly data: not the library's own source.
_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class Text:
    """Byte sequences at random positions of a split's text.

    Args:
        parts: `train` and `validation`: uint8, [bytes].
        sequence: Tokens per sequence.
        seed: Seeds the positions.

    Raises:
        ValueError: If a split is no longer than a sequence.
    """

    kind = unit = "tokens"

    def __init__(self, parts: Mapping[str, Tensor], sequence: int, seed: int) -> None:
        for split, part in parts.items():
            if len(part) <= sequence:
                raise ValueError(
                    f"data.sequence={sequence} is too long: the {split} text has {len(part)} bytes"
                )
        self.parts, self.sequence, self.seed = dict(parts), sequence, seed

    def batch(self, split: str, index: int, size: int, part: slice = ALL) -> tuple[Tensor, Tensor]:
        """Return sequences `part` of `size`, and the same one byte later as targets."""
        found = self.parts[split]
        starts = torch.randint(
            len(found) - self.sequence, (size, 1), generator=generator(self.seed, split, index)
        )
        windows = found[starts[part] + torch.arange(self.sequence + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def stdlib(seed: int, *, sequence: int = 128, validation: float = 0.1) -> Text:
    """Read source files of the running Python's standard library, as bytes.

    All `*.py` under `sysconfig.get_path("stdlib")`, without site-packages and without tests.

    Args:
        seed: Seeds the split and the sequences.
        sequence: Tokens per sequence.
        validation: Fraction of the files (files, not bytes, are split).

    Returns:
        The text.

    Raises:
        ValueError: For a value out of range.
        FileNotFoundError: If this Python has too few source files (a frozen or zipped one).
    """
    in_range("data.sequence", sequence, at_least=1)
    in_range("data.validation", validation, above=0, below=1)
    files = stdlib_files(Path(sysconfig.get_path("stdlib")))
    train, held_out = split_files(files, validation, seed)
    return Text({"train": _read(train), "validation": _read(held_out)}, sequence, seed)


Source = Text | Rows
SOURCES: dict[str, Callable[..., Source]] = {
    "stdlib": stdlib,
    "text": text_rows.text,
    "jsonl": text_rows.jsonl,
    "py": rows.py,
}
"""Name in a config -> function of a seed, of the model for the user's data (`Pretrained` or None),
and of the config's other keys."""


def build_source(
    spec: Mapping[str, Any], seed: int, model: Mapping[str, Any] | None = None
) -> Source:
    """Build data from its config.

    Args:
        spec: `{"name": "stdlib", "sequence": 128, ...}`; missing fields take their defaults.
        seed: Seeds the split and the order.
        model: The model's config, for its tokenizer.

    Returns:
        The source of batches.

    Raises:
        ValueError: For an unknown name or field (with the nearest valid one), or a bad value.
        TypeError: For a value of the wrong type.
        ModuleNotFoundError: If the data need a package that is not installed.
        FileNotFoundError: If there are no files.

    Example:
        >>> source = build_source({"name": "stdlib", "sequence": 8}, seed=0)
        >>> source.batch("train", 0, 4)[0].shape
        torch.Size([4, 8])
    """
    known = spec.get("name") in SOURCES and spec["name"] != "stdlib"
    return build_named("data", spec, SOURCES, seed, *([described(model or {})] if known else []))


def stdlib_files(root: Path) -> list[Path]:
    """Return the library's own `*.py` files under `root`, in the same order on every machine."""
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = sorted(path.as_posix() for path in found if not _EXCLUDED & set(path.parts))
    return [root / path for path in kept]


def split_files(files: list[Path], validation: float, seed: int) -> tuple[list[Path], list[Path]]:
    """Shuffle files under a seed and divide them.

    Args:
        files: At least two.
        validation: Fraction of the files, at least one file.
        seed: Equal seeds give equal splits.

    Returns:
        Files for training, and files for validation.

    Raises:
        FileNotFoundError: If there are fewer than two files.
    """
    if len(files) < 2:
        raise FileNotFoundError(
            f"found {len(files)} source files of Python's standard library; need at least 2"
        )
    shuffled = random.Random(seed).sample(files, len(files))
    held_out = min(len(files) - 1, max(1, round(validation * len(files))))
    return shuffled[held_out:], shuffled[:held_out]


def _read(files: list[Path]) -> Tensor:
    joined = b"\n".join(path.read_bytes() for path in files)
    return torch.from_numpy(np.frombuffer(joined, dtype=np.uint8).copy())
