"""Lightning: a callback that wraps the module and its optimizer when `fit` starts."""

from typing import Any

import memtrain
from memtrain.config.sources import KEEP
from memtrain.integrations.framework import config_of, for_framework
from memtrain.optim.wrappers.apply import RELEASE
from memtrain.optim.wrappers.ddp import models_in_ddp


def memtrain_callback(cfg: Any = None) -> Any:
    """Return a callback that wraps the module and the result of `configure_optimizers`.

    If gradients are released, the config gets `gradient_clip_val` and `accumulate_grad_batches`
    (`for_framework`), and the trainer does not clip during that fit. Its checkpoints resume bit for
    bit.

    Args:
        cfg: Anything that `memtrain.wrap` takes.

    Returns:
        A `lightning.pytorch.Callback`. When `fit` starts it raises ValueError for split weights
        where the strategy has put the module into DistributedDataParallel already.

    Raises:
        ImportError: If Lightning is not installed.
    """
    from lightning.pytorch import Callback  # pyright: ignore[reportMissingImports]

    limits: list[Any] = []  # for gradients, which the trainer has before a fit

    def on_fit_start(_: Any, trainer: Any, pl_module: Any) -> None:
        # The optimizer exists, and its checkpoint is not loaded yet.
        limits.append(trainer.gradient_clip_val)
        config = _config(cfg, trainer, pl_module)
        _, trainer.strategy.optimizers = memtrain.wrap(pl_module, trainer.optimizers, config)

    def on_end(_: Any, trainer: Any, *others: Any) -> None:
        while limits:
            trainer.gradient_clip_val = limits.pop()

    hooks = {"on_fit_start": on_fit_start, "on_fit_end": on_end, "on_exception": on_end}
    return type("Memtrain", (Callback,), hooks)()


def _config(cfg: Any, trainer: Any, pl_module: Any) -> Any:
    """Return the config with the trainer's clipping and accumulation."""
    config = config_of(cfg)
    if config.weights != KEEP and trainer.world_size > 1:
        raise ValueError(
            f"weights={config.weights!r} with {trainer.world_size} processes: the module is in "
            "DistributedDataParallel already; allowed: weights=keep, or memtrain.wrap in "
            "configure_optimizers"
        )
    ddp = bool(models_in_ddp(pl_module.parameters()))
    clip = float(trainer.gradient_clip_val or 0)
    by_value = "value" in str(trainer.gradient_clip_algorithm or "norm").lower()
    result = for_framework(
        cfg,
        norm=0 if by_value else clip,
        value=clip if by_value else 0,
        accumulate=trainer.accumulate_grad_batches if trainer.world_size == 1 else 1,
        ddp=ddp,
        owner="Lightning",
    )
    if config.gradients == RELEASE and not ddp:  # no gradients remain to be clipped
        trainer.gradient_clip_val = None
    return result
