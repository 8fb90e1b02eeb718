"""Optimizer states of fewer and fewer bits, trained with over seeds: run after run into one CSV.

    python -m experiments optimizer_states            every task, variant and seed of
                                                      configs/experiment/optimizer_states.yaml; the
                                                      same call goes on where it stopped
    python -m experiments optimizer_states study.seeds=[0,1] study.variants=[fp32,factored_2bit]
    python -m experiments optimizer_states_full       full-size twins: a GPU's work
    python -m experiments.optimizer_states tasks=digits variants=fp32,factored_2bit seeds=0,1
    python -m experiments.optimizer_states --table    means and 95% intervals of what is done

The first form writes <output.folder>/optimizer_states.csv. The keys of the other form besides:
`output=FILE` (outputs/optimizer_states.csv), `lr=RATE` and `steps=N` in place of each task's own,
`baseline=VARIANT`. A line of the file is one run; an interrupted run leaves none.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Optimizer

import memtrain
from experiments.moment_codes import FORMS, SimulatedAdamW
from experiments.study import (
    KEY,
    LOSS,
    Row,
    Study,
    descend,
    groups_of,
    quality,
    validate,
)
from experiments.tasks import TASKS
from memtrain.optim import Lion, state_bytes
from memtrain.training.data import Images, Text


class Variant(NamedTuple):
    """An optimizer, and how its states are kept: options of the config group `optim`, or rules."""

    optim: Any = ""
    betas: tuple[float, float] = (0.9, 0.99)
    make: Callable[..., Optimizer] = AdamW
    rate: float = 1.0
    """Its learning rate, times the task's; its weight decay is divided by it."""
    reset: int = 0
    """Steps after which all states begin anew, again and again; 0: never."""


def _adafactor(params: Any, betas: Any, **options: Any) -> Adafactor:
    """Torch's, which has no first moment and a schedule in place of `betas`."""
    return Adafactor(params, **options)


_EXACT = {"state": "exp_avg", "compressor": "identity"}
_FACTORED = {"state": "exp_avg_sq", "compressor": "factored"}
_8BIT = {"state": "exp_avg|exp_avg_sq", "compressor": "B256/DE8"}
_3BIT = {"state": "exp_avg", "compressor": "B128/DE3"}
_4BIT_SR = {"state": "exp_avg", "compressor": "B128/DE+SR"}
_QUICK = (0.5, 0.99)
_LION_QUICK = (0.9, 0.9)

VARIANTS = {
    "fp32": Variant(),
    "factored_exact_moment": Variant({"rules": [_FACTORED, _EXACT]}),
    "no_momentum": Variant({"rules": [_FACTORED, _EXACT]}, betas=(0.0, 0.99)),
    "8bit": Variant({"rules": [_8BIT]}),
    "rank1_4bit": Variant("rank1_4bit"),
    "factored_8bit": Variant("factored_8bit"),
    "factored_4bit": Variant("factored_4bit"),
    "factored_4bit_reset": Variant("factored_4bit", reset=50),
    "factored_3bit": Variant({"rules": [_FACTORED, _3BIT]}),
    "factored_2bit": Variant("factored_2bit"),
    "adafactor": Variant(make=_adafactor, rate=10.0),  # times the root mean square of a weight
    "lion": Variant(make=Lion, rate=0.2),
    "lion_8bit": Variant({"rules": [_8BIT]}, make=Lion, rate=0.2),
    **{
        f"lion_{bits}bit": Variant(
            {"rules": [{"state": "exp_avg", "compressor": f"B128/DE{bits}"}]}, make=Lion, rate=0.2
        )
        for bits in (6, 5)
    },
    "lion_4bit": Variant("factored_4bit", make=Lion, rate=0.2),
    "lion_4bit_sr": Variant({"rules": [_4BIT_SR]}, make=Lion, rate=0.2),
    "lion_quick": Variant(make=Lion, rate=0.2, betas=_LION_QUICK),
    "lion_4bit_quick": Variant("factored_4bit", make=Lion, rate=0.2, betas=_LION_QUICK),
    "lion_4bit_reset": Variant("factored_4bit", make=Lion, rate=0.2, reset=50),
    **{name: Variant(make=partial(SimulatedAdamW, form=form)) for name, form in FORMS.items()},
    "fp32_beta50": Variant(betas=_QUICK),
    **{
        f"{name}_beta50": Variant(make=partial(SimulatedAdamW, form=FORMS[name]), betas=_QUICK)
        for name in ("de_2bit", "log_2bit")
    },
}
"""Name of a variant -> what it is. 4-bit AdamW of the paper is `rank1_4bit`; those of `FORMS` are
simulated, and their bytes told by formula."""


class Trained(NamedTuple):
    """Results of a run."""

    model: nn.Module
    optimizer: Any
    source: Images | Text
    batch: Callable[[int], tuple[Tensor, Tensor]]
    """Step -> its inputs and targets, where the model is."""
    losses: list[float]
    """Of each step."""


def made(own: Variant, model: nn.Module, lr: float, weight_decay: float) -> tuple[nn.Module, Any]:
    """A model with a variant's optimizer.

    Args:
        own: The variant.
        model: All of it is trained.
        lr: AdamW's; the variant's follows from it.
        weight_decay: AdamW's, alike.

    Returns:
        The model, wrapped where states are compressed, and its optimizer.
    """
    optimizer: Any = own.make(
        groups_of(model),
        lr=lr * own.rate,
        betas=own.betas,
        weight_decay=weight_decay / own.rate,
    )
    if not own.optim:
        return model, optimizer
    # Of a model below the threshold the largest parameter is compressed all the same.
    least = min(4096, max(param.numel() for param in model.parameters()) - 1)
    config: Any = ["preset=optimizer_only", f"optim={own.optim}", f"optim.min_elements={least}"]
    if isinstance(own.optim, dict):
        config = {"preset": "exact", "optim": {**own.optim, "min_elements": least}}
    return memtrain.wrap(model, optimizer, config)


def descended(name: str, own: Variant, seed: int, lr: float, steps: int) -> Trained:
    """Train a task of `experiments.tasks.TASKS` with a variant; the arguments are `train`'s."""
    task = TASKS[name]
    source = task.source(seed)
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = task.model().to(device)
    model, optimizer = made(own, model, lr, task.weight_decay)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = source.batch("train", step, task.batch)
        return inputs.to(device), targets.to(device)

    losses, _ = descend(model, optimizer, batch, peak=lr * own.rate, steps=steps, reset=own.reset)
    return Trained(model, optimizer, source, batch, losses)


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
    started = time.process_time()
    run = descended(name, VARIANTS[variant], seed, lr, steps)
    parameters = sum(p.numel() for p in run.model.parameters())
    simulated = isinstance(run.optimizer, SimulatedAdamW)
    held = run.optimizer.payload_bytes() if simulated else state_bytes(run.optimizer)
    return quality(validate(run.model, run.source), run.losses) | {
        "bytes_per_parameter": held / parameters,
        "seconds": time.process_time() - started,
        "torch": torch.__version__,
    }


STUDY = Study(
    about=str(__doc__),
    tasks=("digits", "gpt_short", "encoder_short"),
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
