"""What the planner may do: schemes and widths for saved tensors, variants for optimizer states."""

from typing import NamedTuple

from memtrain.config.sources import KEEP, ActivationRule, StateRule

LOSSLESS = "lossless"
BALANCED = "balanced"
CODES, GROUPS, ONLY_CODES, ONLY_GROUPS = "codes", "groups", "only codes", "only groups"
PATCHES, ONLY_PATCHES = "patches", "only patches"
SCHEMES = (KEEP, BALANCED, CODES, GROUPS, ONLY_CODES, ONLY_GROUPS, PATCHES, ONLY_PATCHES)
"""Which compressor each kind of saved tensor gets. `balanced` is the preset; `codes` gives
derivative codes to nonlinearities and groups to others; `groups` gives groups also to smooth
nonlinearities, so that their outputs are computed again; `only ...` keeps the rest; `patches` gives
4x4 patches to maps."""
WIDTHS = range(1, 9)


class Widths(NamedTuple):
    """Bits of a scheme, each of 1 to 8."""

    code: int = 3
    """Of derivative codes."""
    smooth: int = 5
    """Of groups that smooth nonlinearities read."""
    rest: int = 4
    """Of other groups."""


NARROW = Widths(1, 2, 1)
"""With the default, two points on the line of bytes over bits."""

TORCH, BITS8, BITS4, FACTORED = "torch", "8-bit", "4-bit", "factored"
STATES = (TORCH, BITS8, BITS4, FACTORED)
"""What may be done to optimizer states."""

_EXACT = {"name": "group", "bits": 8}
_FREE = (  # one bit says all of these derivatives; masks and places in a window are whole numbers
    ActivationRule(op="@piecewise", compressor={"name": "derivative", "bits": 1}),
    ActivationRule(op="dropout|*max_pool*", compressor=_EXACT),
)
_BIAS = (  # where noise would be bias, in an exponent, or in a weight that is computed
    ActivationRule(op="@singular", compressor=KEEP),
    ActivationRule(op="@exponential", compressor=_EXACT),
    ActivationRule(op="scaled_dot_product_attention", tensor="input|input1", compressor=_EXACT),
    ActivationRule(op="linear|conv*|bilinear", tensor="input1", compressor=_EXACT),
)
_HARDSWISH = ActivationRule(op="hardswish", compressor={"name": "derivative", "bits": 4})
_MAPS = ActivationRule(
    op="conv2d|batch_norm|max_pool2d", tensor="input", compressor={"name": "patch"}
)
_MOMENTUM = "exp_avg|momentum_buffer"


def activation_rules(scheme: str, widths: Widths = Widths()) -> list[ActivationRule]:  # noqa: B008
    """The rules that do to every saved tensor what a scheme says.

    All schemes but `keep` take one bit of piecewise-linear nonlinearities, 8 bits where noise would
    be in an exponent or in a computed weight, and nothing where it would be bias.

    Args:
        scheme: One of `SCHEMES`.
        widths: Of its codes and groups; `balanced` has the default ones.

    Returns:
        Rules for saved tensors, first match wins.

    Example:
        >>> [rule.op for rule in activation_rules("only codes")]
        ['@piecewise', 'dropout|*max_pool*', '@nonlinear']
    """
    if scheme == KEEP:
        return []
    own = ActivationRule(compressor={"name": "group", "bits": widths.rest})
    smooth = {"name": "group", "bits": widths.smooth}
    codes = ActivationRule(op="@nonlinear", compressor={"name": "derivative", "bits": widths.code})
    saturating = ActivationRule(op="sigmoid|tanh", compressor=own.compressor)
    return {
        BALANCED: [
            saturating,
            ActivationRule(op="silu", compressor=smooth),
            _HARDSWISH,
            codes,
            *_BIAS,
            own,
        ],
        CODES: [*_FREE, codes, *_BIAS, own],
        GROUPS: [
            *_FREE,
            saturating,
            ActivationRule(op="@smooth", compressor=smooth),
            codes,
            *_BIAS,
            own,
        ],
        ONLY_CODES: [*_FREE, codes],
        ONLY_GROUPS: [*_FREE, ActivationRule(op="@nonlinear", compressor=KEEP), *_BIAS, own],
        PATCHES: [*_FREE, codes, _MAPS, *_BIAS, own],
        ONLY_PATCHES: [*_FREE, codes, _MAPS],
    }[scheme]


def state_rules(variant: str) -> list[StateRule]:
    """The rules that do to optimizer states what a variant says.

    Args:
        variant: One of `STATES`.

    Returns:
        Rules for states, first match wins.

    Example:
        >>> [rule.compressor for rule in state_rules("4-bit")]
        ['Rank-1/Linear', 'B128/DE']
    """
    first, second = {
        TORCH: ("", ""),
        BITS8: ("B256/DE8", "B256/DE8"),
        BITS4: ("B128/DE", "Rank-1/Linear"),
        FACTORED: ("B128/DE", "factored"),
    }[variant]
    if not first:
        return []
    return [
        StateRule(state="exp_avg_sq", compressor=second),
        StateRule(state=_MOMENTUM, compressor=first),
    ]
