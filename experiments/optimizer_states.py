"""Optimizer states of fewer and fewer bits, trained with over seeds: run after run into one CSV.

    python -m experiments.optimizer_states            every task, variant and seed; the same call
                                                      goes on where it stopped
    python -m experiments.optimizer_states tasks=digits variants=fp32,factored_2bit seeds=0,1
    python -m experiments.optimizer_states --table    means and 95% intervals of what is done

Other keys: `output=FILE` (outputs/optimizer_states.csv), `lr=RATE` and `steps=N` in place of each
task's own. A line of the file is one run; an interrupted run leaves none.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import AdamW, Optimizer

import memtrain
from experiments.study import KEY, LOSS, Row, Study, descend, groups_of, quality, validate
from experiments.tasks import TASKS
from memtrain.optim import Lion, state_bytes


class Variant(NamedTuple):
    """An optimizer, and how its states are kept: options of the config group `optim`, or rules."""

    optim: Any = ""
    betas: tuple[float, float] = (0.9, 0.99)
    make: Callable[..., Optimizer] = AdamW
    rate: float = 1.0
    """Its learning rate, times the task's; its weight decay is divided by it."""


_EXACT = {"state": "exp_avg", "compressor": "identity"}
_FACTORED = {"state": "exp_avg_sq", "compressor": "factored"}
_8BIT = {"state": "exp_avg|exp_avg_sq", "compressor": "B256/DE8"}
VARIANTS = {
    "fp32": Variant(),
    "factored_exact_moment": Variant({"rules": [_FACTORED, _EXACT]}),
    "no_momentum": Variant({"rules": [_FACTORED, _EXACT]}, betas=(0.0, 0.99)),
    "8bit": Variant({"rules": [_8BIT]}),
    "rank1_4bit": Variant("rank1_4bit"),
    "factored_8bit": Variant("factored_8bit"),
    "factored_4bit": Variant("factored_4bit"),
    "factored_2bit": Variant("factored_2bit"),
    "lion": Variant(betas=(0.9, 0.99), make=Lion, rate=0.2),
    "lion_4bit": Variant("factored_4bit", betas=(0.9, 0.99), make=Lion, rate=0.2),
}
"""Name of a variant -> what it is. 4-bit AdamW of the paper is `rank1_4bit`."""


def train(name: str, variant: str, seed: int, lr: float, steps: int) -> Row:
    """Train one run.

    Args:
        name: Of `experiments.tasks.TASKS`.
        variant: Of `VARIANTS`.
        seed: Of the data's split and order, and of the weights.
        lr: The highest learning rate, of AdamW.
        steps: So many.

    Returns:
        What the run's line says besides `KEY`.
    """
    task, own = TASKS[name], VARIANTS[variant]
    started = time.perf_counter()
    source = task.source(seed)
    torch.manual_seed(seed)
    model = task.model()
    optimizer: Any = own.make(
        groups_of(model),
        lr=lr * own.rate,
        betas=own.betas,
        weight_decay=task.weight_decay / own.rate,
    )
    if own.optim:
        chosen = own.optim
        config = ["preset=optimizer_only", f"optim={chosen}"]
        if isinstance(chosen, dict):
            config = {"preset": "exact", "optim": chosen}
        model, optimizer = memtrain.wrap(model, optimizer, config)
    batch = partial(source.batch, "train", size=task.batch)
    losses, _ = descend(model, optimizer, batch, peak=lr * own.rate, steps=steps)
    return quality(validate(model, source), losses) | {
        "bytes_per_parameter": state_bytes(optimizer) / sum(p.numel() for p in model.parameters()),
        "seconds": time.perf_counter() - started,
        "torch": torch.__version__,
    }


STUDY = Study(
    about=str(__doc__),
    tasks=("digits", "gpt"),
    variants=tuple(VARIANTS),
    baseline="fp32",
    train=train,
    columns=(*KEY, LOSS, "accuracy", "train_loss", "bytes_per_parameter", "seconds", "torch"),
    shown={"accuracy": ".4f", "bytes_per_parameter": ".2f"},
    costs=("bytes_per_parameter",),
    output=Path("outputs/optimizer_states.csv"),
)


if __name__ == "__main__":
    sys.exit(STUDY.main(sys.argv[1:]))
