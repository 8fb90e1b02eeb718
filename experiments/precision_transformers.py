"""Precision assignments of transformers, trained from scratch over seeds; FP8 GEMMs besides.

    python -m experiments precision_transformers      every task, way and seed of
                                                      configs/experiment/precision_transformers.yaml;
                                                      the same call goes on where it stopped
    python -m experiments precision_transformers_full a GPU's work
    python -m experiments.precision_transformers tasks=gpt variants=fp32,uniform lr=2e-2 seeds=0,1
    python -m experiments.precision_transformers --table    means and 95% intervals of what is done

Ways promote what overflows, but for `..._no_promotion`; `..._fp8_gemm` runs linear layers whose
input and weight are low on the device's FP8 GEMMs. `uniform` is `size_ordered` at a ratio of 1.
Where nothing was promoted, the run without promotion is the same run. Other keys are those of
`experiments.choice`. The optimizer is float32 AdamW throughout.
"""

import sys
from itertools import product

from torch import nn

import memtrain
from experiments.choice import Way, study
from experiments.study import Row

_RATIOS = {"size_ordered": (0.0, 0.4, 0.6, 0.8), "increasing": (0.4, 0.6)}
_ASSIGNMENTS = {
    **{
        f"{name}_{ratio:g}": [f"precision.assignment={name}", f"precision.ratio={ratio}"]
        for name, ratios in _RATIOS.items()
        for ratio in ratios
    },
    **{name: [f"precision={name}"] for name in ("uniform", "operator", "operator_out")},
}
_PROMOTION = {"": "0.01", "_no_promotion": "null"}
_GEMMS = {"": "false", "_fp8_gemm": "true"}

WAYS = {
    "fp32": Way(),
    **{
        name + promotion + gemms: Way(
            [
                "preset=precision_only",
                *assignment,
                f"precision.promotion={_PROMOTION[promotion]}",
                f"precision.fp8_gemm={_GEMMS[gemms]}",
            ]
        )
        for gemms, promotion in product(_GEMMS, _PROMOTION)
        for name, assignment in _ASSIGNMENTS.items()
    },
}
"""Name -> what it is."""
COLUMNS = {
    "low_ratio": ".3f",
    "aggregate": ".3f",
    "promoted": ".1f",
    "overflows": ".1f",
    "fp8_layers": ".0f",
    "halved": ".0f",
}
"""Columns that a trained model tells, and the formats of their means over seeds."""


def told(way: Way, model: nn.Module) -> Row:
    """The low-precision ratio, and what became of tensors, steps and GEMMs.

    Args:
        way: Of `WAYS`.
        model: Trained.

    Returns:
        `COLUMNS`: `low_ratio` is a mean over the steps; `aggregate` the bits of all tensors of
        training, gradients among them, to those of float32; `overflows` are skipped steps;
        `fp8_layers` linear layers on FP8 GEMMs, `halved` their operands that lost a bit.
    """
    if way.config is None:
        return dict.fromkeys(COLUMNS, 0) | {"aggregate": 1.0}
    state = memtrain.precision_state(model)
    if state.graph is None:
        raise ValueError("the model has not run")
    return {
        "low_ratio": state.average_ratio,
        "aggregate": state.bits / (32 * state.graph.elements),
        "promoted": len(state.promotions),
        "overflows": state.scale.overflows,
        "fp8_layers": sum(not why for why in state.gemms.values()),
        "halved": state.halved,
    }


STUDY = study(
    str(__doc__),
    WAYS,
    ("gpt", "vit"),
    "outputs/precision_transformers.csv",
    "aggregate",
    baseline="fp32",
    told=told,
    columns=COLUMNS,
)

if __name__ == "__main__":
    sys.exit(STUDY.main(sys.argv[1:]))
