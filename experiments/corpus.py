"""Python's own library as bytes: a text that every machine has."""

import random
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from memtrain.training.rows import generator

# Packages of others, and tests, which are mostly data: not the library's own source.
_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class Text:
    """Byte sequences at random positions of a split's text.

    Args:
        parts: `train` and `validation`: uint8, [bytes].
        sequence: Tokens per sequence.
        seed: Seeds the positions.
    """

    def __init__(self, parts: Mapping[str, Tensor], sequence: int, seed: int) -> None:
        self.parts, self.sequence, self.seed = dict(parts), sequence, seed

    def batch(self, split: str, index: int, size: int) -> tuple[Tensor, Tensor]:
        """Return `size` sequences, and the same one byte later as targets."""
        found = self.parts[split]
        starts = torch.randint(
            len(found) - self.sequence, (size, 1), generator=generator(self.seed, split, index)
        )
        windows = found[starts + torch.arange(self.sequence + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def stdlib(seed: int, *, sequence: int = 128, validation: float = 0.1) -> Text:
    """Read source files of the running Python's standard library, as bytes.

    Site-packages and tests are left out.

    Args:
        seed: Seeds the split and the sequences.
        sequence: Tokens per sequence.
        validation: Fraction of the files (files, not bytes, are split).

    Returns:
        The text.
    """
    files = stdlib_files(Path(sysconfig.get_path("stdlib")))
    train, held_out = split_files(files, validation, seed)
    return Text({"train": _read(train), "validation": _read(held_out)}, sequence, seed)


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
    """
    shuffled = random.Random(seed).sample(files, len(files))
    held_out = min(len(files) - 1, max(1, round(validation * len(files))))
    return shuffled[held_out:], shuffled[:held_out]


def _read(files: list[Path]) -> Tensor:
    joined = b"\n".join(path.read_bytes() for path in files)
    return torch.from_numpy(np.frombuffer(joined, dtype=np.uint8).copy())
