"""Wrappers and hooks that `wrap` adds for weights, gradients and the states' device."""

import warnings
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.optim.states.compressed_states import CompressedStates
from memtrain.optim.states.optimizer_hooks import find
from memtrain.optim.states.shards import check_unsharded
from memtrain.optim.wrappers import dtypes
from memtrain.optim.wrappers.ddp import (
    RELEASED,
    models_in_ddp,
    refuse_released,
    refuse_training,
)
from memtrain.optim.wrappers.host_parameters import check_whole
from memtrain.optim.wrappers.host_states import HostStates
from memtrain.optim.wrappers.release import ReleaseGradients
from memtrain.optim.wrappers.release_checks import (
    check_complex,
    check_gradient_readers,
    check_separate,
)
from memtrain.optim.wrappers.weights import SplitWeights, keeps_float32, parse

KEEP, RELEASE, CPU = "keep", "release", "cpu"


def check_release(config: Any) -> None:
    """Raise ValueError for options of released gradients that `gradients=keep` would ignore."""
    default = type(config.release)()
    for name in ("clip", "limit", "loss_scale", "accumulate"):
        nothing = getattr(default, name)
        value = getattr(config.release, name)
        if config.gradients == KEEP and value != nothing:
            raise ValueError(
                f"release.{name}={value!r} has no effect with gradients='keep'; allowed with "
                "gradients=release; without it: torch.nn.utils.clip_grad_norm_, GradScaler"
            )


def check(model: nn.Module, config: Any) -> None:
    """Raise ValueError for requests that `apply` cannot fulfill; nothing is changed."""
    if config.gradients == RELEASE:
        check_complex(model.parameters(), config.release.clip, config.release.accumulate)
        check_separate(model.parameters())
        check_gradient_readers(model)
        if models_in_ddp(model.parameters()):
            raise ValueError(RELEASED)
    if config.optim.device == CPU:
        states = config.optim
        if not (states.rules or states.exceptions or states.sites):
            raise ValueError(
                "optim.device='cpu' without rules for states: no state would move; allowed: a "
                "preset with rules, or optim=identity, which keeps them exactly"
            )
        check_whole(model.parameters())
    if config.weights == KEEP:
        return
    if models_in_ddp(model.parameters()):
        raise ValueError(
            f"weights={config.weights!r} of a model that is in a DistributedDataParallel: its "
            "buckets have the weights' dtype already, and it would not reduce the gradients of "
            "converted weights. Wrap the model first, then put DistributedDataParallel around"
        )
    check_unsharded(model.parameters())


def apply(
    model: nn.Module, optimizers: list[Optimizer], config: Any
) -> tuple[list[Optimizer], list[Any]]:
    """Convert the weights in place, and wrap each optimizer as the config asks.

    Returns the optimizers to use, and the handles of hooks on the model for `remove`.
    """
    optimized = {p for one in optimizers for group in one.param_groups for p in group["params"]}
    others = () if config.weights == KEEP else _trained_by_others(model, optimized)
    frozen = [p for p in model.parameters() if p not in optimized]
    around = partial(_around, model, config, frozen)
    before = {param.dtype for param in model.parameters()}
    low = None if config.weights == KEEP else parse(config.weights).dtype
    if config.optim.device == CPU:  # there are rules for states: see `check`
        optimizers = [HostStates(cast(CompressedStates, one), around) for one in optimizers]
    else:
        optimizers = [around(one) for one in optimizers]
    handles: list[Any] = []
    if low is not None:
        # After the interception's own hook: the copies are not the user's to keep alive.
        handles += dtypes.hook(model, low, outputs=config.float32_outputs and low not in before)
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        warnings.warn(
            f"{others[0]}{more}: require gradients, are in no group of the optimizer, and "
            f"weights={config.weights!r} has rounded them without a correction, so that small "
            "updates by another optimizer are lost; allowed: memtrain.wrap(model, [first, second]) "
            "with every optimizer, or weights=keep; requires_grad_(False) if not trained",
            RuntimeWarning,
            stacklevel=4,
        )
    if config.gradients == RELEASE:
        handles.append(model.register_forward_pre_hook(refuse_released))
    return optimizers, handles


def _trained_by_others(model: nn.Module, optimized: set[Tensor]) -> list[str]:
    """Return the names of trained, rounded weights that no wrapped optimizer steps."""
    kept = optimized.union(keeps_float32(model))
    return [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p.dtype == torch.float32 and p not in kept
    ]


def masters_of(optimizer: Any) -> Any:
    """Return the `SplitWeights` or `HostStates` that has float32 masters, or None."""
    return find(optimizer, SplitWeights, HostStates)


def _around(
    model: nn.Module,
    config: Any,
    frozen: list[nn.Parameter],
    optimizer: Optimizer,
) -> Optimizer:
    """Wrap an optimizer for the config's weights and gradients.

    `frozen` are the parameters without an optimizer. On the host, the optimizer steps copies.
    """
    if config.weights != KEEP:
        keep, seed = keeps_float32(model), config.seed
        optimizer = SplitWeights(optimizer, config.weights, seed=seed, keep=keep, frozen=frozen)
    if config.gradients == RELEASE:
        release = config.release
        optimizer = ReleaseGradients(
            optimizer,
            clip=release.clip,
            limit=release.limit,
            loss_scale=release.loss_scale,
            skip_nonfinite=release.skip_nonfinite,
            accumulate=release.accumulate,
            seed=config.seed,
        )
    return optimizer


def remove(optimizers: list[Optimizer], handles: list[Any]) -> list[Optimizer]:
    """Undo `apply`, and return the optimizers that it was called with."""
    for handle in handles:
        handle.remove()
    return [_inside(optimizer) for optimizer in optimizers]


def _inside(optimizer: Optimizer) -> Optimizer:
    host = optimizer if isinstance(optimizer, HostStates) else None
    if host is not None:
        optimizer = host.release_inner()
    if isinstance(optimizer, ReleaseGradients):
        optimizer = optimizer.detach()
    if isinstance(optimizer, SplitWeights):
        refuse_training(models_in_ddp(optimizer.corrections))
        optimizer = optimizer.restore()
    return optimizer if host is None else host.move_back()
