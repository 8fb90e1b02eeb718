"""Whole plans with their step time, bytes and error, before their peak is predicted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from memtrain.config import KEEP, Config
from memtrain.plan import make_plan
from memtrain.planfile import spec
from memtrain.planner.candidates import Block, Candidates
from memtrain.planner.goal import Goal, Objective
from memtrain.planner.levels import BITS4, TORCH, state_error, state_rules
from memtrain.planner.rates import Rates
from memtrain.planner.sensitivity import Errors, of_balanced
from memtrain.planner.solve import Choice, Part, Solution, bound, frontier
from memtrain.planner.sweep import sweep

PLANS = 256
"""Of the trade between the objective and the peak, so many plans are told apart."""


class Mode(NamedTuple):
    """What holds for the whole model."""

    weights: str
    gradients: str
    states: str


@dataclass(frozen=True)
class Ground:
    """Everything that one way to keep weights and gradients leaves to choose."""

    config: Config
    candidates: Candidates
    errors: Errors
    unit: float
    """The error of `balanced`: what errors are told in."""
    parts: list[Part]
    solutions: list[Solution]
    exact: bool


class Offer(NamedTuple):
    """A plan, as far as it is known before its peak is predicted."""

    seconds: float
    held: float
    """Bytes of weights and optimizer states."""
    peak: float
    """Bytes at the peak, without temporaries."""
    error: float
    mode: Mode
    ground: Ground
    solution: Solution


def lay_ground(config: Config, candidates: Candidates, errors: Errors, goal: Goal) -> Ground:
    """Turn candidates into parts, and list how they trade time, bytes and error."""
    unit = of_balanced(errors) or 1.0
    released = config.gradients != KEEP
    parts = [_part(block, errors, unit, goal.rates, released) for block in candidates.blocks]
    listed = frontier(parts, goal.max_error)
    exact = listed is not None
    solutions = listed if listed is not None else sweep(parts, goal.max_error, goal.objective)
    return Ground(config, candidates, errors, unit, parts, solutions, exact)


def _part(block: Block, errors: Errors, unit: float, rates: Rates, released: bool) -> Part:
    plain = sum(item.options[KEEP].nbytes for item in block.items)
    again = Choice(rates.seconds(block.work), block.inputs, 0.0)
    items = [
        [
            Choice(
                rates.packing(option) if option.plain else 0.0,
                option.nbytes,
                errors[item.name][level] / unit,
            )
            for level, option in item.options.items()
        ]
        for item in block.items
    ]
    later = 0 if released else block.later_gradients
    return Part(items, again if block.recompute else None, plain, later)


def make_offers(
    model: nn.Module,
    optimizer: Optimizer,
    ground: Ground,
    variants: Sequence[str],
    goal: Goal,
) -> list[Offer]:
    """Each trade of saved tensors with each way to keep the optimizer's states."""
    names = ground.candidates.states
    unit, offers = state_error(BITS4, names) or 1.0, []
    base = 3 * goal.rates.seconds(ground.candidates.work)
    n_params = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    for variant in variants:
        error = state_error(variant, names) / unit
        if error > goal.max_error * (1 + 1e-9):
            continue
        own = replace(ground.config.optim, rules=state_rules(variant), sites={})
        plan = make_plan(model, optimizer, replace(ground.config, optim=own))
        states = sum(entry.planned for entry in plan.entries("state"))
        held = states + sum(entry.planned for entry in plan.entries("weight"))
        gradients = sum(entry.planned for entry in plan.entries("gradient"))
        seconds = base + goal.rates.step(optimizer, variant, n_params, states)
        mode = Mode(ground.config.weights, ground.config.gradients, variant)
        offers += [
            Offer(
                seconds + solution.seconds,
                held,
                held + max(solution.highest, solution.saved, gradients),
                max(error, solution.error),
                mode,
                ground,
                solution,
            )
            for solution in ground.solutions
        ]
    return offers


def best_offers(offers: Sequence[Offer], objective: Objective) -> list[Offer]:
    """Offers of which each has a smaller peak than all that are better, thinned out evenly."""

    def worth(offer: Offer) -> tuple[float, float, float]:
        if objective == "time":
            return offer.seconds, offer.error, offer.peak
        return offer.error, offer.seconds, offer.peak

    listed: list[Offer] = []
    for offer in sorted(offers, key=worth):
        if not listed or offer.peak < listed[-1].peak:
            listed.append(offer)
    if len(listed) <= PLANS:
        return listed
    step = (listed[0].peak - listed[-1].peak) / PLANS
    thin = [listed[0]]
    for offer in listed[1:-1]:
        if thin[-1].peak - offer.peak >= step:
            thin.append(offer)
    return [*thin, listed[-1]]


def config_of(offer: Offer) -> Config:
    """The config that stands for an offer: its sites, its blocks to recompute, its states."""
    ground = offer.ground
    sites: dict[str, Any] = {}
    again: list[str] = []
    for block, own in zip(ground.candidates.blocks, offer.solution.choices, strict=True):
        if own is None:
            again.append(block.name)
            continue
        for item, index in zip(block.items, own, strict=True):
            option = [*item.options.values()][index]
            sites |= {site.name: spec(chosen) for site, chosen in option.choices.items()}
    activations = replace(ground.config.activations, rules=[], sites=sites, recompute=again)
    states = replace(ground.config.optim, rules=state_rules(offer.mode.states), sites={})
    return replace(ground.config, activations=activations, optim=states)


def least_seconds(offers: Sequence[Offer], room: float, max_error: float, best: Offer) -> float:
    """Seconds that no plan beats, if its temporaries are those of the one that was found."""
    grounds = {id(offer.ground): offer.ground for offer in offers}
    least = best.seconds
    for offer in {(id(o.ground), o.mode): o for o in offers}.values():
        ground = grounds[id(offer.ground)]
        fixed = offer.seconds - offer.solution.seconds
        lower = bound(ground.parts, room - offer.held, max_error, best.seconds - fixed)
        least = min(least, fixed + lower)
    return least


def plain_seconds(optimizer: Optimizer, candidates: Candidates, rates: Rates) -> float:
    """Of a step of plain PyTorch."""
    n_params = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    entries = candidates.plans[KEEP].entries("state")
    states = sum(entry.nbytes for entry in entries)
    return 3 * rates.seconds(candidates.work) + rates.step(optimizer, TORCH, n_params, states)


def count_levels(offer: Offer) -> dict[str, int]:
    """How many groups of tensors each level has, and how many blocks run again."""
    counts: dict[str, int] = {}
    for block, own in zip(offer.ground.candidates.blocks, offer.solution.choices, strict=True):
        if own is None:
            counts["recompute"] = counts.get("recompute", 0) + 1
            continue
        for item, index in zip(block.items, own, strict=True):
            if item.options[KEEP].nbytes:
                level = [*item.options][index]
                counts[level] = counts.get(level, 0) + 1
    return counts
