"""Variants of each parameter's optimizer states, and the best mixtures of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from memtrain.compressors import Compressor, Keep
from memtrain.config.sources import CPU, Config, Optim, StateRule
from memtrain.plan.build import spec
from memtrain.plan.entries import NO_COUNTER, PlanEntry, training_dtypes
from memtrain.plan.plan import Plan, make_plan
from memtrain.plan.rules import state_site
from memtrain.planner.goal import Goal
from memtrain.planner.knapsack import Item, Option, Segment, Solution, shrinking, solve, thinned
from memtrain.planner.noise import moment_error
from memtrain.planner.schemes import BITS2, BITS4, TORCH, state_rules

MIXTURES = 64
"""Of the trade between the objective and the bytes of all states, so many are told apart."""


def gather_states(
    model: nn.Module, optimizer: Optimizer, config: Config, variants: Sequence[str], goal: Goal
) -> tuple[list[Segment], list[Solution]]:
    """List what each variant does to each parameter's states, and the best mixtures.

    Args:
        model: Real or fake; not changed.
        optimizer: Not changed.
        config: Its exceptions hold in every variant; its rules do not.
        variants: Of `STATES`, `torch` first; 2 bits are left out where no fused step serves them.
        goal: Its rates, its most error and its objective.

    Returns:
        A segment of one item for each parameter that has a choice, and first a nameless one for all
        others; an option's name is its variant, and its error in units of that of
        `optim=rank1_4bit`. And mixtures of these, the best first.
    """
    params = _params(model, optimizer)
    if not _steps_two_bits(optimizer):
        variants = [name for name in variants if name != BITS2]
    found: dict[str, dict[str, Option]] = {}
    for variant in dict.fromkeys([*variants, BITS4]):
        own = replace(config.optim, rules=_rules(config.optim, variant), sites={})
        plan = make_plan(model, optimizer, replace(config, optim=own))
        found[variant] = _options(plan, model, optimizer, variant, goal)
    unit = sum(one.error for one in found[BITS4].values()) or 1.0
    every = {name: _pareto([found[kind][name] for kind in variants]) for name in params}
    fixed = [found[TORCH][name] for name in params if len(every[name]) < 2]
    rest = Option(sum(one.seconds for one in fixed), sum(one.nbytes for one in fixed))
    segments = [Segment([Item([rest])])] + [
        Segment([Item([replace(one, error=one.error / unit) for one in options])], name=name)
        for name, options in every.items()
        if len(options) > 1
    ]

    def worth(one: Solution) -> tuple[float, float, float]:
        first, second = one.seconds, one.error
        return (*((first, second) if goal.objective == "time" else (second, first)), one.saved)

    ordered = sorted(solve(segments, goal.max_error, goal.objective), key=worth)
    smaller = shrinking(ordered, lambda one: one.saved)
    return segments, thinned(smaller, lambda one: one.saved, MIXTURES)


def chosen_states(states: Sequence[Segment], mixture: Solution) -> dict[str, Option]:
    """Tell what a mixture does.

    Args:
        states: As `gather_states` lists them.
        mixture: Of these.

    Returns:
        Parameter -> its option, of those that have a choice.
    """
    return {
        segment.name: segment.items[0].options[own[0] if own else 0]
        for segment, own in zip(states[1:], mixture.choices[1:], strict=True)
    }


def count_states(states: Sequence[Segment], mixture: Solution) -> dict[str, int]:
    """Variant -> how many parameters have it, of those that have a choice."""
    return dict(Counter(option.name for option in chosen_states(states, mixture).values()))


def state_config(own: Optim, states: Sequence[Segment], mixture: Solution) -> Optim:
    """Make the config's part that stands for a mixture.

    Args:
        own: Its exceptions and options stay.
        states: As `gather_states` lists them.
        mixture: Of these.

    Returns:
        Rules of the variant that most parameters have, and a line for each state of the others.
    """
    counts = count_states(states, mixture)
    most = max(counts, key=lambda name: counts[name], default=TORCH)
    sites: dict[str, Any] = {}
    for option in chosen_states(states, mixture).values():
        if option.name != most:
            sites |= {site: spec(choice) for site, choice in option.choices.items()}
    return replace(own, rules=_rules(own, most), sites=sites)


def _rules(own: Optim, variant: str) -> list[StateRule]:
    """The rules of a variant; what stays torch's own needs one too, to lie in host memory."""
    exact = [StateRule(compressor="identity")] if own.device == CPU else []
    return state_rules(variant) or exact


def bus_bytes(model: nn.Module, config: Config, param: Tensor) -> int:
    """Bytes of a parameter that cross the bus in a step: its gradient, and its weight back.

    Args:
        model: Real or fake.
        config: `weights` and `optim.device` are read.
        param: One of its parameters.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> on_host = Optim(device="cpu")
        >>> bus_bytes(model, Config(weights="bf16+8", optim=on_host), model.weight)
        16
    """
    if config.optim.device != CPU:
        return 0
    dtype = training_dtypes(model, config).get(param, param.dtype)
    return 2 * dtype.itemsize * param.numel()


def _steps_two_bits(optimizer: Optimizer) -> bool:
    """Whether it becomes the fused optimizer that gives a moment's residual to the weight."""
    amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
    return type(optimizer) in (Adam, AdamW) and not amsgrad


def _pareto(options: Sequence[Option]) -> list[Option]:
    """Torch's own, and the variants that no other, earlier where equal, is as good as in all."""
    ranks = [(own.nbytes, own.seconds, own.error, place) for place, own in enumerate(options)]
    return [
        own
        for own, rank in zip(options, ranks, strict=True)
        if own.name == TORCH
        or not any(
            other != rank and all(a <= b for a, b in zip(other, rank, strict=True))
            for other in ranks
        )
    ]


def _options(
    plan: Plan, model: nn.Module, optimizer: Optimizer, variant: str, goal: Goal
) -> dict[str, Option]:
    """Parameter -> what the plan does to its states."""
    params, on_cuda = _params(model, optimizer), goal.options.on_cuda(model)
    entries: dict[str, list[PlanEntry]] = {name: [] for name in params}
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
        nbytes = sum(entry.on_device(on_cuda) for entry in own)
        error = sum(
            moment_error(state_site(entry.site)[1], _served(param, choices[entry.site]))
            for entry in own
            if entry.compressor
        )
        # What is kept counts as torch's own also where float32 masters make it float32: that truer
        # weights take longer for it is not held against them.
        moved = sum(
            entry.planned + entry.host if entry.compressor else entry.nbytes for entry in own
        )
        bus = bus_bytes(model, plan.config, param)
        seconds = goal.rates.step(optimizer, variant, param.numel(), moved, bus)
        share = error * param.numel() / total
        found[name] = Option(seconds, nbytes, share, variant, choices=choices)
    return found


def _served(param: Tensor, chosen: Compressor | Keep) -> Compressor | Keep:
    """The compressor that serves the parameter's shape."""
    return chosen if isinstance(chosen, Keep) else chosen.for_shape(param.shape)[0]


def _params(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's parameters, as sites name them."""
    names = {p: name for name, p in model.named_parameters()}
    return {
        names.get(param, f"{index}.{number}"): param
        for index, group in enumerate(optimizer.param_groups)
        for number, param in enumerate(group["params"])
    }
