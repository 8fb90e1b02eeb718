"""Variants of the optimizer states of all parameters, with their bytes, time and noise."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from memtrain.compressors import Keep
from memtrain.config.sources import CPU, Config, Optim, StateRule
from memtrain.plan.plan import Plan, make_plan
from memtrain.plan.predicted_bytes import training_dtypes
from memtrain.plan.rules import state_site
from memtrain.planner.cost_model import step_seconds
from memtrain.planner.goal import Goal
from memtrain.planner.noise import moment_error
from memtrain.planner.schemes import BITS2, BITS4, state_rules


class States(NamedTuple):
    """A variant of the states of all parameters: one of `schemes.STATES`."""

    variant: str
    seconds: float
    """Time of the optimizer's step."""
    nbytes: int
    """Bytes on the device."""
    error: float
    """Noise of the update, in units of that of `optim=rank1_4bit`."""
    config: Optim


def gather_states(
    model: nn.Module, optimizer: Optimizer, config: Config, variants: Sequence[str], goal: Goal
) -> list[States]:
    """List the variants of states that no other one dominates, torch's first.

    The config's exceptions hold in every variant; its rules do not. A variant with 2 bits needs an
    optimizer with a fused step for them.
    """
    if not _steps_two_bits(optimizer):
        variants = [name for name in variants if name != BITS2]
    found = {}
    for variant in dict.fromkeys([*variants, BITS4]):
        optim = replace(config.optim, rules=_rules(config.optim, variant), sites={})
        plan = make_plan(model, optimizer, replace(config, optim=optim))
        found[variant] = _states(plan, model, optimizer, variant, goal)
    unit = found[BITS4].error or 1.0
    listed = [found[name]._replace(error=found[name].error / unit) for name in variants]
    ranks = [(s.nbytes, s.seconds, s.error, index) for index, s in enumerate(listed)]
    return [
        states
        for states, rank in zip(listed, ranks, strict=True)
        if states.error <= goal.max_error
        and not any(
            other != rank and all(a <= b for a, b in zip(other, rank, strict=True))
            for other in ranks
        )
    ] or listed[:1]


def _rules(optim: Optim, variant: str) -> list[StateRule]:
    """Return the rules of a variant; torch's states need one, too, to be in host memory."""
    exact = [StateRule(compressor="identity")] if optim.device == CPU else []
    return state_rules(variant) or exact


def bus_bytes(model: nn.Module, config: Config, param: Tensor) -> int:
    """Return the bytes of a parameter's gradient and weight that cross the bus in a step."""
    if config.optim.device != CPU:
        return 0
    dtype = training_dtypes(model, config).get(param, param.dtype)
    return 2 * dtype.itemsize * param.numel()


def _steps_two_bits(optimizer: Optimizer) -> bool:
    """Return whether the fused optimizer adds the residual of a 2-bit moment to the weight."""
    amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
    return type(optimizer) in (Adam, AdamW) and not amsgrad


def _states(plan: Plan, model: nn.Module, optimizer: Optimizer, variant: str, goal: Goal) -> States:
    """Sum the bytes, the bytes moved and the error of a plan's states."""
    params, on_cuda = _params(model, optimizer), goal.options.on_cuda(model)
    total = max(1, sum(param.numel() for param in params.values()))
    nbytes, moved, error = 0, 0, 0.0
    for entry in plan.entries("state"):
        nbytes += entry.on_device(on_cuda)
        # Kept states count with torch's bytes, also if float32 masters make them float32: this
        # time is not a cost of the weights' variant.
        moved += entry.planned + entry.host if entry.compressor else entry.nbytes
        name, state = state_site(entry.site)
        if entry.compressor and name in params:
            param = params[name]
            chosen = plan.choose_state(name, state)
            if not isinstance(chosen, Keep):
                chosen = chosen.for_shape(param.shape)[0]
            error += moment_error(state, chosen) * param.numel() / total
    bus = sum(bus_bytes(model, plan.config, param) for param in params.values())
    seconds = step_seconds(optimizer, variant, total, moved, bus)
    return States(variant, seconds, nbytes, error, plan.config.optim)


def _params(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's parameters by their names in sites."""
    names = {p: name for name, p in model.named_parameters()}
    return {
        names.get(param, f"{index}.{number}"): param
        for index, group in enumerate(optimizer.param_groups)
        for number, param in enumerate(group["params"])
    }
