"""Rules of the planner: schemes for saved tensors, variants for optimizer states."""

from collections.abc import Mapping

from memtrain.activations.saved.derived import FINE
from memtrain.config.sources import KEEP, ActivationRule, StateRule

LOSSLESS = "lossless"
BALANCED = "balanced"
RECOMPUTED = "recompute"
"""Option of a block: the backward recomputes it from its inputs."""
CODES, GROUPS, ONLY_CODES, ONLY_GROUPS = "codes", "groups", "only codes", "only groups"
SCHEMES = (KEEP, BALANCED, CODES, GROUPS, ONLY_CODES, ONLY_GROUPS)
"""Compressors for each kind of saved tensor. `balanced` is the preset; `codes` gives
derivative codes to nonlinearities and groups to others; `groups` gives groups also to smooth
nonlinearities, so that their outputs are recomputed; `only ...` keeps the rest."""
CODE, SMOOTH, REST = "code", "smooth", "rest"
"""Widths of derivative codes, of groups for smooth nonlinearities, and of other groups."""
DEFAULT: Mapping[str, int] = {CODE: 3, SMOOTH: 5, REST: 4}
"""Kind of code -> its bits, 1 to 8: the preset `balanced`'s."""
NARROW: Mapping[str, int] = {CODE: 1, SMOOTH: FINE, REST: 1}
"""The fewest bits; with the default, two points on the line of bytes over bits."""

TORCH, BITS8, BITS4, FACTORED, BITS2 = "torch", "8-bit", "4-bit", "factored", "2-bit factored"
STATES = (TORCH, BITS8, BITS4, FACTORED, BITS2)
"""Variants of optimizer states: torch's own, and four ways to quantise them."""

_NARROW = {"name": "group", "group_size": 128}
_WIDE = {"name": "group", "bits": 8}
_EXACT_CODES = (  # one bit stores these derivatives exactly; masks and argmax indices are integers
    ActivationRule(op="@piecewise", compressor={"name": "derivative", "bits": 1}),
    ActivationRule(op="dropout|*max_pool*", compressor=_WIDE),
)
_BIAS = (  # where noise would be bias, in an exponent, or in a weight that is computed
    ActivationRule(op="@exponential", compressor=_WIDE),
    ActivationRule(op="wide_dot_product_attention", compressor={"name": "float", "format": "bf16"}),
    ActivationRule(op="*dot_product_attention", tensor="input|input1", compressor=_WIDE),
    ActivationRule(op="dot_product_attention", compressor={**_NARROW, "bits": 6}),
    ActivationRule(op="softmax|matmul", compressor={**_NARROW, "bits": 6}),
    ActivationRule(op="small_batch_norm|small_instance_norm", compressor={**_NARROW, "bits": 6}),
    ActivationRule(op="linear|conv*|bilinear", tensor="input1", compressor=_WIDE),
)
_HARDSWISH = ActivationRule(op="hardswish", compressor={"name": "derivative", "bits": 5})
_SATURATING = (
    ActivationRule(op="sigmoid|tanh", compressor=_WIDE),
    ActivationRule(op="@saturating", compressor=KEEP),
)
_SILU = ActivationRule(op="silu", compressor={**_NARROW, "bits": 5})
_ELU = ActivationRule(op="elu|celu|selu", compressor=_WIDE)
_MOMENTUM = "exp_avg|momentum_buffer"


def activation_rules(scheme: str, widths: Mapping[str, int] = DEFAULT) -> list[ActivationRule]:
    """List the rules of a scheme for saved tensors, with widths of its codes and groups.

    All schemes except `keep` use one bit for piecewise-linear nonlinearities and 8 bits for tensors
    in an exponent and for computed weights. They keep tensors whose noise would be a bias.
    """
    if scheme == KEEP:
        return []
    group = {**_NARROW, "bits": widths[REST]}
    rows = ActivationRule(op="linear", tensor="input", compressor={**group, "whole_rows": True})
    codes = ActivationRule(op="@nonlinear", compressor={"name": "derivative", "bits": widths[CODE]})
    smooth = ActivationRule(op="@smooth", compressor={**_NARROW, "bits": widths[SMOOTH]})
    none = ActivationRule(op="@nonlinear", compressor=KEEP)
    rest = [*_BIAS, rows, ActivationRule(compressor=group)]
    return {
        BALANCED: [*_SATURATING, _HARDSWISH, _SILU, _ELU, codes, *rest],
        CODES: [*_SATURATING, *_EXACT_CODES, _ELU, codes, *rest],
        GROUPS: [*_SATURATING, *_EXACT_CODES, _ELU, smooth, codes, *rest],
        ONLY_CODES: [*_EXACT_CODES, codes],
        ONLY_GROUPS: [*_EXACT_CODES, none, *rest],
    }[scheme]


def state_rules(variant: str) -> list[StateRule]:
    """List the rules of a variant of optimizer states."""
    first, second = {
        TORCH: ("", ""),
        BITS8: ("B256/DE8", "B256/DE-08"),
        BITS4: ("B128/DE", "Rank-1/Linear"),
        FACTORED: ("B128/DE", "factored"),
        BITS2: ("Lloyd-Max", "factored"),
    }[variant]
    if not first:
        return []
    rules = [
        StateRule(state="exp_avg_sq", compressor=second),
        StateRule(state=_MOMENTUM, compressor=first),
    ]
    drawn = StateRule(state="exp_avg", compressor="B128/DE+SR")
    return [drawn, *rules] if variant == FACTORED else rules
