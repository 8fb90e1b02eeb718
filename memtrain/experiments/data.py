"""Data that need no download. A batch is a pure function of (seed, step): resuming is exact."""

import random
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from memtrain.compressors.base import Key
from memtrain.experiments.config import in_range, named
from memtrain.experiments.idx import read_fashion

SPLITS = ("train", "validation")
_FASHION_MEAN, _FASHION_DEVIATION = 0.2860, 0.3530  # of the training images' pixels
# Other people's packages, and tests, which are mostly data: not the library's own source.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class Batch(NamedTuple):
    """Inputs and targets: tokens [batch, sequence] both, or images [batch, 1, n, n] and [batch]."""

    inputs: Tensor
    targets: Tensor


class Source(Protocol):
    """What the loop asks of data."""

    kind: str  # "tokens" or "images", and the word for speed

    def batch(self, split: str, index: int, size: int) -> Batch:
        """The batch of a step; equal arguments give equal batches."""
        ...


@dataclass(kw_only=True)
class StdlibConfig:
    """Source files of the running Python's own standard library, as bytes.

    All `*.py` under `sysconfig.get_path("stdlib")`, without site-packages and without tests. Files,
    not bytes, are split into train and validation.
    """

    sequence: int = 128
    """Tokens a sequence."""
    validation: float = 0.1
    """Fraction of the files."""

    def __post_init__(self) -> None:
        in_range("data.sequence", self.sequence, at_least=1)
        in_range("data.validation", self.validation, above=0, below=1)

    def build(self, seed: int) -> "Text":
        """Read and split the files.

        Raises:
            FileNotFoundError: If this Python has too few source files (a frozen or zipped one).
        """
        root = Path(sysconfig.get_path("stdlib"))
        return Text.of_files(stdlib_files(root), self, seed)


@dataclass(kw_only=True)
class DigitsConfig:
    """scikit-learn's 1,797 images of digits, 8x8, ten classes; the split is seeded."""

    validation: float = 0.2
    """Fraction of the images."""

    def __post_init__(self) -> None:
        in_range("data.validation", self.validation, above=0, below=1)

    def build(self, seed: int) -> "Images":
        """Load and split the images.

        Raises:
            ModuleNotFoundError: If scikit-learn is not installed; the message names the extra.
        """
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ModuleNotFoundError(
                "data.name='digits' needs scikit-learn: pip install 'memtrain[demo]'"
            ) from error
        digits: Any = load_digits()
        images = torch.from_numpy(digits.images.astype("float32") / 16).unsqueeze(1)
        targets = torch.from_numpy(digits.target.astype("int64"))
        order = torch.randperm(len(images), generator=_generator(seed, "split", 0))
        held_out = max(1, round(self.validation * len(images)))
        parts = {"validation": order[:held_out], "train": order[held_out:]}
        return Images({split: (images[i], targets[i]) for split, i in parts.items()}, seed)


