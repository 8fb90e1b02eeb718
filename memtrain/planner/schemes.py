"""Rules of the planner: schemes for saved tensors, variants for optimizer states."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from memtrain import configs
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

_WIDE = {"name": "group", "bits": 8}
_EXACT_CODES = (  # one bit stores these derivatives exactly; masks and argmax indices are integers
    ActivationRule(op="@piecewise", compressor={"name": "derivative", "bits": 1}),
    ActivationRule(op="dropout|*max_pool*", compressor=_WIDE),
)
_MOMENTUM = "exp_avg|momentum_buffer"


def activation_rules(scheme: str, widths: Mapping[str, int] = DEFAULT) -> list[ActivationRule]:
    """List the rules of a scheme for saved tensors, with widths of its codes and groups.

    All schemes except `keep` use one bit for piecewise-linear nonlinearities and 8 bits for tensors
    in an exponent and for computed weights. They keep tensors whose noise would be a bias.
    """
    if scheme == KEEP:
        return []
    rules = [
        replace(rule, compressor={**rule.compressor, "bits": widths[kind]}) if kind else rule
        for rule, kind in _balanced()
    ]
    named = {rule.op: rule for rule in rules}
    saturating, elu = [named["sigmoid|tanh"], named["@saturating"]], [named["elu|celu|selu"]]
    codes = named["@nonlinear"]
    rest = rules[rules.index(codes) + 1 :]
    group = {"name": "group", "bits": widths[SMOOTH], "group_size": 128}
    smooth = ActivationRule(op="@smooth", compressor=group)
    none = ActivationRule(op="@nonlinear", compressor=KEEP)
    return {
        BALANCED: rules,
        CODES: [*saturating, *_EXACT_CODES, *elu, codes, *rest],
        GROUPS: [*saturating, *_EXACT_CODES, *elu, smooth, codes, *rest],
        ONLY_CODES: [*_EXACT_CODES, codes],
        ONLY_GROUPS: [*_EXACT_CODES, none, *rest],
    }[scheme]


@cache
def _balanced() -> list[tuple[ActivationRule, str]]:
    """Return the rules of `balanced`, each with the key of `DEFAULT` that is its width, or ""."""
    path = Path(configs.__file__).parent / "activations" / "fewbit3_group4.yaml"
    rules = [ActivationRule(**rule) for rule in yaml.safe_load(path.read_text("utf-8"))["rules"]]
    kinds: dict[Any, str] = {("derivative", DEFAULT[CODE]): CODE, ("group", DEFAULT[REST]): REST}
    specs = [{} if rule.compressor == KEEP else rule.compressor for rule in rules]
    return [
        (rule, kinds.get((spec.get("name"), spec.get("bits")), ""))
        for rule, spec in zip(rules, specs, strict=True)
    ]


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
