"""Derivatives of few bits, trained to the end: against exact ones, and against ActNN at equal bits.

    python -m experiments derivatives                 every task, way and seed of
                                                      configs/experiment/derivatives.yaml; the same
                                                      call goes on where it stopped
    python -m experiments derivatives_full            full-size twins: a GPU's work
    python -m experiments.derivatives tasks=digits_gelu variants=plain,fewbit2 seeds=0,1
    python -m experiments.derivatives --table         means and 95% intervals of what is done

Of `fewbitN` and `actnnN` the nonlinearities alone hold N bits: a code of the derivative, or of the
input, in groups of 256 that are rounded stochastically and have two ends besides (an eighth of a
bit a value). Of `actnn4_fewbit2` and `actnn4_actnn2` the rest is held in ActNN's 4-bit groups.
Other keys are those of `experiments.choice`. The optimizer is float32 AdamW throughout.
"""

import sys

from experiments.choice import Way, study


def _way(preset: str, name: str, bits: int) -> Way:
    """A preset whose first rule, the nonlinearities', is that compressor; nothing is derived."""
    first = f"activations.rules.0.compressor={{name:{name},bits:{bits}}}"
    return Way([f"preset={preset}", first, "activations.derive_outputs=false"])


WAYS = {
    "plain": Way(),
    **{f"fewbit{bits}": _way("fewbit3", "derivative", bits) for bits in (1, 2, 3, 4)},
    **{f"actnn{bits}": _way("fewbit3", "group", bits) for bits in (1, 2, 3, 4)},
    "actnn4_fewbit2": _way("actnn_fewbit", "derivative", 2),
    "actnn4_actnn2": _way("actnn_fewbit", "group", 2),
}
"""Name -> what it is."""

STUDY = study(
    str(__doc__),
    WAYS,
    ("digits_gelu", "digits_silu", "digits_selu", "encoder", "verses"),
    "outputs/derivatives.csv",
    "saved_mib",
)

if __name__ == "__main__":
    sys.exit(STUDY.main(sys.argv[1:]))
