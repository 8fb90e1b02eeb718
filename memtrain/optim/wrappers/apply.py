"""Weights and gradients under `wrap`: an optimizer around the optimizer, and hooks."""

from functools import partial
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memtrain.compressors.base import Compressor
from memtrain.optim.states.shards import check_unsharded
from memtrain.optim.wrappers.release import ReleaseGradients, check_complex, follow_ddp
from memtrain.optim.wrappers.weights import SplitWeights, cast_inputs, keeps_float32
from memtrain.optim.wrappers.wrapper import WeakRef

KEEP, RELEASE = "keep", "release"


def check(model: nn.Module, config: Any) -> None:
    """Raise ValueError for what `apply` could not do; nothing is changed."""
    if config.gradients == RELEASE:
        check_complex(model.parameters(), config.release.clip, config.release.accumulate)
    if config.weights == KEEP:
        return
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"weights={config.weights!r} with a DistributedDataParallel: its buckets have the "
            "weights' dtype already. Wrap the model first, then put DistributedDataParallel around"
        )
    check_unsharded(model.parameters())


def apply(
    model: nn.Module, optimizer: Optimizer, config: Any, sums: Compressor
) -> tuple[Optimizer, WeakRef[SplitWeights], list[Any]]:
    """Convert the weights, and put what the config asks for around the optimizer.

    Args:
        model: Its parameters are converted in place.
        optimizer: Plain, or with compressed states.
        config: Of the plan.
        sums: The compressor of gradients that wait for a step of several backward passes.

    Returns:
        The optimizer to use, a reference to its `SplitWeights` (empty without), and the handles
        of hooks on the model, which `remove` takes back.
    """
    weights, handles = WeakRef[SplitWeights](), []
    if config.weights != KEEP:
        held = {p for group in optimizer.param_groups for p in group["params"]}
        frozen = [p for p in model.parameters() if p not in held]
        keep, seed = keeps_float32(model), config.seed
        split = SplitWeights(optimizer, config.weights, seed=seed, keep=keep, frozen=frozen)
        optimizer, weights = split, WeakRef(split)
        cast = partial(cast_inputs, split.format.dtype)
        # After the interception's own hook: the copies are not the user's to keep alive.
        handles.append(model.register_forward_pre_hook(cast, with_kwargs=True))
    if config.gradients == RELEASE:
        own = config.release
        release = ReleaseGradients(
            optimizer,
            clip=own.clip,
            limit=own.limit,
            loss_scale=own.loss_scale,
            skip_nonfinite=own.skip_nonfinite,
            accumulate=own.accumulate,
            sums=sums,
            seed=config.seed,
        )
        optimizer = release
        if isinstance(model, DistributedDataParallel):
            release.follow(model)
        else:
            follow = partial(follow_ddp, WeakRef(release))
            handles.append(model.register_forward_pre_hook(follow))
    return optimizer, weights, handles


def check_removable(optimizer: Optimizer, config: Any) -> None:
    """Raise ValueError unless this is the optimizer that `apply` gave."""
    expected = {RELEASE: ReleaseGradients}.get(config.gradients)
    if expected is None and config.weights != KEEP:
        expected = SplitWeights
    if expected is not None and not isinstance(optimizer, expected):
        given = type(optimizer).__name__
        raise ValueError(f"unwrap needs the optimizer that wrap returned, not a plain {given}")


def remove(optimizer: Optimizer, handles: list[Any]) -> Optimizer:
    """Take back what `apply` did.

    Args:
        optimizer: What `apply` gave.
        handles: Of its hooks on the model.

    Returns:
        The optimizer that was given to `apply`; the weights are float32 again if they were.
    """
    for handle in handles:
        handle.remove()
    if isinstance(optimizer, ReleaseGradients):
        optimizer = optimizer.detach()
    if isinstance(optimizer, SplitWeights):
        optimizer = optimizer.restore()
    return optimizer
