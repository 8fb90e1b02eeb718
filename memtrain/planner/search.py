"""Search of the fastest plan, or the one with the least noise, whose peak fits a budget."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memtrain.activations.saved.site import Site
from memtrain.activations.trace.compiled_parts import compiled_parts
from memtrain.activations.trace.fake_copies import caches_cleared
from memtrain.audit.peak import Moment, StepOptions, Timeline
from memtrain.audit.peak.largest import largest
from memtrain.audit.peak.predict import conditions, predict
from memtrain.compressors import Compressor, Keep
from memtrain.config.sizes import parse_size
from memtrain.config.sources import KEEP, Config, load
from memtrain.optim.states.first_step import inner_optimizer
from memtrain.plan import plan as rules
from memtrain.plan.plan import Plan
from memtrain.plan.predicted_bytes import training_dtypes
from memtrain.planner.advice import advice
from memtrain.planner.candidates import (
    CandidatePlan,
    best_candidates,
    candidate_plans,
    config_of,
    count_options,
    priced,
)
from memtrain.planner.cost_model import step_seconds
from memtrain.planner.goal import DoesNotFit, Fit, Goal, Progress, silent
from memtrain.planner.knapsack import Solution, solve
from memtrain.planner.optimizer_states import States, gather_states
from memtrain.planner.schemes import STATES, TORCH
from memtrain.planner.search_space import SearchSpace, gather

ROOM = 0.95
"""Share of the budget that an advised smaller batch may take, since it gets another plan."""
TEMPORARIES = 0.9
"""Share of the temporaries of three plans that all plans are assumed to need."""


def make_plan(
    model: nn.Module,
    optimizer: Optimizer,
    cfg: Any = None,
    *,
    batch: Any = None,
    budget: str | int | None = None,
    **goal: Any,
) -> Plan:
    """Make a plan: the decision for every site, from rules or for a memory budget.

    Args:
        model: The model; not changed.
        optimizer: The model's optimizer; not changed.
        cfg: Anything that `memtrain.wrap` takes. With a budget, its rules are ignored.
        batch: The model's input, required with a budget. With a batch, a forward on fake tensors
            records the activation sites. Otherwise the first training forward of the wrapped model
            records them.
        budget: Limit for the peak of a training step, such as `"24GiB"`. None: use the rules.
        goal: With a budget: `allow`, of `quantise`, `recompute` (both by default), `release` and
            `weights`; `max_error`, in units of the noise of `balanced` (1); `objective`, `time`
            (by default) or `error`; and the other fields of `memtrain.planner.Goal`.

    Returns:
        The plan. `plan.save("plan.yaml")` saves it.

    Raises:
        ValueError: If the config is not valid; if a user's rule or a plan file names a module, site
            or parameter that does not exist; if the budget is malformed or has no batch; or if no
            plan fits the budget (`memtrain.planner.DoesNotFit`).
        TypeError: If a value has a wrong type.

    Memory:
        Fake tensors allocate no data.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> plan = make_plan(model, optimizer, batch=torch.randn(256, 64), budget="2MB")
        >>> plan.config.activations.sites["1 / gelu / input"]["name"]
        'derivative'
    """
    if budget is None:
        if goal:
            raise ValueError(f"{', '.join(goal)} without a budget; allowed: with budget=")
        return rules.make_plan(model, optimizer, cfg, batch=batch)
    if batch is None:
        raise ValueError(f"budget={budget!r} needs batch=, the model's input")
    return fit(model, optimizer, batch, budget, cfg, goal=Goal(**goal)).plan


@caches_cleared()
def fit(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    budget: str | int,
    cfg: Any = None,
    *,
    goal: Goal = Goal(),  # noqa: B008 (a frozen value)
    progress: Progress = silent,
) -> Fit:
    """Choose what to compress and what to recompute, so that a training step's peak fits.

    For each item of saved tensors: keep, lossless, or each compressor that serves it at 1 to 8
    bits; for each block of layers instead of these: recompute it; for optimizer states: torch's,
    8 bits, 4 bits, factored or 2 bits; where allowed, released gradients and weights in two bytes.
    Plans that trade step time against bytes best are listed without asking for the budget, and
    the fastest is taken whose peak, predicted by a whole step on fake tensors, fits. So more
    budget never plans a slower step.

    Args:
        model: Real or fake; not changed.
        optimizer: Its optimizer; not changed.
        batch: What the model is called with.
        budget: Bytes: `"24GiB"`, `"24GB"` or a number. On CUDA it is a whole device's: the
            allocator's cache and the CUDA context (`StepOptions.context`) are taken from it.
        cfg: Anything that `memtrain.wrap` takes: its exceptions, options, `weights` and
            `gradients` hold; its rules do not. With `optim.device=cpu` states take none of the
            budget where the step is CUDA's, and time on the bus and in the host.
        goal: What is allowed, and what for.
        progress: Called with each stage, and how much of it is done.

    Returns:
        The plan, the promised peak, step time and error.

    Raises:
        DoesNotFit: If no plan fits: with the smallest peak, what holds it, and what would help.
        ValueError: For a malformed size, a config that is not valid, or a compiled model.

    Memory:
        No tensor is allocated.

    Example:
        >>> import torch
        >>> model = nn.Linear(64, 64)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> found = fit(model, optimizer, torch.randn(8, 64), "1MB", goal=Goal(allow=()))
        >>> found.peak.nbytes <= 1_000_000
        True
    """
    size = parse_size(budget, "budget")
    plain, compiled = compiled_parts(model)
    if compiled:
        raise ValueError(
            f"{type(plain).__name__} is compiled, and budget= plans eager steps only; "
            "allowed: the model before torch.compile"
        )
    optimizer = inner_optimizer(optimizer)
    config = Config() if cfg is None else load(cfg)
    candidates = _candidates(model, optimizer, batch, config, goal, progress)
    listed = best_candidates(candidates, goal.objective)
    most, count = 3 + len(listed).bit_length(), itertools.count(1)

    @cache
    def timeline(index: int) -> Timeline:
        progress("the peak of a plan", next(count), most)
        return predict(model, optimizer, batch, config_of(listed[index]), goal.options)

    index = first_that_fits(listed, lambda index: timeline(index).needed, size)
    best, peak = listed[index], timeline(index).needed
    if peak.nbytes > size:
        progress("what would help", 0, 0)

        def smaller(what: str, most: int) -> int:
            room, known = int(ROOM * size), {"optimizer": optimizer, "options": goal.options}
            return largest(model, batch, config_of(best), room, what=what, most=most, **known).size

        raise DoesNotFit(size, peak, advice(size, peak, batch, goal, smaller))
    progress("the plan's sites", 0, 0)
    return Fit(
        plan=_plan(model, optimizer, config_of(best), batch, goal.options),
        budget=size,
        timeline=timeline(index),
        seconds=best.seconds,
        plain_seconds=_baseline_seconds(optimizer, best.space),
        error=best.error,
        states=best.states.variant,
        chosen=count_options(best),
    )


def first_that_fits(
    listed: Sequence[CandidatePlan], peak: Callable[[int], Moment], size: int
) -> int:
    """Return the index of the first plan of a list that fits, or else of the smallest known plan.

    Plans come best first, each smaller without temporaries than the plans before. Bisection ends at
    the smallest of three fixed plans, since temporaries may make the last plan larger than others.
    A plan is not predicted if it is too large with a share of the temporaries that all three need.
    Both are independent of the budget, so a larger budget never ends further down the list.
    """
    last = len(listed) - 1
    fixed = sorted({last // 2, 3 * last // 4, last})
    floor = min(fixed, key=lambda index: peak(index).nbytes)
    least = min(peak(index).nbytes - listed[index].peak for index in fixed)
    besides = max(0.0, least) * TEMPORARIES
    low, high = 0, floor
    while low < high and peak(floor).nbytes <= size:
        middle = (low + high) // 2
        hopeless = listed[middle].peak + besides > size
        fits = not hopeless and peak(middle).nbytes <= size
        low, high = (low, middle) if fits else (middle + 1, high)
    return high


def _candidates(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    config: Config,
    goal: Goal,
    progress: Progress,
) -> list[CandidatePlan]:
    """List the candidates for each setting of weights and gradients."""
    candidates: list[CandidatePlan] = []
    variants = STATES if "quantise" in goal.names else (TORCH,)
    states: dict[bool, list[States]] = {}
    spaces: dict[Any, SearchSpace] = {}
    solved: dict[Any, list[Solution]] = {}
    for weights in _settings(config.weights, _weights(model), "weights" in goal.names):
        converted = replace(config, weights=weights)
        # Float32 masters have float32 states, whatever the dtype of the weights is now.
        masters = any(p.dtype != torch.float32 for p in training_dtypes(model, converted))
        if masters not in states:
            progress("optimizer states", 0, 0)
            states[masters] = gather_states(model, optimizer, converted, variants, goal)
        key = _converts(model, batch, converted)
        if key not in spaces:
            spaces[key] = gather(model, optimizer, converted, batch, goal, progress)
        base = replace(spaces[key].plan.config, weights=weights)
        for gradients in _settings(config.gradients, ("release",), "release" in goal.names):
            plan = rules.make_plan(model, optimizer, replace(base, gradients=gradients))
            space = replace(spaces[key], plan=plan)
            if (key, gradients) not in solved:
                progress("combinations", 0, 0)
                segments = priced(space)
                solved[key, gradients] = solve(segments, goal.max_error, goal.objective)
            candidates += candidate_plans(
                space,
                goal,
                solved[key, gradients],
                states[masters],
                separate_host=goal.options.on_cuda(model),
            )
    return candidates


def _settings(now: str, others: Sequence[str], allowed: bool) -> list[str]:
    """Return the settings to try, the preferred one first."""
    if not allowed or now != KEEP:
        return [now]
    return [*others] if KEEP in others else [now, *others]


def _weights(model: nn.Module) -> tuple[str, ...]:
    """Return the settings for weights, the most exact first; bfloat16 loses small updates."""
    low = any(p.dtype == torch.bfloat16 for p in model.parameters())
    return ("bf16+8", "bf16+sr", KEEP) if low else (KEEP, "bf16+8", "bf16+sr")


def _converts(model: nn.Module, batch: Any, config: Config) -> Any:
    """Return the dtype of converted weights and inputs, the key of a forward's dtypes."""
    dtypes = training_dtypes(model, config)
    inputs = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
    changed = any(p.dtype == torch.float32 for p in dtypes)
    changed |= bool(dtypes) and any(x.dtype == torch.float32 for x in inputs)
    return next(iter(dtypes.values())) if changed else None


def _baseline_seconds(optimizer: Optimizer, space: SearchSpace) -> float:
    """Return the time of a step of the baseline."""
    n_params = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    states = sum(entry.nbytes for entry in space.plan.entries("state"))
    return 3 * space.work.seconds + step_seconds(optimizer, TORCH, n_params, states)


def _plan(
    model: nn.Module, optimizer: Optimizer, config: Config, batch: Any, step: StepOptions
) -> Plan:
    """Return the plan without sites that only other options have."""
    plan = rules.make_plan(model, optimizer, config)
    choices: dict[Site, Compressor | Keep] = {}
    with conditions(model, step):
        names = {record.site.name for record in plan.trace(model, batch, choices)}
        names |= {site.name for site in choices}
        sites = {name: spec for name, spec in config.activations.sites.items() if name in names}
        activations = replace(config.activations, sites=sites)
        config = replace(config, activations=activations)
        return rules.make_plan(model, optimizer, config, batch=batch)
