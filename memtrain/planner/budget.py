"""The least step time, or error, whose peak fits a budget of bytes: from candidates to a plan."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memtrain.activations.saved.site import Site
from memtrain.audit.peak import Moment, StepOptions
from memtrain.audit.peak.predict import conditions, predict
from memtrain.compressors import Compressor, Keep
from memtrain.config.sizes import parse_size
from memtrain.config.sources import KEEP, Config
from memtrain.gradient_quality import closure_of
from memtrain.plan.file import load
from memtrain.plan.plan import Plan, make_plan
from memtrain.planner.candidates import gather
from memtrain.planner.fit import DoesNotFit, Fit, advice
from memtrain.planner.goal import ALLOWED, Goal
from memtrain.planner.levels import STATES, TORCH
from memtrain.planner.offers import (
    Offer,
    best_offers,
    config_of,
    count_options,
    lay_ground,
    least_seconds,
    make_offers,
    plain_seconds,
)
from memtrain.planner.sensitivity import analytic, is_real, measured
from memtrain.planner.states import gather_states

TEMPORARIES = 0.9
"""This share of temporaries that three plans need, all are taken to need."""


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    budget: str | int,
    cfg: Any = None,
    *,
    goal: Goal = Goal(),  # noqa: B008 (a frozen value)
) -> Fit:
    """Choose what to compress and what to run again, so that a training step's peak fits.

    For each group of saved tensors: keep, lossless, or each compressor that serves it at 1 to 8
    bits; for each block of layers instead of these: run it again; for each parameter's states:
    torch's, 8 bits, 4 bits or factored; where allowed, released gradients and weights in two bytes.
    All plans that trade step time against bytes best are listed without asking for the budget, and
    the fastest is taken whose peak, predicted by a whole step on fake tensors, fits. So more
    budget never plans a slower step.

    Args:
        model: Real or fake; not changed.
        optimizer: Its optimizer; not changed.
        batch: What the model is called with.
        budget: Bytes: `"24GiB"`, `"24GB"` or a number.
        cfg: Anything that `memtrain.wrap` takes: its exceptions, options, `weights` and
            `gradients` hold; its rules do not.
        goal: What is allowed, and what for.

    Returns:
        The plan, the promised peak, step time and error.

    Raises:
        DoesNotFit: If no plan fits: with the smallest peak, what holds it, and what would help.
        ValueError: For a malformed size or a config that is not valid.

    Memory:
        No tensor is allocated, but for sensitivities that are measured: a step and two gradients.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> found = fit(model, optimizer, torch.randn(256, 64), "2MB")
        >>> found.peak.nbytes <= 2_000_000
        True
    """
    size, config = parse_size(budget, "budget"), Config() if cfg is None else load(cfg)
    measure = goal.sensitivity == "measured"
    measure |= goal.sensitivity == "auto" and is_real(model, batch)
    offers = _all_offers(model, optimizer, config, batch, goal, measure=measure)
    listed = best_offers(offers, goal.objective)

    @cache
    def peak(index: int) -> Moment:
        return predict(model, optimizer, batch, config_of(listed[index]), goal.options).peak

    place = _place(listed, peak, size)
    if peak(place).nbytes > size:
        helps = advice(size, peak(place), batch, ALLOWED, goal.names, goal.max_error)
        raise DoesNotFit(size, peak(place), helps)
    offer = listed[place]
    surplus = peak(place).nbytes - offer.peak
    least = None
    if goal.objective == "time":
        least = least_seconds(offers, size - surplus, goal.max_error, offer)
    return Fit(
        plan=_plan(model, optimizer, config_of(offer), batch, goal.options),
        budget=size,
        peak=peak(place),
        seconds=offer.seconds,
        plain_seconds=plain_seconds(optimizer, offer.ground.candidates, goal.rates),
        least_seconds=least,
        error=offer.error,
        exact=all(other.ground.exact for other in offers),
        states=offer.ground.states.counts(offer.mixture),
        chosen=count_options(offer),
        rates=goal.rates.name,
        sensitivity="measured" if measure else "analytic",
    )


def _all_offers(
    model: nn.Module, optimizer: Optimizer, config: Config, batch: Any, goal: Goal, *, measure: bool
) -> list[Offer]:
    names, offers = goal.names, []
    for weights in _options(config.weights, "bf16+8", "weights" in names):
        held = replace(config, weights=weights)
        quantise, recompute = "quantise" in names, "recompute" in names
        kinds = {"quantise": quantise, "recompute": recompute}
        found = gather(model, optimizer, held, batch, **kinds, step=goal.options)
        if measure:
            run = goal.closure or closure_of(model, batch)
            found = measured(model, run, found, found.plan.options)
        else:
            found = analytic(found)
        variants = STATES if quantise else (TORCH,)
        states = gather_states(model, optimizer, held, variants, goal)
        for gradients in _options(config.gradients, "release", "release" in names):
            own = replace(held, gradients=gradients)
            ground = lay_ground(own, found, states, goal)
            offers += make_offers(model, optimizer, ground, goal)
    return offers


def _options(now: str, other: str, allowed: bool) -> list[str]:
    return [now, other] if allowed and now == KEEP else [now]


def _place(listed: Sequence[Offer], peak: Callable[[int], Moment], size: int) -> int:
    """The first plan of the list that fits, or else the smallest that is known.

    By bisection, up to the smallest of three fixed plans: temporaries may make the last one larger
    than others. What is too large with a share of the temporaries that these three all need is not
    predicted. Neither depends on the budget, and what is asked depends on the answers alone; so a
    larger budget, to which more says yes, never ends further down the list.
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


def _plan(
    model: nn.Module, optimizer: Optimizer, config: Config, batch: Any, step: StepOptions
) -> Plan:
    """The plan without the sites that only other options have."""
    plan, asked = make_plan(model, optimizer, config), set[str]()

    def choose(site: Site) -> Compressor | Keep:
        asked.add(site.name)
        return plan.choose_activation(site)

    with conditions(model, step):
        asked |= {record.site.name for record in plan.trace(model, batch, choose)}
        sites = {name: own for name, own in config.activations.sites.items() if name in asked}
        activations = replace(config.activations, sites=sites)
        config = replace(config, activations=activations)
        return make_plan(model, optimizer, config, batch=batch)
