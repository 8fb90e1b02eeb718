"""Ways to hold AdamW's second moment in 4 bits: the 4-bit paper's ablation, with unstable runs.

    python -m experiments states_ablation             every task, row and seed of
                                                      configs/experiment/states_ablation.yaml; the
                                                      same call goes on where it stopped
    python -m experiments.states_ablation tasks=digits variants=b128_de,b128_de0 seeds=0,1
    python -m experiments.states_ablation --table     means and 95% intervals of what is done

The first moment is B128/DE in each row but float32's. `unstable` is 1 of a run whose loss is not
finite in some step, or above twice the first step's. `zeroed` is the share of the second moments'
elements above 0 that one more step rounds to 0, in parameters of more than 4,096 elements. Other
keys are those of `experiments.optimizer_states`.
"""

import math
import sys
from pathlib import Path
from typing import Any

import torch

from experiments.optimizer_states import Trained, Variant, descended
from experiments.study import KEY, LOSS, Row, Study, quality, validate
from memtrain.optim import portable_state_dict, state_bytes
from memtrain.optim.states.layout import MIN_ELEMENTS
from memtrain.training.batches import loss_of

UNSTABLE = 2.0
"""A loss above so many times the first step's is unstable."""
SECOND = {
    "b2048_de": "B2048/DE",
    "b128_de": "B128/DE",
    "b128_de_sr": "B128/DE+SR",
    "b2048_de0": "B2048/DE-0",
    "b128_de0": "B128/DE-0",
    "rank1_de0": "Rank-1/DE-0",
    "rank1_linear": "Rank-1/Linear",
    "factored": "factored",
}
"""Row -> the second moment's compressor."""


def _rules(second: str) -> dict[str, Any]:
    return {
        "rules": [
            {"state": "exp_avg_sq", "compressor": second},
            {"state": "exp_avg", "compressor": "B128/DE"},
        ]
    }


VARIANTS = {"fp32": Variant(), **{row: Variant(_rules(name)) for row, name in SECOND.items()}}
"""Row -> how the states are kept."""


def train(name: str, variant: str, seed: int, lr: float, steps: int) -> Row:
    """Train one run; arguments and result are those of `optimizer_states.train`."""
    run = descended(name, VARIANTS[variant], seed, lr, steps)
    parameters = sum(p.numel() for p in run.model.parameters())
    worst = max(math.inf if math.isnan(loss) else loss for loss in run.losses) / run.losses[0]
    return quality(validate(run.model, run.source), run.losses) | {
        "unstable": int(not worst <= UNSTABLE),
        "worst_over_first": worst,
        "bytes_per_parameter": state_bytes(run.optimizer) / parameters,
        "zeroed": zeroed(run, steps),
        "torch": torch.__version__,
    }


def zeroed(run: Trained, step: int) -> float:
    """The share of the second moments' elements that a step makes 0, though they are not.

    Args:
        run: Its next step is made.
        step: Of the batch.
    """
    before = _second_moments(run.optimizer)
    run.optimizer.zero_grad()
    loss_of(run.model, run.batch(step)).backward()
    beta = run.optimizer.param_groups[0]["betas"][1]
    large = [p for g in run.optimizer.param_groups for p in g["params"] if p.numel() > MIN_ELEMENTS]
    exact = [
        beta * old + (1 - beta) * p.grad.square() for old, p in zip(before, large, strict=True)
    ]
    run.optimizer.step()
    lost = held = 0
    for new, kept in zip(exact, _second_moments(run.optimizer), strict=True):
        held += int((new > 0).sum())
        lost += int(((new > 0) & (kept == 0)).sum())
    return lost / max(held, 1)


def _second_moments(optimizer: Any) -> list[torch.Tensor]:
    """Of parameters of more than `MIN_ELEMENTS`, in the groups' order."""
    found = portable_state_dict(optimizer)
    order = [index for group in found["param_groups"] for index in group["params"]]
    moments = [found["state"][index]["exp_avg_sq"] for index in order]
    return [moment for moment in moments if moment.numel() > MIN_ELEMENTS]


STUDY = Study(
    about=str(__doc__),
    tasks=("digits", "gpt_short"),
    variants=tuple(VARIANTS),
    baseline="fp32",
    train=train,
    columns=(
        *(*KEY, LOSS, "accuracy", "train_loss"),
        *("unstable", "worst_over_first", "bytes_per_parameter", "zeroed", "torch"),
    ),
    shown={
        "accuracy": ".4f",
        "unstable": ".2f",
        "zeroed": ".3f",
        "bytes_per_parameter": ".2f",
    },
    costs=("bytes_per_parameter",),
    output=Path("outputs/states_ablation.csv"),
)

if __name__ == "__main__":
    sys.exit(STUDY.main(sys.argv[1:]))
