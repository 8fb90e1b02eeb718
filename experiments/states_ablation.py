"""Ways to hold AdamW's second moment in 4 bits: the 4-bit paper's ablation, with unstable runs.

    python -m experiments states_ablation             every task, row and seed of
                                                      configs/experiment/states_ablation.yaml; the
                                                      same call goes on where it stopped
    python -m experiments.states_ablation tasks=digits variants=b128_de,b128_de0 seeds=0,1
    python -m experiments.states_ablation --table     means and 95% intervals of what is done

The first moment is B128/DE in each row but float32's. `unstable` is 1 of a run whose loss is not
finite in some step, or above twice the first step's. `zeroed` is the share of the elements of
float32 AdamW's second moments, at the end of its run of the same seed, that the row's compressor
rounds to 0 though they are not, in parameters of more than 4,096 elements. Other keys are those of
`experiments.optimizer_states`.
"""

import math
import sys
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.optimizer_states import Variant, descended
from experiments.study import KEY, LOSS, Row, Study, quality, validate
from memtrain.optim import portable_state_dict, state_bytes
from memtrain.optim.states.layout import MIN_ELEMENTS

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
        "zeroed": zeroed(name, variant, seed, lr, steps),
        "torch": torch.__version__,
    }


def zeroed(name: str, variant: str, seed: int, lr: float, steps: int) -> float:
    """The share of float32 AdamW's second moments that a row rounds to 0, though they are not."""
    exact, held = second_moments(name, variant, seed, lr, steps)
    return int((held == 0).sum()) / len(exact)


def second_moments(
    name: str, variant: str, seed: int, lr: float, steps: int
) -> tuple[Tensor, Tensor]:
    """Second moments of a run of float32 AdamW, and what a row holds in place of them.

    Args:
        name: As `optimizer_states.train`'s, like all but the next.
        variant: Of `VARIANTS`: the row.
        seed: Of the run.
        lr: Of the run.
        steps: After so many.

    Returns:
        The elements above 0 of parameters of more than 4,096 elements, float32 [n], and the same
        as the row's compressor gives them back.
    """
    exact = _float32_states(name, seed, lr, steps)
    optimizer = descended(name, VARIANTS[variant], seed, lr, steps=0).optimizer
    optimizer.load_state_dict(deepcopy(exact))  # compresses them
    found: list[tuple[Tensor, Tensor]] = []
    for index, state in portable_state_dict(optimizer)["state"].items():
        moment = exact["state"][index]["exp_avg_sq"]
        if moment.numel() > MIN_ELEMENTS:
            found.append((moment[moment > 0], state["exp_avg_sq"][moment > 0]))
    moments, held = zip(*found, strict=True)
    return torch.cat(moments), torch.cat(held)


@lru_cache(maxsize=1)
def _float32_states(name: str, seed: int, lr: float, steps: int) -> dict[str, Any]:
    """The state dict that float32 AdamW ends with."""
    return descended(name, VARIANTS["fp32"], seed, lr, steps).optimizer.state_dict()


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
