"""Images on disk, a folder a class, as a transformers image classifier takes them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memtrain.training import corpus
from memtrain.training.pretrained import Pretrained
from memtrain.training.rows import Rows
from memtrain.training.settings import in_range

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


class ImageRows(Rows):
    """Images that are read and resized as they are needed.

    Args:
        found: Each image's file and class.
        channels: 1 (grey) or 3.
        side: Pixels of height and of width.
        mean: Subtracted, by channel, of values from 0 to 1.
        deviation: Divided by, after it.
        validation: As `Rows`.
        seed: As `Rows`.
    """

    unit = "images"

    def __init__(
        self,
        found: Sequence[tuple[Path, int]],
        *,
        channels: int,
        side: int,
        mean: Sequence[float],
        deviation: Sequence[float],
        validation: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.found, self.mode, self.side = found, "L" if channels == 1 else "RGB", side
        self.channels = channels
        self.mean, self.deviation = (
            torch.tensor(values)[:channels, None, None] for values in (mean, deviation)
        )
        super().__init__(torch.arange(len(found)), validation, seed)

    def collate(self, rows: Sequence[int], draws: Sequence[torch.Generator]) -> dict[str, Tensor]:
        """`pixel_values` and `labels`."""
        images = [self._read(self.found[row][0]) for row in rows]
        labels = torch.tensor([self.found[row][1] for row in rows])
        return {"pixel_values": torch.stack(images), "labels": labels}

    def longest(self, size: int) -> dict[str, Tensor]:
        """All batches are alike."""
        pixels = torch.zeros(size, self.channels, self.side, self.side)
        return {"pixel_values": pixels, "labels": torch.zeros(size, dtype=torch.long)}

    def _read(self, file: Path) -> Tensor:
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(file) as image:
                small = image.convert(self.mode).resize((self.side, self.side), 2)  # bilinear
        except (UnidentifiedImageError, OSError) as error:
            raise OSError(f"{str(file)!r} is no readable image: {error}") from error
        pixels = torch.from_numpy(np.asarray(small, np.float32) / 255)
        pixels = pixels.reshape(self.side, self.side, self.channels).permute(2, 0, 1)
        return (pixels - self.mean) / self.deviation


def images(
    seed: int,
    model: Pretrained | None,
    *,
    path: str,
    size: int | None = None,
    channels: int = 3,
    validation: float = 0.1,
) -> ImageRows:
    """A folder of folders of images; the inner ones, by name, are the classes 0, 1 ...

    Args:
        seed: Of the split and the order.
        model: Whose size, channels and normalisation are meant; None for another model.
        path: The folder.
        size: Pixels of height and of width; by default the model's, 224 without one.
        channels: 1 or 3, of a model that is not transformers'.
        validation: Fraction of the images that is held out.

    Returns:
        The rows.

    Raises:
        FileNotFoundError: If there are no images.
        ValueError: For a model that takes no images, or has fewer classes.
        ModuleNotFoundError: If Pillow is not installed.
    """
    try:
        import PIL.Image  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("data=images needs Pillow: pip install pillow") from error
    root = Path(path).expanduser()
    folders = sorted(item for item in root.glob("*") if item.is_dir() and item.name[0] != ".")
    found = [
        (file, number)
        for number, folder in enumerate(folders)
        for file in corpus.files(folder)
        if file.suffix.lower() in SUFFIXES
    ]
    if not found:
        raise FileNotFoundError(
            f"data.path={path!r} has no images; they are looked for in a folder for each class"
        )
    own: dict[str, Any] = {}
    if model is not None:
        if model.trained_task != "ImageClassification":
            raise ValueError(f"model=hf:{model.path} takes text; allowed: data=text:<file> ...")
        config = model.config
        if len(folders) > config.num_labels:
            raise ValueError(
                f"data.path={path!r} has {len(folders)} classes, the model {config.num_labels}; "
                f"model.classes={len(folders)} gives it a new head"
            )
        size, channels = size or getattr(config, "image_size", None), config.num_channels
        file = model.file.parent / "preprocessor_config.json"
        own = json.loads(file.read_text()) if file.is_file() else {}
    size = 224 if size is None else size
    in_range("data.size", size, at_least=1)
    half = [0.5] * channels
    return ImageRows(
        found, channels=channels, side=size, mean=own.get("image_mean", half),
        deviation=own.get("image_std", half), validation=validation, seed=seed,
    )  # fmt: skip
