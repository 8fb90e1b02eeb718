"""Which preset for which work: held-out loss, peak and processor time of presets, over seeds.

    python -m experiments.choice                      every small task, way and seed; the same call
                                                      goes on where it stopped
    python -m experiments.choice tasks=gpt variants=plain,balanced seeds=0,1
    python -m experiments.choice tasks=gpt_full,vit_full     the full-size twins: a GPU's work
    python -m experiments.choice --table              means and 95% intervals of what is done
    python -m experiments.choice --plot               the same, loss against peak, as a PNG

Other keys: `output=FILE` (outputs/choice.csv), `lr=RATE` and `steps=N` in place of each task's own
(`steps=N,M`: runs of both), `baseline=WAY` of the table's differences (plain), and `curves=FILE`,
into which each step's loss goes of what the call trains; `--plot curves=FILE` draws them.
`checkpointing` is torch's around each repeated block; of a task without such blocks it is `plain`.
`adam8bit` and `adam4bit` need bitsandbytes and torchao.
"""

import statistics
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import memtrain
from experiments.study import KEY, LOSS, Row, Study, descend, groups_of, quality, validate
from experiments.tasks import TASKS
from memtrain.activations.intercept.recompute import blocks_of
from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.measure import measure
from memtrain.audit.peak.timeline import SAVED


def _of_library(module: str, name: str) -> Callable[..., Optimizer]:
    return lambda *args, **options: getattr(import_module(module), name)(*args, **options)


class Way(NamedTuple):
    """A way to train."""

    config: Any = None
    """Of memtrain; None: plain PyTorch."""
    dtype: torch.dtype = torch.float32
    checkpointing: bool = False
    """Whether torch's own is around each repeated block."""
    make: Callable[..., Optimizer] = AdamW


WAYS = {
    "plain": Way(),
    "checkpointing": Way(checkpointing=True),
    "adam8bit": Way(make=_of_library("bitsandbytes.optim", "AdamW8bit")),
    "adam4bit": Way(make=_of_library("torchao.optim", "AdamW4bit")),
    "optimizer_only": Way("optimizer_only"),
    "activations_only": Way("activations_only"),
    "balanced": Way("balanced"),
    "balanced_8bit": Way(["preset=balanced", "optim=factored_8bit"]),
    "balanced_rank1": Way(["preset=balanced", "optim=rank1_4bit"]),
    "lora": Way("lora"),
    "smallest": Way("smallest"),
    "checkpointed": Way("checkpointed"),
    "plain_bf16": Way(dtype=torch.bfloat16),
    "all_four": Way("all_four", torch.bfloat16),
    "all_four_2bit": Way("all_four_2bit", torch.bfloat16),
}
"""Name -> what it is."""
MEASURED = ("peak_mib", "saved_mib", "step_ms", "recomputed_blocks", "torch", "memtrain", "threads")


def train(
    ways: Mapping[str, Way],
    told: Callable[[Way, nn.Module], Row] | None,
    name: str,
    variant: str,
    seed: int,
    lr: float,
    steps: int,
) -> Row:
    """Train one run, on CUDA where there is one.

    Args:
        ways: By name.
        told: What a way's trained model tells besides, by column.
        name: Of `experiments.tasks.TASKS`.
        variant: Of `ways`.
        seed: Of the data's split and order, and of the weights.
        lr: The highest learning rate.
        steps: So many.

    Returns:
        What the run's line says besides `KEY`: the peak, and the most of saved activations, are of
        live storages in a second step, the time is the median of all steps' processor times.
    """
    task, way = TASKS[name], ways[variant]
    source = task.source(seed)
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = task.model().to(device, way.dtype)
    blocks = _checkpoint(model) if way.checkpointing else 0
    options = {"lr": lr, "betas": (0.9, 0.99), "weight_decay": task.weight_decay}
    optimizer: Any = way.make(groups_of(model), **options)
    batch = partial(_batch, source, size=task.batch, device=device, dtype=way.dtype)
    inputs, targets = batch(0)
    loss = partial(_loss, targets=targets.flatten())
    timeline = measure(model, optimizer, inputs, way.config, StepOptions(loss=loss))
    adapt = None
    if way.config is not None:
        model, optimizer = memtrain.wrap(model, optimizer, way.config)
        plan = memtrain.plan_of(model)
        if plan.bits is not None and plan.config.activations.sensitivity == "passes":
            adapt = memtrain.adapter(model).step
    losses, seconds = descend(model, optimizer, batch, peak=lr, steps=steps, adapt=adapt)
    row = quality(validate(model, source), losses) | {
        "peak_mib": timeline.peak.nbytes / 2**20,
        "saved_mib": max(moment.parts.get(SAVED, 0) for moment in timeline.moments) / 2**20,
        "step_ms": 1e3 * statistics.median(seconds),
        "recomputed_blocks": blocks,
        "torch": torch.__version__,
        "memtrain": memtrain.__version__,
        "threads": torch.get_num_threads(),
    }
    return row | (told(way, model) if told else {})


def _checkpoint(model: nn.Module) -> int:
    """Put torch's checkpointing around the repeated blocks; how many there are."""
    blocks = [model.get_submodule(path) for path in blocks_of(model)]
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return len(blocks)


def _batch(
    source: Any, step: int, *, size: int, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    inputs, targets = (x.to(device) for x in source.batch("train", step, size))
    return inputs.to(dtype) if inputs.is_floating_point() else inputs, targets


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets)


def study(  # noqa: PLR0913 - each is a field of a study
    about: str,
    ways: Mapping[str, Way],
    tasks: tuple[str, ...],
    output: str,
    cost: str,
    *,
    baseline: str = "plain",
    told: Callable[[Way, nn.Module], Row] | None = None,
    columns: Mapping[str, str] = MappingProxyType({}),
) -> Study:
    """A study of ways to train.

    Args:
        about: Printed where a call is wrong.
        ways: By name, `baseline` among them.
        tasks: That a call without `tasks=` trains.
        output: The CSV file.
        cost: The column that the plot is over, and that beside the step time tells what is beaten.
        baseline: The way that differences are from.
        told: What a way's trained model tells besides.
        columns: Of what is told, and the formats of their means.
    """
    return Study(
        about=about,
        tasks=tasks,
        variants=tuple(ways),
        baseline=baseline,
        train=partial(train, ways, told),
        columns=(*KEY, LOSS, "accuracy", "train_loss", *MEASURED, *columns),
        shown={"accuracy": ".4f", "peak_mib": ".2f", "saved_mib": ".3f", "step_ms": ".1f"}
        | dict(columns),
        costs=(cost, "step_ms"),
        output=Path(output),
    )


STUDY = study(
    str(__doc__),
    WAYS,
    ("digits", "vit", "gpt", "encoder", "lora", "unet3d"),
    "outputs/choice.csv",
    "peak_mib",
)


if __name__ == "__main__":
    sys.exit(STUDY.main(sys.argv[1:]))
