"""Saved activations of few bits, trained to the end: ActNN's 2 bits, GACT's, and 4x4 patches.

    python -m experiments.few_bits                    every way and seed on digits; the same call
                                                      goes on where it stopped
    python -m experiments.few_bits tasks=gpt lr=1e-3 variants=plain,actnn_l3,gact4 steps=50,400
                                                      runs of 50 steps, and runs of 400
    python -m experiments.few_bits --table            means and 95% intervals of what is done

Other keys are those of `experiments.choice`. The optimizer is float32 AdamW throughout. Patches and
`group16_2bit`, `group32_3bit` hold what convolutions and max-pools read in 4 bits a value, ends
included; `group256_4bit` takes 3% more.
"""

import sys
from typing import Any

from experiments.choice import Way, study

_SIGNS = {"op": "@piecewise", "compressor": {"name": "derivative", "bits": 1}}


def _maps(name: str, **options: Any) -> Way:
    """The inputs of convolutions and max-pools, held by a compressor; ReLU's signs, and no more."""
    where = {"op": "conv2d|max_pool2d", "tensor": "input"}
    rules = [{**where, "compressor": {"name": name, **options}}, _SIGNS]
    return Way({"preset": "exact", "activations": {"rules": rules}})


WAYS = {
    "plain": Way(),
    "actnn_l2": Way("actnn_l2"),
    "actnn_l3": Way("actnn_l3"),
    "actnn_l3_uniform": Way(["preset=actnn_l3", "activations.adapt_interval=1000000"]),
    "gact4": Way("gact4"),
    "gact2": Way(["preset=gact4", "activations.average_bits=2"]),
    "patch_nearest": _maps("patch", rounding="nearest"),
    "patch_stochastic": _maps("patch", rounding="stochastic"),
    "group16_2bit": _maps("group", bits=2, group_size=16),
    "group32_3bit": _maps("group", bits=3, group_size=32),
    "group256_4bit": _maps("group", bits=4, group_size=256),
}
"""Name -> what it is; groups round stochastically."""

STUDY = study(str(__doc__), WAYS, ("digits",), "outputs/few_bits.csv", "saved_mib")

if __name__ == "__main__":
    sys.exit(STUDY.main(sys.argv[1:]))
