"""Which preset for which work: held-out loss, peak and processor time of presets, over seeds.

    python -m experiments.choice                      every task, way and seed; the same call goes
                                                      on where it stopped
    python -m experiments.choice tasks=gpt variants=plain,balanced seeds=0,1
    python -m experiments.choice --table              means and 95% intervals of what is done

Other keys: `output=FILE` (outputs/choice.csv), `lr=RATE` and `steps=N` in place of each task's own.
`checkpointing` is torch's around each repeated block; tasks without such blocks go without it.
"""

import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

import memtrain
from experiments.study import KEY, LOSS, TASKS, Row, Study, descend, groups_of, quality, validate
from memtrain.activations.intercept.recompute import blocks_of
from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.measure import measure


class Way(NamedTuple):
    """A way to train: a preset of memtrain's, the weights' dtype, torch's checkpointing."""

    preset: str = ""
    dtype: torch.dtype = torch.float32
    checkpointing: bool = False


WAYS = {
    "plain": Way(),
    "checkpointing": Way(checkpointing=True),
    "optimizer_only": Way("optimizer_only"),
    "balanced": Way("balanced"),
    "smallest": Way("smallest"),
    "checkpointed": Way("checkpointed"),
    "plain_bf16": Way(dtype=torch.bfloat16),
    "all_four": Way("all_four", torch.bfloat16),
    "all_four_2bit": Way("all_four_2bit", torch.bfloat16),
}
"""Name -> what it is."""
MEASURED = ("peak_mib", "step_ms", "recomputed_blocks", "torch", "memtrain", "threads")


def train(name: str, variant: str, seed: int, lr: float, steps: int) -> Row:
    """Train one run.

    Args:
        name: Of `experiments.study.TASKS`.
        variant: Of `WAYS`.
        seed: Of the data's split and order, and of the weights.
        lr: The highest learning rate.
        steps: So many.

    Returns:
        What the run's line says besides `KEY`: the peak is of live storages in a second step, the
        time the median of all steps' processor times.
    """
    task, way = TASKS[name], WAYS[variant]
    source = task.source(seed)
    torch.manual_seed(seed)
    model = task.model().to(way.dtype)
    blocks = blocks_of(model) if way.checkpointing else []
    for path in blocks:
        block = model.get_submodule(path)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    optimizer: Any = AdamW(
        groups_of(model), lr=lr, betas=(0.9, 0.99), weight_decay=task.weight_decay
    )
    config = [f"preset={way.preset}"] if way.preset else None
    inputs, targets = _batch(source, 0, size=task.batch, dtype=way.dtype)
    loss = partial(_loss, targets=targets.flatten())
    peak = measure(model, optimizer, inputs, config, StepOptions(loss=loss)).peak.nbytes
    if config is not None:
        model, optimizer = memtrain.wrap(model, optimizer, config)
    batch = partial(_batch, source, size=task.batch, dtype=way.dtype)
    losses, seconds = descend(model, optimizer, batch, peak=lr, steps=steps)
    return quality(validate(model, source), losses) | {
        "peak_mib": peak / 2**20,
        "step_ms": 1e3 * statistics.median(seconds),
        "recomputed_blocks": len(blocks),
        "torch": torch.__version__,
        "memtrain": memtrain.__version__,
        "threads": torch.get_num_threads(),
    }


def _batch(source: Any, step: int, *, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    inputs, targets = source.batch("train", step, size)
    return inputs.to(dtype) if inputs.is_floating_point() else inputs, targets


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets)


STUDY = Study(
    about=str(__doc__),
    variants=tuple(WAYS),
    baseline="plain",
    train=train,
    columns=(*KEY, LOSS, "accuracy", "train_loss", *MEASURED),
    shown={"accuracy": ".4f", "peak_mib": ".2f", "step_ms": ".1f"},
    output=Path("outputs/choice.csv"),
)


if __name__ == "__main__":
    sys.exit(STUDY.main(sys.argv[1:]))
