"""Fashion-MNIST from its four files on disk: big-endian IDX, compressed by gzip."""

import gzip
import math
import struct
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from memtrain.training.data import Images
from memtrain.training.settings import in_range

FILES = {"train": "train", "validation": "t10k"}
HOW = "on Debian: apt-get install dataset-fashion-mnist"
_MEAN, _DEVIATION = 0.2860, 0.3530  # of the training images' pixels


def fashion(
    seed: int,
    *,
    folder: str = "/usr/share/datasets/fashion-mnist",
    side: int = 28,
    train: int = 60_000,
    validation: int = 10_000,
) -> Images:
    """Fashion-MNIST: 70,000 images of clothes, ten classes; its own split, so no seed changes it.

    Args:
        seed: Of the order.
        folder: Holds the four files; Debian's package `dataset-fashion-mnist` puts them there.
        side: Pixels: 28, or 14 or 7, means of 2x2 and 4x4.
        train: So many of the training images, from the first on.
        validation: So many of the test images, from the first on.

    Returns:
        The images, with mean 0 and deviation 1 over the training set.

    Raises:
        ValueError: If a value is out of its range, or a file damaged.
        FileNotFoundError: If a file is missing; tells how to get it.
    """
    if side not in (28, 14, 7):
        raise ValueError(f"data.side={side}; allowed: 28, 14, 7")
    in_range("data.train", train, at_least=1, at_most=60_000)
    in_range("data.validation", validation, at_least=1, at_most=10_000)
    read, parts = read_fashion(Path(folder)), {}
    for split, count in (("train", train), ("validation", validation)):
        images, targets = (part[:count] for part in read[split])
        images = (images.unsqueeze(1).float() / 255 - _MEAN) / _DEVIATION
        parts[split] = avg_pool2d(images, 28 // side), targets
    return Images(parts, seed)


@lru_cache(maxsize=1)
def read_fashion(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Both splits' images and classes.

    Args:
        folder: Holds `train-images-idx3-ubyte.gz` and its three companions.

    Returns:
        Split -> uint8 images [n, 28, 28] and int64 classes [n].

    Raises:
        FileNotFoundError: If a file is missing; tells how to get it.
        ValueError: If one is damaged.
    """
    parts = {}
    for split, name in FILES.items():
        images = read_idx(folder / f"{name}-images-idx3-ubyte.gz")
        targets = read_idx(folder / f"{name}-labels-idx1-ubyte.gz").long()
        if images.dim() != 3 or targets.shape != images.shape[:1]:
            shapes = f"{list(images.shape)} and {list(targets.shape)}"
            raise ValueError(f"{str(folder)!r}: {split} images and classes are {shapes}")
        parts[split] = images, targets
    return parts


def read_idx(path: Path) -> Tensor:
    """One IDX file of bytes: two zeros, the type 8, the number of dimensions, the sizes, the data.

    Args:
        path: Compressed by gzip.

    Returns:
        uint8, of the shape that the file tells.

    Raises:
        FileNotFoundError: If it is not there; tells how to get it.
        ValueError: If it is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no {str(path)!r}; {HOW}, or set data.folder")
    try:
        content = gzip.decompress(path.read_bytes())
        zero, kind, dimensions = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{dimensions}I", content, 4)
    except (OSError, EOFError, struct.error) as error:
        raise ValueError(f"{str(path)!r} is no IDX file: {error}") from error
    start = 4 + 4 * dimensions
    if (zero, kind) != (0, 8) or len(content) - start != math.prod(shape):
        raise ValueError(f"{str(path)!r} is no IDX file of {list(shape)} bytes")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).copy()).view(shape)