@dataclass(kw_only=True)
class FashionConfig:
    """Fashion-MNIST: 70,000 images of clothes, ten classes; its own split, so no seed changes it.

    Raises:
        ValueError: If a field is out of its range.
    """

    folder: str = "/usr/share/datasets/fashion-mnist"
    """Holds the four files; here Debian's package `dataset-fashion-mnist` puts them."""
    side: int = 28
    """Pixels: 28, or 14 or 7, means of 2x2 and 4x4."""
    train: int = 60_000
    """So many of the training images, from the first on."""
    validation: int = 10_000
    """So many of the test images, from the first on."""

    def __post_init__(self) -> None:
        if self.side not in (28, 14, 7):
            raise ValueError(f"data.side={self.side}; allowed: 28, 14, 7")
        in_range("data.train", self.train, at_least=1, at_most=60_000)
        in_range("data.validation", self.validation, at_least=1, at_most=10_000)

    def build(self, seed: int) -> "Images":
        """Read the images, with mean 0 and deviation 1 over the training set.

        Raises:
            FileNotFoundError: If a file is missing; tells how to get it.
            ValueError: If one is damaged.
        """
        read, parts = read_fashion(Path(self.folder)), {}
        for split, count in (("train", self.train), ("validation", self.validation)):
            images, targets = (part[:count] for part in read[split])
            images = (images.unsqueeze(1).float() / 255 - _FASHION_MEAN) / _FASHION_DEVIATION
            parts[split] = avg_pool2d(images, 28 // self.side), targets
        return Images(parts, seed)


class Text:
    """Byte sequences at random positions of a split's text."""

    kind = "tokens"

    def __init__(self, parts: Mapping[str, Tensor], sequence: int, seed: int) -> None:
        for split, part in parts.items():
            if len(part) <= sequence:
                raise ValueError(
                    f"data.sequence={sequence} is too long: the {split} text has {len(part)} bytes"
                )
        self.parts, self.sequence, self.seed = dict(parts), sequence, seed

    @classmethod
    def of_files(cls, files: list[Path], config: StdlibConfig, seed: int) -> "Text":
        """Split files by a seeded shuffle, and join each split's bytes.

        Raises:
            FileNotFoundError: If there are fewer than two files.
        """
        train, validation = split_files(files, config.validation, seed)
        parts = {"train": _read(train), "validation": _read(validation)}
        return cls(parts, config.sequence, seed)

    def batch(self, split: str, index: int, size: int) -> Batch:
        """`size` sequences, and the same one byte later as targets."""
        part = self.parts[split]
        starts = torch.randint(
            len(part) - self.sequence, (size, 1), generator=_generator(self.seed, split, index)
        )
        windows = part[starts + torch.arange(self.sequence + 1)].long()
        return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


class Images:
    """Images in epochs of seeded order; validation batches walk through the held-out images."""

    kind = "images"

    def __init__(self, parts: Mapping[str, tuple[Tensor, Tensor]], seed: int) -> None:
        self.parts, self.seed = dict(parts), seed

    def batch(self, split: str, index: int, size: int) -> Batch:
        """`size` images of the epoch that batch `index` falls in; an incomplete one is left out."""
        images, targets = self.parts[split]
        size = min(size, len(images))
        epoch, position = divmod(index, len(images) // size)
        if split == "validation":
            chosen = torch.arange(position * size, (position + 1) * size)
        else:
            order = torch.randperm(len(images), generator=_generator(self.seed, split, epoch))
            chosen = order[position * size : (position + 1) * size]
        return Batch(images[chosen], targets[chosen])


# name in a config -> dataclass with a `build(seed)`
SOURCES: dict[str, type[StdlibConfig] | type[DigitsConfig] | type[FashionConfig]] = {
    "stdlib": StdlibConfig,
    "digits": DigitsConfig,
    "fashion": FashionConfig,
}


def build_source(spec: Mapping[str, Any], seed: int) -> Source:
    """Build data from its config.

    Args:
        spec: `{"name": "stdlib", "sequence": 128, ...}`; missing fields take their defaults.
        seed: Decides the split and the order.

    Returns:
        The source of batches.

    Raises:
        ValueError: For an unknown name or field (with the nearest valid one), or a bad value.
        TypeError: For a value of the wrong type.
        ModuleNotFoundError: If the data need a package that is not installed.
        FileNotFoundError: If there are no files.

    Example:
        >>> source = build_source({"name": "stdlib", "sequence": 8}, seed=0)
        >>> source.batch("train", 0, 4).inputs.shape
        torch.Size([4, 8])
    """
    return named("data", spec, SOURCES).build(seed)


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


def _generator(seed: int, split: str, index: int) -> torch.Generator:
    site = ("split", *SPLITS).index(split)
    mixed = Key(seed=seed, site=site, step=index).bits()
    return torch.Generator().manual_seed(mixed)
