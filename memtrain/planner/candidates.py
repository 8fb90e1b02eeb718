"""Plans that combine solutions for saved tensors with variants of optimizer states."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from memtrain.config.sources import KEEP, Config
from memtrain.plan.compressor_specs import compressor_spec
from memtrain.planner.cost_model import COPY
from memtrain.planner.goal import Goal, Objective
from memtrain.planner.knapsack import Option, Segment, Solution, shrinking, thinned
from memtrain.planner.optimizer_states import States
from memtrain.planner.search_space import SearchSpace

PLANS = 256
"""How many plans of the trade between the objective and the peak are distinguished."""


class CandidatePlan(NamedTuple):
    """A complete plan, before its peak is predicted."""

    seconds: float
    peak: float
    """Bytes at the peak, without temporaries."""
    error: float
    space: SearchSpace
    solution: Solution
    states: States


def priced(space: SearchSpace) -> list[Segment]:
    """Give options their seconds by the bytes that they move, and errors in units of `balanced`'s.

    With released gradients none stays for later.
    """
    unit = sum(item.balanced.error for item in space.items) or 1.0
    released = space.plan.config.gradients != KEEP

    def cost(option: Option) -> Option:
        seconds = option.seconds + option.moved / COPY
        return replace(option, seconds=seconds, error=option.error / unit)

    return [
        replace(
            segment,
            items=[replace(item, options=[*map(cost, item.options)]) for item in segment.items],
            recompute=segment.recompute and cost(segment.recompute),
            later=0 if released else segment.later,
        )
        for segment in space.segments
    ]


def candidate_plans(
    space: SearchSpace,
    goal: Goal,
    solutions: Sequence[Solution],
    variants: Sequence[States],
    *,
    separate_host: bool,
) -> list[CandidatePlan]:
    """Combine solutions for saved tensors with variants of states.

    Returns the combinations that no other one dominates; for each variant the best first.
    """
    weights, gradients = (
        sum(entry.on_device(separate_host) for entry in space.plan.entries(kind))
        for kind in ("weight", "gradient")
    )
    base = 3 * space.work.seconds
    saved = np.array(
        [(s.seconds, max(s.highest, s.saved, gradients), s.error) for s in solutions]
    ).reshape(-1, 3)
    found: list[CandidatePlan] = []
    for states in variants:
        seconds = base + states.seconds + saved[:, 0]
        peak = weights + states.nbytes + saved[:, 1]
        error = np.maximum(states.error, saved[:, 2])
        first, second = (seconds, error) if goal.objective == "time" else (error, seconds)
        order = np.lexsort((peak, second, first))
        lowest = np.minimum.accumulate(np.concatenate([[np.inf], peak[order][:-1]]))
        for row in order[peak[order] < lowest].tolist():
            totals = float(seconds[row]), float(peak[row]), float(error[row])
            found.append(CandidatePlan(*totals, space, solutions[row], states))
    return found


def best_candidates(
    candidates: Sequence[CandidatePlan], objective: Objective
) -> list[CandidatePlan]:
    """Sort plans, and keep each plan whose peak is smaller than all peaks before it.

    The result is thinned out evenly. Of equally good plans an earlier one is preferred.
    """
    settings = [*dict.fromkeys(map(_settings, candidates))]
    # Bfloat16 weights that lose small updates are chosen only if no more exact weights fit.
    lossy = KEEP if settings and settings[-1][0] == KEEP != settings[0][0] else None

    def worth(plan: CandidatePlan) -> tuple[float, ...]:
        first, second = plan.seconds, plan.error
        best = (first, second) if objective == "time" else (second, first)
        setting = _settings(plan)
        return (setting[0] == lossy, *best, settings.index(setting), plan.peak)

    listed = shrinking(sorted(candidates, key=worth), lambda plan: plan.peak)
    return listed if len(listed) <= PLANS else thinned(listed, lambda plan: plan.peak, PLANS)


def _settings(candidate: CandidatePlan) -> tuple[str, str]:
    """Return the choices for weights and for gradients."""
    config = candidate.space.plan.config if candidate.space is not None else Config()
    return config.weights, config.gradients


def config_of(candidate: CandidatePlan) -> Config:
    """Make the config of a plan: its sites, its recomputed blocks, its optimizer states."""
    space, config = candidate.space, candidate.space.plan.config
    sites: dict[str, Any] = {}
    recompute: list[str] = []
    for segment, indices in zip(space.segments, candidate.solution.choices, strict=True):
        if indices is None:
            recompute.append(segment.name)
            continue
        for item, index in zip(segment.items, indices, strict=True):
            choices = item.options[index].choices
            sites |= {site.name: compressor_spec(choice) for site, choice in choices.items()}
    activations = replace(config.activations, rules=[], sites=sites, recompute=recompute)
    return replace(config, activations=activations, optim=candidate.states.config)


def count_options(candidate: CandidatePlan) -> dict[str, int]:
    """Count the items that each option is chosen for, and the blocks that are recomputed."""
    counts: dict[str, int] = {}
    for segment, indices in zip(candidate.space.segments, candidate.solution.choices, strict=True):
        if indices is None and segment.recompute is not None:
            counts[segment.recompute.name] = counts.get(segment.recompute.name, 0) + 1
            continue
        for item, index in zip(segment.items, indices or (), strict=True):
            if item.options[0].nbytes:
                name = item.options[index].name
                counts[name] = counts.get(name, 0) + 1
    return counts
