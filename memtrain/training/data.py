"""Data that need no download. A batch is a pure function of (seed, step): resuming is exact."""

import random
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memtrain.training import image_rows, text_rows
from memtrain.training.networks import described
from memtrain.training.rows import ALL, Rows, generator
from memtrain.training.settings import build_named, in_range

# Other people's packages, and tests, which are mostly data: not the library's own source.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class Text:
    """Byte sequences at random positions of a split's text.

    Args:
        parts: `train` and `validation`: uint8, [bytes].
        sequence: Tokens a sequence.
        seed: Of the positions.

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
        """Sequences `part` of `size`, and the same one byte later as targets."""
        found = self.parts[split]
        starts = torch.randint(
            len(found) - self.sequence, (size, 1), generator=generator(self.seed, split, index)
        )
        windows = found[starts[part] + torch.arange(self.sequence + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class Images:
    """Images in epochs of seeded order; validation batches go through the held-out images in turn.

    Args:
        parts: `train` and `validation`: images [n, channels, height, width] and classes [n].
        seed: Of the order.
    """

    kind = unit = "images"

    def __init__(self, parts: Mapping[str, tuple[Tensor, Tensor]], seed: int) -> None:
        self.parts, self.seed = dict(parts), seed

    def batch(self, split: str, index: int, size: int, part: slice = ALL) -> tuple[Tensor, Tensor]:
        """Images `part` of `size` in the epoch that batch `index` falls in.

        An incomplete batch at an epoch's end is left out.
        """
        images, targets = self.parts[split]
        size = min(size, len(images))
        epoch, position = divmod(index, len(images) // size)
        if split == "validation":
            chosen = torch.arange(position * size, (position + 1) * size)
        else:
            order = torch.randperm(len(images), generator=generator(self.seed, split, epoch))
            chosen = order[position * size : (position + 1) * size]
        return images[chosen[part]], targets[chosen[part]]


def stdlib(seed: int, *, sequence: int = 128, validation: float = 0.1) -> Text:
    """Source files of the running Python's own standard library, as bytes.

    All `*.py` under `sysconfig.get_path("stdlib")`, without site-packages and without tests.

    Args:
        seed: Of the split and of the sequences.
        sequence: Tokens a sequence.
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


def digits(seed: int, *, validation: float = 0.2) -> Images:
    """scikit-learn's 1,797 images of digits, 8x8, ten classes.

    Args:
        seed: Of the split and of the order.
        validation: Fraction of the images.

    Returns:
        The images, [n, 1, 8, 8], 0 to 1.

    Raises:
        ValueError: For a value out of range.
        ModuleNotFoundError: If scikit-learn is not installed; the message names the extra.
    """
    in_range("data.validation", validation, above=0, below=1)
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ModuleNotFoundError(
            "data.name='digits' needs scikit-learn: pip install 'memtrain[demo]'"
        ) from error
    found: Any = load_digits()
    images = torch.from_numpy(found.images.astype("float32") / 16).unsqueeze(1)
    targets = torch.from_numpy(found.target.astype("int64"))
    order = torch.randperm(len(images), generator=generator(seed, "split", 0))
    held_out = max(1, round(validation * len(images)))
    parts = {"validation": order[:held_out], "train": order[held_out:]}
    return Images({split: (images[i], targets[i]) for split, i in parts.items()}, seed)


Source = Text | Images | Rows
SOURCES: dict[str, Callable[..., Text | Images]] = {"stdlib": stdlib, "digits": digits}
"""Name in a config -> what reads the data, from a seed and the config's other keys."""
OWN: dict[str, Callable[..., Rows]] = {
    "text": text_rows.text,
    "jsonl": text_rows.jsonl,
    "dataset": text_rows.dataset,
    "images": image_rows.images,
}
"""Data of one's own, read from a seed, the model (`Pretrained`) and the config's other keys."""


def build_source(
    spec: Mapping[str, Any], seed: int, model: Mapping[str, Any] | None = None
) -> Source:
    """Build data from its config.

    Args:
        spec: `{"name": "stdlib", "sequence": 128, ...}`; missing fields take their defaults.
        seed: Decides the split and the order.
        model: The model's config, whose tokenizer and task data of one's own are read for.

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
    table: dict[str, Callable[..., Source]] = {**SOURCES, **OWN}
    if spec.get("name") in OWN:
        return build_named("data", spec, table, seed, described(model or {}))
    return build_named("data", spec, table, seed)


def stdlib_files(root: Path) -> list[Path]:
    """The library's own `*.py` files under `root`, in an order that is the same everywhere."""
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = sorted(path.as_posix() for path in found if not _LEFT_OUT & set(path.parts))
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
