"""The few-bit paper's table of activation memory: `python -m experiments.paper_table`."""

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from experiments.paper_models import DENSENET, VGG, densenet, vgg
from memtrain.activations.intercept.op_families import FAMILIES as OPS
from memtrain.activations.intercept.options import Options
from memtrain.activations.saved.site import Record
from memtrain.activations.trace.fake_forward import trace
from memtrain.cli.command_line import working
from memtrain.cli.models.build_model import build_named, context
from memtrain.cli.models.named_models import NAMED_MODELS
from memtrain.cli.models.request import Request
from memtrain.compressors import Identity

CONVENTION = """\
MiB of one sample: 256x256 images, or 256 tokens with the attention's
probabilities. Counted: distinct storages that a forward keeps for its backward,
the model's input among them, parameters not; dropout off, no head on the
language models, GELU in the place of ReLU. Nonlinear: what nonlinearities save,
also where another op saves it too. arXiv, OpenReview: the paper's two versions.
"""


class Paper(NamedTuple):
    """Published: MiB of the model, and of all and nonlinear activations in both versions."""

    size: float
    arxiv: tuple[float, float]
    openreview: tuple[float, float]


PAPER = {
    "ResNet-18": Paper(44.6, (40.0, 11.5), (40.0, 11.5)),
    "ResNet-50": Paper(99.2, (156.8, 47.9), (156.8, 47.9)),
    "ResNet-101": Paper(171.4, (234.5, 73.4), (234.5, 73.4)),
    "ResNet-152": Paper(232.3, (328.2, 104.9), (328.2, 104.9)),
    "DenseNet-121": Paper(30.9, (243.8, 79.1), (243.8, 79.1)),
    "DenseNet-161": Paper(112.4, (457.2, 145.3), (458.8, 147.0)),
    "DenseNet-169": Paper(54.7, (296.3, 95.3), (296.3, 95.3)),
    "DenseNet-201": Paper(77.4, (382.2, 123.9), (382.2, 123.9)),
    "EfficientNet-B0": Paper(20.4, (112.4, 32.4), (112.4, 32.4)),
    "EfficientNet-B3": Paper(47.5, (218.6, 59.5), (218.6, 59.5)),
    "EfficientNet-B7": Paper(256.3, (673.5, 178.9), (674.8, 179.3)),
    "VGG 11": Paper(507.2, (100.9, 37.0), (100.9, 37.0)),
    "VGG 16": Paper(528.2, (163.8, 68.5), (163.8, 68.5)),
    "VGG 19": Paper(548.4, (178.8, 75.0), (178.8, 75.0)),
    "RoBERTa-base": Paper(480.7, (219.6, 36.0), (185.6, 36.0)),
    "RoBERTa-large": Paper(1355.6, (578.1, 96.0), (482.1, 96.0)),
    "GPT2": Paper(491.0, (331.1, 144.0), (297.1, 146.2)),
}
"""Table of appendix B, arXiv:2202.00441 and its OpenReview version."""


class Ours(NamedTuple):
    """Counted here, in MiB."""

    size: float
    everything: float
    nonlinear: float


def measured(name: str) -> Ours:
    """One row, under fake tensors: nothing is allocated.

    Args:
        name: A key of `PAPER`.

    Returns:
        MiB of the model, of all activations and of those that nonlinearities save.

    Example:
        >>> measured("VGG 11").nonlinear
        37.03125
    """
    with context(torch.float32, real=False):
        model, batch = _built(name)
        model.train()
    records = trace(model, batch, lambda site: Identity(), Options(min_elements=0))
    # Modules that write a nonlinearity out in several ops: all of them are it.
    whole = {
        path
        for path, module in model.named_modules()
        if type(module).__module__ == "transformers.activations"
    }
    own = [r for r in records if r.site.op in OPS["@nonlinear"] or r.site.module in whole]
    size = sum(parameter.nbytes for parameter in model.parameters())
    return Ours(size / 2**20, _mib(records), _mib(own))


def _mib(records: Iterable[Record]) -> float:
    """Of their storages, each once."""
    sizes: dict[int, int] = {}
    for record in records:
        width = getattr(torch, record.dtype.removeprefix("torch.")).itemsize
        nbytes = max(record.nbytes, prod(record.shape) * width)
        sizes[record.storage] = max(sizes.get(record.storage, 0), nbytes)
    return sum(sizes.values()) / 2**20


def _built(name: str) -> tuple[nn.Module, Any]:
    if name in VGG or name in DENSENET:
        model = vgg(VGG[name]) if name in VGG else densenet(*DENSENET[name])
        return model, torch.zeros(1, 3, 256, 256)
    known = {"GPT2": "gpt2"}.get(name, name.lower())
    family = NAMED_MODELS[known.replace("resnet-", "resnet")]
    common = {"labels": False, "dropout": 0.0}
    if family.task == "ImageClassification":
        model, batch = build_named(family, Request(image=256, **common))
        return _with_gelu(model), batch
    return build_named(replace(family, task=""), Request(seq=256, attention="eager", **common))


def _with_gelu(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.GELU())
    return model


def table(rows: Iterable[tuple[str, Ours]]) -> Table:
    """Ours beside theirs, in 80 columns or fewer.

    Args:
        rows: Name and numbers.

    Returns:
        The table.
    """
    shown = Table(box=None, pad_edge=False)
    shown.add_column("")
    versions = ("arXiv", "Open\nReview")
    for head in ("model", "paper", "all", *versions, "non-\nlinear", *versions):
        shown.add_column(head, justify="right", no_wrap=True)
    for name, ours in rows:
        paper = PAPER[name]
        numbers = (
            *(ours.size, paper.size),
            *(ours.everything, paper.arxiv[0], paper.openreview[0]),
            *(ours.nonlinear, paper.arxiv[1], paper.openreview[1]),
        )
        shown.add_row(name, *(f"{number:.1f}" for number in numbers))
    return shown


def main() -> None:
    """Count every row, and print the table; progress goes to stderr."""
    console, errors = Console(), Console(stderr=True, soft_wrap=True, highlight=False)
    rows = []
    for number, name in enumerate(PAPER, 1):
        with working(errors, f"tracing {name} ({number} of {len(PAPER)})"):
            rows.append((name, measured(name)))
    console.print(table(rows), highlight=False)
    console.out(CONVENTION, end="", highlight=False)


if __name__ == "__main__":
    main()
