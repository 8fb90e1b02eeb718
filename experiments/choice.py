"""Compare presets and compressors: held-out loss, peak and processor time over seeds.

    python -m experiments.choice                      every small task, preset and seed; the same
                                                      call continues where it stopped
    python -m experiments.choice tasks=gpt variants=plain,balanced seeds=0,1
    python -m experiments.choice tasks=digits variants=plain,actnn_l3,gact4 output=FILE
    python -m experiments.choice tasks=gpt_full,lora_full     full-size tasks: a GPU's work
    python -m experiments.choice --table              means and 95% intervals of what is done

Other keys: `output=FILE` (outputs/choice.csv), `lr=RATE` and `steps=N` in place of each task's own
(`steps=N,M`: runs of both), and `baseline=VARIANT` for the table's differences (plain).

`checkpointing` is torch's around each repeated block; on a task without such blocks it equals
`plain`. `adam8bit` and `adam4bit` need bitsandbytes and torchao.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import memtrain
from experiments.seeds import Seeds, by_run, difference, markdown, mean, paired
from experiments.study import LOSS, Row, append, descend, groups_of, quality, read, validate
from experiments.tasks import TASKS
from memtrain.activations.intercept.recompute import blocks_of
from memtrain.audit.live_storages import saved_nbytes
from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.measure import measure


def _library(module: str, name: str) -> Callable[..., Optimizer]:
    return lambda *args, **options: getattr(import_module(module), name)(*args, **options)


class Variant(NamedTuple):
    """A way to train a task."""

    config: Any = None
    """memtrain's config; None: unmodified PyTorch."""
    dtype: torch.dtype = torch.float32
    checkpointing: bool = False
    """Whether torch's checkpointing is around each repeated block."""
    make: Callable[..., Optimizer] = AdamW


PRESETS = {
    "plain": Variant(),
    "checkpointing": Variant(checkpointing=True),
    "adam8bit": Variant(make=_library("bitsandbytes.optim", "AdamW8bit")),
    "adam4bit": Variant(make=_library("torchao.optim", "AdamW4bit")),
    "optimizer_only": Variant("optimizer_only"),
    "activations_only": Variant("activations_only"),
    "balanced": Variant("balanced"),
    "balanced_8bit": Variant(["preset=balanced", "optim=factored_8bit"]),
    "balanced_rank1": Variant(["preset=balanced", "optim=rank1_4bit"]),
    "lora": Variant("lora"),
    "smallest": Variant("smallest"),
    "checkpointed": Variant("checkpointed"),
    "plain_bf16": Variant(dtype=torch.bfloat16),
    "all_four": Variant("all_four", torch.bfloat16),
    "all_four_2bit": Variant("all_four_2bit", torch.bfloat16),
}
"""Trained by a call without `variants=`."""
VARIANTS = {
    **PRESETS,
    "actnn_l2": Variant("actnn_l2"),
    "actnn_l3": Variant("actnn_l3"),
    "actnn_l3_uniform": Variant(["preset=actnn_l3", "activations.adapt_interval=1000000"]),
    "gact4": Variant("gact4"),
    "gact2": Variant(["preset=gact4", "activations.average_bits=2"]),
}
"""Name -> variant."""
KEY = ("task", "variant", "seed", "lr", "steps")
"""The columns that identify a run, in the order of `train`'s arguments."""
MEASURED = ("peak_mib", "saved_mib", "step_ms", "recomputed_blocks", "torch", "memtrain", "threads")


def train(name: str, variant: str, seed: int, lr: float, steps: int) -> Row:
    """Train one run, on CUDA where there is one.

    Args:
        name: A key of `experiments.tasks.TASKS`.
        variant: A key of `VARIANTS`.
        seed: Seeds the data's split and order, and the weights.
        lr: The highest learning rate.
        steps: Number of steps.

    Returns:
        The row's columns besides `KEY`. The peak counts live storages in a second step, and saved
        activations those after a forward; the time is the median of all steps' processor times.
    """
    task, chosen = TASKS[name], VARIANTS[variant]
    source = task.source(seed)
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = task.model().to(device, chosen.dtype).train()  # a pre-trained one is in eval mode
    blocks = _checkpoint(model) if chosen.checkpointing else 0
    options = {"lr": lr, "betas": (0.9, 0.99), "weight_decay": task.weight_decay}
    optimizer: Any = chosen.make(groups_of(model), **options)
    batch = partial(_batch, source, size=task.batch, device=device, dtype=chosen.dtype)
    inputs, targets = batch(0)
    loss = partial(_loss, targets=targets.flatten())
    timeline = measure(model, optimizer, inputs, chosen.config, StepOptions(loss=loss))
    adapt = None
    if chosen.config is not None:
        model, optimizer = memtrain.wrap(model, optimizer, chosen.config)
        plan = memtrain.plan_of(model)
        if plan.bits is not None and plan.config.activations.sensitivity == "passes":
            adapt = memtrain.adapter(model).step
    losses, seconds = descend(model, optimizer, batch, peak=lr, steps=steps, adapt=adapt)
    saved, _ = saved_nbytes(lambda: loss(model.train()(inputs)), exclude=(inputs, targets))
    return quality(validate(model, source), losses) | {
        "peak_mib": timeline.peak.nbytes / 2**20,
        "saved_mib": saved / 2**20,
        "step_ms": 1e3 * statistics.median(seconds),
        "recomputed_blocks": blocks,
        "torch": torch.__version__,
        "memtrain": memtrain.__version__,
        "threads": torch.get_num_threads(),
    }


