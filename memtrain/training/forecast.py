"""The predicted peak of a step, and the lines printed before a run."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from memtrain.audit.live_storages import storage_nbytes
from memtrain.audit.peak import Moment, StepOptions
from memtrain.audit.peak.predict import predict
from memtrain.audit.peak.timeline import GRADIENTS
from memtrain.config.sizes import format_size
from memtrain.config.sources import Config
from memtrain.optim.wrappers.accumulate import sum_bytes
from memtrain.planner import DoesNotFit, Fit, Goal, fit

if TYPE_CHECKING:
    from memtrain.training.run import Run


def accumulated_bytes(model: nn.Module, config: Config) -> int:
    """Return the bytes that sums of released gradients take between microbatches."""
    if config.gradients != "release" or config.release.accumulate == 1:
        return 0
    return sum(sum_bytes(p) for p in model.parameters() if p.requires_grad)


def fit_budget(
    model: nn.Module, optimizer: Optimizer, inputs: Any, config: Config, goal: Goal, budget: int
) -> Fit:
    """Find the plan whose peak on a microbatch fits a budget in bytes.

    `DoesNotFit` has advice in keys of `memtrain-train`.
    """
    find = partial(fit, model, optimizer, inputs, cfg=config, goal=goal)
    try:
        found = find(budget)
        sums = accumulated_bytes(model, found.plan.config)
        if found.peak.nbytes + sums > budget:
            found = find(budget - sums)
    except DoesNotFit as error:
        raise DoesNotFit(budget, error.smallest, map(in_keys, error.help)) from error
    return replace(found, budget=budget)


def predicted_peak(
    model: nn.Module,
    optimizer: Optimizer,
    inputs: Any,
    config: Config | None,
    options: StepOptions,
) -> Moment:
    """Predict the moment when most bytes are alive, with a config or (None) without memtrain."""
    timeline = predict(model, optimizer, inputs, config, options)
    return with_sums(timeline.needed, 0 if config is None else accumulated_bytes(model, config))


def in_keys(advice: str) -> str:
    """Translate the planner's advice to keys of `memtrain-train`.

    Example:
        >>> in_keys("allow=quantise,release (lets each gradient go)")
        'planner.allow=[quantise,release] (lets each gradient go)'
    """
    advice = advice.replace("(and accumulated gradients)", "(training.accumulate)")
    return re.sub(r"^allow=(\S+)", r"planner.allow=[\1]", advice)


def with_sums(peak: Moment, sums: int) -> Moment:
    """Add the sums of earlier microbatches to the peak of a microbatch: an upper bound."""
    if not sums:
        return peak
    parts = {**peak.parts, GRADIENTS: peak.parts.get(GRADIENTS, 0) + sums}
    return replace(peak, nbytes=peak.nbytes + sums, parts=parts)


def describe(run: "Run") -> list[str]:
    """Return lines about the model and the data of a run."""
    parameters = list(run.model.parameters())
    total = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    lines = [f"model: {total:,} parameters" + (f", {trained:,} trained" * (trained < total))]
    fresh = getattr(run.model, "fresh", ())
    if fresh:
        shown = ", ".join(fresh[:3]) + (f" and {len(fresh) - 3} more" if len(fresh) > 3 else "")
        lines.append(f"model: not in its folder, so with initial values: {shown}")
    counts = [f"{len(run.source.parts[split]):,}" for split in ("train", "validation")]
    return [*lines, f"data: {counts[0]} rows to train on, {counts[1]} held out"]


def describe_peak(run: "Run") -> list[str]:
    """Return lines about the predicted peak of a run, and what to change if it does not fit."""
    peak = run.forecast
    if run.fit is not None:
        more = 0 if peak is None else peak.nbytes - run.fit.peak.nbytes
        sums = f"sums of earlier microbatches take at most {format_size(more)} more"
        return [*run.fit.lines(), *([sums] if more else [])]
    if peak is None:
        return [f"peak of a step: not predicted ({run.unpredictable})"] if run.unpredictable else []
    parts = sorted(peak.parts.items(), key=lambda pair: -pair[1])
    shown = ", ".join(f"{name} {format_size(n)}" for name, n in parts if n > peak.nbytes / 100)
    lines = [
        f"peak of a step: {format_size(peak.nbytes)} predicted for a batch of "
        f"{run.micro_rows} rows, in the {peak.label} ({shown})"
    ]
    room = available_bytes(run.device, storage_nbytes(run.model.parameters()))
    if room is not None and peak.nbytes > room:
        lines.append(f"that does not fit: {format_size(room)} are free on {run.device.type}")
        lines.append(f"what would help: budget={format_size(room).replace(' ', '')} plans for it")
    return lines


def available_bytes(device: torch.device, used: int = 0) -> int | None:
    """Return the bytes that a run that uses `used` may use; None where the system reports none.

    Example:
        >>> available_bytes(torch.device("cpu")) != 0
        True
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) + used if found else None
