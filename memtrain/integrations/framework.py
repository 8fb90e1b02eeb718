"""A config with the gradient clipping and accumulation of a training framework."""

import logging
from dataclasses import replace
from typing import Any

from memtrain.config.sources import Config, load
from memtrain.optim.wrappers.apply import CPU, KEEP, RELEASE, check_release
from memtrain.plan.plan import Plan

_LOG = logging.getLogger(__name__)


def config_of(cfg: Any) -> Config:
    """Return the config of anything that `memtrain.wrap` takes."""
    return cfg.config if isinstance(cfg, Plan) else load(cfg)


def passes(accelerator: Any, steps: int) -> int:
    """Return how many backward passes of a step bring gradients to the optimizer.

    FSDP2 reduces gradients only in the last of the `steps` passes, or with `sync_each_batch` in
    each.
    """
    if accelerator.num_processes == 1:
        return steps
    each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
    return steps if each else 1


def uses_ddp(accelerator: Any) -> bool:
    """Return whether an `accelerate.Accelerator` puts models into DistributedDataParallel."""
    return accelerator.num_processes > 1 and "FSDP" not in str(accelerator.distributed_type)


def by_norm(config: Config) -> str:
    """Return the `release.clip` that replaces clipping by the global norm."""
    return "global_norm" if config.optim.device == CPU else "previous"


def for_framework(
    cfg: Any,
    *,
    norm: float | None = None,
    value: float | None = None,
    accumulate: int = 1,
    ddp: bool = False,
    owner: str = "the framework",
) -> Any:
    """Return a config that clips and accumulates released gradients as the framework would.

    A framework does both between backward and step, when released gradients are freed. Clipping by
    the global `norm` becomes `release.clip=previous`, by the norm of the previous step. With
    `optim.device=cpu` it becomes `release.clip=global_norm`, which is exact. Settings of the config
    have precedence. Under DistributedDataParallel, whose buckets keep all gradients, released
    gradients become `gradients=keep`, and the framework clips.
    """
    config = config_of(cfg)
    if config.gradients != RELEASE:
        return cfg
    if ddp:
        _LOG.warning("gradients=keep, as DistributedDataParallel's buckets keep all gradients")
        config = replace(config, gradients=KEEP)
        check_release(config)
        return config
    release = config.release
    if release.clip == "none" and (norm or value):
        clip, limit = (by_norm(config), norm) if norm else ("value", value)
        release = replace(release, clip=clip, limit=limit)
        _LOG.warning("%s's clipping is release.clip=%s, release.limit=%g", owner, clip, limit)
    if release.accumulate == 1 and accumulate > 1:
        release = replace(release, accumulate=accumulate)
    return replace(config, release=release)
