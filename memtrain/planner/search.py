"""The fastest step, or the least noise, whose peak fits a budget of bytes."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from math import inf
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
from memtrain.planner.cost_model import Rates
from memtrain.planner.goal import DoesNotFit, Fit, Goal, Progress, silent
from memtrain.planner.knapsack import Solution, solve
from memtrain.planner.optimizer_states import States, gather_states
from memtrain.planner.schemes import STATES, TORCH
from memtrain.planner.search_space import SearchSpace, gather

ROOM = 0.95
"""A smaller batch is advised that takes this share of the budget: it gets another plan."""
TEMPORARIES = 0.9
"""This share of temporaries that three plans need, all are taken to need."""


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
    planning = _Planning(model, optimizer, Config() if cfg is None else load(cfg), batch, progress)
    best, timeline = planning.best(goal, size)
    peak = timeline.needed
    if peak.nbytes > size:
        progress("what would help", 0, 0)
        resized = partial(planning.largest, best, goal, size)
        error = partial(planning.enough_error, goal, size)
        raise DoesNotFit(size, peak, advice(size, peak, batch, goal, resized, error))
    progress("the plan's sites", 0, 0)
    return Fit(
        plan=_plan(model, optimizer, config_of(best), batch, goal.options),
        budget=size,
        timeline=timeline,
        seconds=best.seconds,
        plain_seconds=_plain_seconds(optimizer, best.space, goal.rates),
        error=best.error,
        states=best.states.variant,
        chosen=count_options(best),
        rates=goal.rates.name,
    )


def first_that_fits(
    listed: Sequence[CandidatePlan], peak: Callable[[int], Moment], size: int
) -> int:
    """Find the first plan of a list that fits, or else the smallest that is known.

    By bisection, up to the smallest of three fixed plans: temporaries may make the last one larger
    than others. What is too large with a share of the temporaries that these three all need is not
    predicted. Neither depends on the budget, and what is asked depends on the answers alone; so a
    larger budget, to which more says yes, never ends further down the list.

    Args:
        listed: The best first, each smaller without temporaries than those before.
        peak: Predicts the peak of a plan by its place.
        size: Bytes.

    Returns:
        Its place.
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


class _Planning:
    """Plans of one model and batch, for one goal or another; what all need is traced once."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, config: Config, batch: Any, progress: Progress
    ) -> None:
        self.given = model, optimizer, batch
        self.config, self.progress = config, progress
        self.spaces: dict[Any, SearchSpace] = {}

    def best(self, goal: Goal, size: int) -> tuple[CandidatePlan, Timeline]:
        """The best plan that fits, or else the smallest that is known, and its predicted step."""
        listed = best_candidates(self._candidates(goal), goal.objective)
        most, count = 3 + len(listed).bit_length(), itertools.count(1)

        @cache
        def timeline(index: int) -> Timeline:
            self.progress("the peak of a plan", next(count), most)
            return predict(*self.given, config_of(listed[index]), goal.options)

        place = first_that_fits(listed, lambda index: timeline(index).needed, size)
        return listed[place], timeline(place)

    def largest(self, plan: CandidatePlan, goal: Goal, size: int, what: str, most: int) -> int:
        """The largest batch, or the longest sequence, whose peak fits well under a plan."""
        (model, optimizer, batch), options = self.given, goal.options
        fits = partial(largest, model, batch, config_of(plan), int(ROOM * size), what=what)
        return fits(optimizer=optimizer, most=most, options=options).size

    def enough_error(self, goal: Goal, size: int) -> float | None:
        """A `max_error` of 1, 2, 4, ... with which a plan fits; None if more does not help."""
        most = self._smallest(replace(goal, max_error=inf), size)
        error = 1.0
        while most is not None and error < 2 * most:
            if error > goal.max_error and self._smallest(replace(goal, max_error=error), size):
                return error
            error *= 2
        return None

    def _smallest(self, goal: Goal, size: int) -> float | None:
        """The error of the smallest plan that is known; None if it does not fit."""
        plan, timeline = self.best(goal, 0)
        return plan.error if timeline.needed.nbytes <= size else None

    def _candidates(self, goal: Goal) -> list[CandidatePlan]:
        """Those of every way to keep weights and gradients."""
        (model, optimizer, batch), config, progress = self.given, self.config, self.progress
        names, found = goal.names, []
        variants = STATES if "quantise" in names else (TORCH,)
        known: dict[bool, list[States]] = {}
        solved: dict[Any, list[Solution]] = {}
        for weights in _settings(config.weights, _weights(model), "weights" in names):
            held = replace(config, weights=weights)
            # Float32 masters have float32 states, whatever the dtype of the weights is now.
            masters = any(p.dtype != torch.float32 for p in training_dtypes(model, held))
            if masters not in known:
                progress("optimizer states", 0, 0)
                known[masters] = gather_states(model, optimizer, held, variants, goal)
            key = _converts(model, batch, held)
            if key not in self.spaces:
                self.spaces[key] = gather(model, optimizer, held, batch, goal, progress)
            space = self.spaces[key]
            none = replace(space.plan.config, weights=weights)
            for gradients in _settings(config.gradients, ("release",), "release" in names):
                plan = rules.make_plan(model, optimizer, replace(none, gradients=gradients))
                whole = replace(space, plan=plan)
                way = key, gradients
                if way not in solved:
                    progress("combinations", 0, 0)
                    solved[way] = solve(priced(whole, goal), goal.max_error, goal.objective)
                separate_host = goal.options.on_cuda(model)
                found += candidate_plans(
                    whole, goal, solved[way], known[masters], separate_host=separate_host
                )
        return found


def _settings(now: str, others: Sequence[str], allowed: bool) -> list[str]:
    """Plans to try, the best of equal ones first."""
    if not allowed or now != KEEP:
        return [now]
    return [*others] if KEEP in others else [now, *others]


def _weights(model: nn.Module) -> tuple[str, ...]:
    """Ways to keep weights, the truest first: bfloat16 ones lose small updates as they are."""
    low = any(p.dtype == torch.bfloat16 for p in model.parameters())
    return ("bf16+8", "bf16+sr", KEEP) if low else (KEEP, "bf16+8", "bf16+sr")


def _converts(model: nn.Module, batch: Any, config: Config) -> Any:
    """Key of a forward's dtypes: the dtype of converted weights and inputs."""
    dtypes = training_dtypes(model, config)
    given = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
    changed = any(p.dtype == torch.float32 for p in dtypes)
    changed |= bool(dtypes) and any(x.dtype == torch.float32 for x in given)
    return next(iter(dtypes.values())) if changed else None


def _plain_seconds(optimizer: Optimizer, space: SearchSpace, rates: Rates) -> float:
    """Of a step of plain PyTorch."""
    n_params = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    states = sum(entry.nbytes for entry in space.plan.entries("state"))
    return 3 * rates.seconds(space.work) + rates.step(optimizer, TORCH, n_params, states)


def _plan(
    model: nn.Module, optimizer: Optimizer, config: Config, batch: Any, step: StepOptions
) -> Plan:
    """The plan without the sites that only other options have."""
    plan = rules.make_plan(model, optimizer, config)
    choices: dict[Site, Compressor | Keep] = {}
    with conditions(model, step):
        asked = {record.site.name for record in plan.trace(model, batch, choices)}
        asked |= {site.name for site in choices}
        sites = {name: own for name, own in config.activations.sites.items() if name in asked}
        activations = replace(config.activations, sites=sites)
        config = replace(config, activations=activations)
        return rules.make_plan(model, optimizer, config, batch=batch)
