"""Whole plans with their step time, bytes and error, before their peak is predicted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from torch import nn
from torch.optim import Optimizer

from memtrain.config.sources import KEEP, Config
from memtrain.plan.file import spec
from memtrain.plan.plan import make_plan
from memtrain.planner.candidates import Block, Candidates
from memtrain.planner.goal import Goal, Objective
from memtrain.planner.levels import TORCH
from memtrain.planner.rates import Rates
from memtrain.planner.solve import Choice, Part, Solution, bound, frontier
from memtrain.planner.states import States
from memtrain.planner.sweep import sweep

PLANS = 256
"""Of the trade between the objective and the peak, so many plans are told apart."""


@dataclass(frozen=True)
class Ground:
    """Everything that one way to keep weights and gradients leaves to choose."""

    config: Config
    candidates: Candidates
    unit: float
    """The error of `balanced`: what errors are told in."""
    states: States
    parts: list[Part]
    solutions: list[Solution]
    exact: bool
    """Whether all plans were listed; else those of a relaxation."""


class Offer(NamedTuple):
    """A plan, as far as it is known before its peak is predicted."""

    seconds: float
    held: float
    """Bytes of weights and optimizer states."""
    peak: float
    """Bytes at the peak, without temporaries."""
    error: float
    ground: Ground
    solution: Solution
    """Of saved tensors."""
    mixture: Solution
    """Of optimizer states."""


def lay_ground(config: Config, candidates: Candidates, states: States, goal: Goal) -> Ground:
    """Turn candidates into parts, and list how they trade time, bytes and error."""
    unit = sum(item.balanced.error for item in candidates.items) or 1.0
    released = config.gradients != KEEP
    parts = [_part(block, unit, goal.rates, released) for block in candidates.blocks]
    listed = frontier(parts, goal.max_error)
    exact = listed is not None and states.exact
    solutions = listed if listed is not None else sweep(parts, goal.max_error, goal.objective)
    return Ground(config, candidates, unit, states, parts, solutions, exact)


def _part(block: Block, unit: float, rates: Rates, released: bool) -> Part:
    plain = sum(item.options[0].nbytes for item in block.items)
    again = Choice(rates.seconds(block.work), block.inputs, 0.0)
    items = [
        [
            Choice(rates.packing(option), option.nbytes, option.error / unit)
            for option in item.options
        ]
        for item in block.items
    ]
    later = 0 if released else block.later_gradients
    return Part(items, again if block.recompute else None, plain, later)


def make_offers(model: nn.Module, optimizer: Optimizer, ground: Ground, goal: Goal) -> list[Offer]:
    """Each trade of saved tensors with each mixture of states, where no other is better."""
    plan = make_plan(model, optimizer, ground.config)
    weights = sum(entry.planned for entry in plan.entries("weight"))
    gradients = sum(entry.planned for entry in plan.entries("gradient"))
    base = 3 * goal.rates.seconds(ground.candidates.work)
    saved = np.array(
        [
            (one.seconds, max(one.highest, one.saved, gradients), one.error)
            for one in ground.solutions
        ]
    ).reshape(-1, 3)
    offers: list[Offer] = []
    for mixture in ground.states.mixtures:
        held = weights + mixture.saved
        seconds, peak = base + mixture.seconds + saved[:, 0], held + saved[:, 1]
        error = np.maximum(mixture.error, saved[:, 2])
        first, second = (seconds, error) if goal.objective == "time" else (error, seconds)
        order = np.lexsort((peak, second, first))
        lowest = np.minimum.accumulate(np.concatenate([[np.inf], peak[order][:-1]]))
        for row in order[peak[order] < lowest].tolist():
            totals = float(seconds[row]), held, float(peak[row]), float(error[row])
            offers.append(Offer(*totals, ground, ground.solutions[row], mixture))
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
            choices = item.options[index].choices
            sites |= {site.name: spec(chosen) for site, chosen in choices.items()}
    activations = replace(ground.config.activations, rules=[], sites=sites, recompute=again)
    states = ground.states.config(ground.config.optim, offer.mixture)
    return replace(ground.config, activations=activations, optim=states)


def least_seconds(offers: Sequence[Offer], room: float, max_error: float, best: Offer) -> float:
    """Seconds that no plan beats, if its temporaries are those of the one that was found."""
    least = best.seconds
    for offer in {id(offer.ground): offer for offer in offers}.values():
        ground = offer.ground
        fixed = offer.seconds - offer.solution.seconds - offer.mixture.seconds
        inside = room - (offer.held - offer.mixture.saved)
        states = ground.states.parts
        lower = bound(ground.parts, inside, max_error, best.seconds - fixed, states)
        least = min(least, fixed + lower)
    return least


def plain_seconds(optimizer: Optimizer, candidates: Candidates, rates: Rates) -> float:
    """Of a step of plain PyTorch."""
    n_params = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    entries = candidates.plan.entries("state")
    states = sum(entry.nbytes for entry in entries)
    return 3 * rates.seconds(candidates.work) + rates.step(optimizer, TORCH, n_params, states)


def count_options(offer: Offer) -> dict[str, int]:
    """How many groups of tensors each option is chosen for, and how many blocks run again."""
    counts: dict[str, int] = {}
    for block, own in zip(offer.ground.candidates.blocks, offer.solution.choices, strict=True):
        if own is None:
            counts["recompute"] = counts.get("recompute", 0) + 1
            continue
        for item, index in zip(block.items, own, strict=True):
            if item.options[0].nbytes:
                name = item.options[index].name
                counts[name] = counts.get(name, 0) + 1
    return counts
