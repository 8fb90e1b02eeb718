"""Short runs: training, held-out loss, and rows of one CSV file."""

import csv
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.corpus import Text
from experiments.tasks import Images
from memtrain.training.recipe import learning_rate

Row = dict[str, Any]
LOSS = "validation_loss"


@torch.no_grad()
def validate(model: nn.Module, source: Images | Text) -> tuple[float, float]:
    """Return loss and accuracy on all held-out images, or on 40 batches of 16 held-out texts."""
    model.eval()
    batches: Iterable[tuple[Tensor, Tensor]]
    if isinstance(source, Images):
        batches = [source.parts["validation"]]
    else:
        batches = [source.batch("validation", index, 16) for index in range(40)]
    like = next(model.parameters())
    losses, hits = [], []
    for inputs, classes in batches:
        x, targets = inputs.to(like.device), classes.to(like.device)
        x = x.to(like.dtype) if x.is_floating_point() else x
        logits = model(x).flatten(0, -2).float()
        losses.append(nn.functional.cross_entropy(logits, targets.flatten()).item())
        hits.append((logits.argmax(1) == targets.flatten()).float().mean().item())
    return sum(losses) / len(losses), sum(hits) / len(hits)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices with weight decay, vectors without."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of a model's logits, mean over the targets."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def descend(
    model: nn.Module,
    optimizer: Any,
    batch: Callable[[int], tuple[Tensor, Tensor]],
    *,
    peak: float,
    steps: int,
    adapt: Callable[[Callable[[], object]], object] | None = None,
) -> tuple[list[float], list[float]]:
    """Train for a number of steps.

    Args:
        model: Unmodified or wrapped.
        optimizer: Its optimizer.
        batch: Maps a step to its inputs and targets.
        peak: The highest learning rate, after 20 steps of warm-up.
        steps: Number of steps.
        adapt: Called before each step with its forward and backward, untimed: GACT's measurements.

    Returns:
        The loss of each step, and the processor time of each step in seconds.
    """
    losses, seconds = [], []
    for step in range(steps):
        rate = learning_rate(step, peak=peak, warmup=20, steps=steps, final=0.05)
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # torchao's
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        inputs = batch(step)
        if adapt:
            adapt(lambda inputs=inputs: loss_of(model, inputs).backward())
        started = time.process_time()
        optimizer.zero_grad()
        loss = loss_of(model, inputs)
        loss.backward()
        optimizer.step()
        seconds.append(time.process_time() - started)
        losses.append(loss.item())
    return losses, seconds


def quality(held_out: tuple[float, float], losses: Sequence[float]) -> Row:
    """Return the columns of held-out loss and accuracy, and of the last tenth's training loss."""
    last = losses[-max(1, len(losses) // 10) :]
    return {LOSS: held_out[0], "accuracy": held_out[1], "train_loss": sum(last) / len(last)}


def read(output: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file; none where there is no file."""
    if not output.exists():
        return []
    with output.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def append(path: Path, columns: Sequence[str], row: Row) -> None:
    """Add a row to a CSV file, and the heads to a new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerow(row)
