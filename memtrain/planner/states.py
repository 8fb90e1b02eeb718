"""What may be done to each parameter's optimizer states, and how whole mixtures of it trade."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import le
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.compressors import Compressor, Keep
from memtrain.config.sources import Config, Optim
from memtrain.optim.states.layout import settle
from memtrain.plan.entry import Entry
from memtrain.plan.file import spec
from memtrain.plan.plan import Plan, make_plan
from memtrain.plan.rules import state_site
from memtrain.plan.states import NO_COUNTER
from memtrain.planner.goal import Goal, Objective
from memtrain.planner.levels import BITS4, TORCH, state_rules
from memtrain.planner.noise import moment_error
from memtrain.planner.rates import Rates
from memtrain.planner.solve import Choice, Part, Solution, frontier
from memtrain.planner.sweep import sweep

MIXTURES = 64
"""Of the trade between the objective and the bytes of all states, so many are told apart."""


class Variant(NamedTuple):
    """What one variant does to a parameter's states."""

    nbytes: int
    seconds: float
    """Of its update."""
    error: float
    """Its part of the update's square that rounding the states adds."""
    choices: dict[str, Compressor | Keep]
    """Site -> what is done to it."""


@dataclass(frozen=True)
class States:
    """Every parameter's variants, and the mixtures of them that are worth something."""

    items: dict[str, dict[str, Variant]]
    """Parameter -> variant -> what it does; only of parameters that have a choice."""
    parts: list[Part]
    """One for each of these, and first one for all others."""
    mixtures: list[Solution]
    """Of these parts, the best first."""
    exact: bool
    """Whether all mixtures were listed; else those of a relaxation."""

    def chosen(self, mixture: Solution) -> dict[str, str]:
        """Parameter -> variant."""
        return {
            name: [*options][own[0] if own else 0]
            for (name, options), own in zip(self.items.items(), mixture.choices[1:], strict=True)
        }

    def counts(self, mixture: Solution) -> dict[str, int]:
        """Variant -> how many parameters have it, of those that have a choice."""
        return dict(Counter(self.chosen(mixture).values()))

    def config(self, own: Optim, mixture: Solution) -> Optim:
        """The config's part that stands for a mixture.

        Args:
            own: Its exceptions and options stay.
            mixture: One of `mixtures`.

        Returns:
            Rules of the variant that most parameters have, and a line for each state of the others.
        """
        chosen, counts = self.chosen(mixture), self.counts(mixture)
        most = max(counts, key=lambda name: counts[name], default=TORCH)
        sites: dict[str, Any] = {}
        for name, variant in chosen.items():
            if variant != most:
                choices = self.items[name][variant].choices
                sites |= {site: spec(choice) for site, choice in choices.items()}
        return replace(own, rules=state_rules(most), sites=sites)


def gather_states(
    model: nn.Module, optimizer: Optimizer, config: Config, variants: Sequence[str], goal: Goal
) -> States:
    """List what each variant does to each parameter's states, and the best mixtures.

    Args:
        model: Real or fake; not changed.
        optimizer: Not changed.
        config: Its exceptions hold in every variant; its rules do not.
        variants: Of `STATES`, `torch` first.
        goal: Its rates, its most error and its objective.

    Returns:
        All of it. Errors are in units of that of the preset `balanced`.
    """
    params = _params(model, optimizer)
    found: dict[str, dict[str, Variant]] = {}
    for variant in dict.fromkeys([*variants, BITS4]):
        own = replace(config.optim, rules=state_rules(variant), sites={})
        plan = make_plan(model, optimizer, replace(config, optim=own))
        found[variant] = _variants(plan, optimizer, variant, params, goal.rates)
    unit = sum(one.error for one in found[BITS4].values()) or 1.0
    every = {name: _useful({kind: found[kind][name] for kind in variants}) for name in params}
    items = {name: options for name, options in every.items() if len(options) > 1}
    fixed = [found[TORCH][name] for name in params if name not in items]
    rest = Choice(sum(one.seconds for one in fixed), sum(one.nbytes for one in fixed), 0.0)
    parts = [Part([[rest]])] + [
        Part([[Choice(one.seconds, one.nbytes, one.error / unit) for one in own.values()]])
        for own in items.values()
    ]
    listed = frontier(parts, goal.max_error)
    mixtures = sweep(parts, goal.max_error, goal.objective) if listed is None else listed
    return States(items, parts, thinned(mixtures, goal.objective), listed is not None)


def _useful(options: dict[str, Variant]) -> dict[str, Variant]:
    """Variants that no other is at least as fast, as small and as exact as; torch's always."""
    ranks = {name: (*one[:3], place) for place, (name, one) in enumerate(options.items())}
    return {
        name: one
        for name, one in options.items()
        if name == TORCH
        or not any(
            other != ranks[name] and all(map(le, other, ranks[name])) for other in ranks.values()
        )
    }


def thinned(mixtures: Sequence[Solution], objective: Objective) -> list[Solution]:
    """Of each range of bytes the best mixture, where it is smaller than all that are better.

    Args:
        mixtures: In any order.
        objective: What is best.

    Returns:
        At most `MIXTURES` + 1, the best first, the smallest among them.

    Example:
        >>> fast, slow, bad = (Solution(t, n, n, 0.0, ()) for t, n in ((1, 9), (2, 3), (3, 5)))
        >>> thinned([bad, slow, fast], "time") == [fast, slow]
        True
    """

    def worth(one: Solution) -> tuple[float, float, float]:
        first, second = one.seconds, one.error
        return (first, second, one.saved) if objective == "time" else (second, first, one.saved)

    listed: list[Solution] = []
    for one in sorted(mixtures, key=worth):
        if not listed or one.saved < listed[-1].saved:
            listed.append(one)
    step = (listed[0].saved - listed[-1].saved) / MIXTURES
    thin = listed[:1]
    for one in listed[1:]:
        if thin[-1].saved - one.saved >= step or one is listed[-1]:
            thin.append(one)
    return thin


def _variants(
    plan: Plan, optimizer: Optimizer, variant: str, params: dict[str, Tensor], rates: Rates
) -> dict[str, Variant]:
    """Parameter -> what the plan does to its states."""
    entries: dict[str, list[Entry]] = {name: [] for name in params}
    for entry in plan.entries("state"):
        name = state_site(entry.site)[0]
        if name in entries:
            entries[name].append(entry)
    total = max(1, sum(param.numel() for param in params.values()))
    found = {}
    for name, own in entries.items():
        param = params[name]
        choices = {
            entry.site: plan.choose_state(*state_site(entry.site))
            for entry in own
            if entry.reason != NO_COUNTER
        }
        nbytes = sum(entry.planned for entry in own)
        error = sum(
            moment_error(state_site(entry.site)[1], _settled(param, choices[entry.site]))
            for entry in own
            if entry.compressor
        )
        seconds = rates.step(optimizer, variant, param.numel(), nbytes)
        found[name] = Variant(nbytes, seconds, error * param.numel() / total, choices)
    return found


def _settled(param: Tensor, chosen: Compressor | Keep) -> Compressor | Keep:
    return chosen if isinstance(chosen, Keep) else settle(param, chosen)[0]


def _params(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's parameters, as sites name them."""
    names = {p: name for name, p in model.named_parameters()}
    return {
        names.get(param, f"{index}.{number}"): param
        for index, group in enumerate(optimizer.param_groups)
        for number, param in enumerate(group["params"])
    }