def _checkpoint(model: nn.Module) -> int:
    """Put torch's checkpointing around the repeated blocks; return their number."""
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


SMALL = ("digits", "vit", "gpt", "encoder", "lora", "unet3d")
"""Tasks that a call without `tasks=` trains."""
COLUMNS = (*KEY, LOSS, "accuracy", "train_loss", *MEASURED)
"""Columns of the file."""
SHOWN = {LOSS: ".4f", "accuracy": ".4f", "peak_mib": ".2f", "saved_mib": ".3f", "step_ms": ".1f"}
"""Columns whose mean the table shows, and their format."""
COSTS = ("peak_mib", "step_ms")
"""Columns of which less is better."""
OPTIONS = {
    "tasks": ",".join(SMALL),
    "variants": ",".join(PRESETS),
    "seeds": "0,1,2,3,4",
    "lr": "",
    "steps": "",
    "baseline": "plain",
    "output": "outputs/choice.csv",
}


def main(arguments: Sequence[str]) -> int:
    """Read the command line and run, or print the table; return the exit status."""
    given = dict(item.split("=", 1) for item in arguments if "=" in item)
    other = [item for item in arguments if "=" not in item and item != "--table"]
    if unknown := [*other, *(given.keys() - OPTIONS)]:
        _say(f"unknown: {', '.join(unknown)}; allowed: --table, {', '.join(OPTIONS)}\n{__doc__}")
        return 2
    values = OPTIONS | given
    tasks, variants, seeds = (values[key].split(",") for key in ("tasks", "variants", "seeds"))
    for names, known in ((tasks, TASKS), ([*variants, values["baseline"]], VARIANTS)):
        if wrong := [name for name in names if name not in known]:
            _say(f"unknown: {', '.join(wrong)}; allowed: {', '.join(known)}")
            return 2
    output = Path(values["output"])
    if "--table" in arguments:
        rows = [row for row in read(output) if row["task"] in tasks and row["variant"] in variants]
        _say("\n".join(table(rows, values["baseline"])))
        return 0
    done = {tuple(row[name] for name in KEY) for row in read(output)}
    for seed, name, variant in product(map(int, seeds), tasks, variants):  # complete seeds first
        rate = float(values["lr"] or TASKS[name].lr)
        for steps in (values["steps"] or str(TASKS[name].steps)).split(","):
            cell = (name, variant, seed, rate, int(steps))
            if tuple(map(str, cell)) not in done:
                row = dict(zip(KEY, cell, strict=True)) | train(*cell)
                append(output, COLUMNS, row)
                means = ", ".join(f"{row[name]:{form}} {name}" for name, form in SHOWN.items())
                _say(f"{' '.join(map(str, cell))}: {means}")
    return 0


def table(rows: Sequence[dict[str, str]], baseline: str = "plain") -> list[str]:
    """Return lines of Markdown: means over seeds, and loss differences from a baseline.

    Differences are computed seed by seed, with a 95% interval. A variant is beaten by one that
    costs no more in any column of `COSTS`, less in one, and whose mean loss over the seeds of both
    is no higher.
    """
    heads = ["task", "lr", "variant", "seeds", *SHOWN, f"minus {baseline}", "beaten by"]
    cells = [
        (
            f"{task}, {steps} steps",
            lr,
            variant,
            str(len(seeds)),
            *(f"{mean(seeds, name):{form}}" for name, form in SHOWN.items()),
            difference(seeds, variants.get(baseline, {}), LOSS),
            ", ".join(name for name, one in variants.items() if _beats(one, seeds)),
        )
        for (task, lr, steps), variants in by_run(rows, ("task", "lr", "steps")).items()
        for variant, seeds in variants.items()
    ]
    return markdown([head.replace("_", " ") for head in heads], cells)


def _beats(one: Seeds, other: Seeds) -> bool:
    mine, theirs = ([mean(seeds, name) for name in COSTS] for seeds in (one, other))
    cheaper = mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))
    differences = paired(one, other, LOSS)
    return cheaper and bool(differences) and statistics.mean(differences) <= 0


def _say(text: str) -> None:
    Console(soft_wrap=True, highlight=False, markup=False).print(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
