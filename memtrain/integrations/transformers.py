"""Hugging Face's `Trainer` and its subclasses, such as TRL's trainers."""

from typing import Any, TypeVar

from torch.optim import Optimizer

import memtrain
from memtrain.config.sources import KEEP
from memtrain.integrations.framework import config_of, for_framework, passes, uses_ddp
from memtrain.optim.states.first_step import inner_optimizer
from memtrain.optim.wrappers.host_states import releasing
from memtrain.optim.wrappers.release import ReleaseGradients
from memtrain.optim.wrappers.weights import parse
from memtrain.wrapped import is_wrapped_with

T = TypeVar("T")


def memtrain_trainer(trainer: type[T], cfg: Any = None) -> type[T]:
    """Return a subclass of a trainer that wraps model and optimizer when it creates the optimizer.

    This is before DDP or FSDP2 and before the scheduler. Under FSDP2, a config that changes weights
    or gradients is applied after sharding, to weights that were converted before. Checkpoints of
    the trainer resume bit for bit. If gradients are released, the config gets `max_grad_norm` and
    `gradient_accumulation_steps` (`for_framework`).

    Args:
        trainer: `transformers.Trainer`, `trl.SFTTrainer` ...; made with the same arguments.
        cfg: Anything that `memtrain.wrap` takes.

    Returns:
        The subclass. Making one raises ValueError for arguments that work against the config:
        TRL's `activation_offloading`, and `gradient_checkpointing` where the config recomputes
        layers itself.

    Example:
        >>> from types import SimpleNamespace
        >>> class Trainer:
        ...     def __init__(self, args):
        ...         self.args = args
        >>> memtrain_trainer(Trainer, "balanced")(SimpleNamespace(activation_offloading=True))
        Traceback (most recent call last):
        ...
        ValueError: activation_offloading=True: ...
    """
    bases = (_WrappingTrainer, trainer)
    return type(f"Memtrain{trainer.__name__}", bases, {"memtrain_config": cfg})  # pyright: ignore


class _WrappingTrainer:
    """Before a trainer among the bases of a class; only methods that trainers document."""

    memtrain_config: Any = None
    args: Any
    accelerator: Any
    model: Any
    optimizer: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check(self.args, self.memtrain_config)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        """Return the trainer's optimizer, wrapped together with the model."""
        optimizer = super().create_optimizer(*args, **kwargs)  # pyright: ignore
        model = (*args, kwargs.get("model"), self.model)[0] or self.model
        if self._waits_for_shards():
            weights = config_of(self.memtrain_config).weights
            if weights != KEEP:
                mixed = self.accelerator.mixed_precision
                if mixed != "no":
                    raise ValueError(
                        f"weights={weights!r} under FSDP2 with {mixed}=True: accelerate would "
                        f"convert them to float32; allowed: {mixed}=False, or weights=keep"
                    )
                model.to(parse(weights).dtype)
        else:
            self._wrap(model, optimizer)
        return self.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's scheduler; a sharded model is wrapped first."""
        if self._waits_for_shards():
            self._wrap(self.model, self.optimizer)
        return super().create_scheduler(*args, **kwargs)  # pyright: ignore

    def _wrap(self, model: Any, optimizer: Any) -> None:
        if is_wrapped_with(model, optimizer):
            return
        ddp, steps = uses_ddp(self.accelerator), self.args.gradient_accumulation_steps
        config = for_framework(
            self.memtrain_config,
            norm=self.args.max_grad_norm,
            accumulate=1 if ddp else passes(self.accelerator, steps),
            ddp=ddp,
            owner="Trainer",
        )
        _, self.optimizer = memtrain.wrap(model, optimizer, config)

    def _waits_for_shards(self) -> bool:
        """Return whether FSDP2 shards parameters whose weights or gradients the config changes."""
        config = config_of(self.memtrain_config)
        kept = config.weights == KEEP and config.gradients == KEEP
        return not kept and getattr(self.accelerator, "is_fsdp2", False)

    def _clip_grad_norm(self, model: Any) -> Any:
        released = self._released()
        return super()._clip_grad_norm(model) if released is None else released.norm  # pyright: ignore

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        released = self._released()
        if released is None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)  # pyright: ignore
        return released.norm

    def _released(self) -> ReleaseGradients | None:
        """Return the optimizer if it releases gradients: the trainer then has none to clip."""
        return releasing(inner_optimizer(self.optimizer))  # inside accelerate's


def _check(args: Any, cfg: Any) -> None:
    wanted = config_of(cfg).activations
    saves = wanted.rules or wanted.exceptions or wanted.sites or wanted.recompute_inputs != KEEP
    if getattr(args, "activation_offloading", False) and saves:
        raise ValueError(
            "activation_offloading=True: its saved-tensor hooks would run instead of memtrain's "
            "(autograd calls the innermost hooks); allowed: False, or a config with "
            "activations=none"
        )
    if getattr(args, "gradient_checkpointing", False) and wanted.recompute:
        raise ValueError(
            "gradient_checkpointing=True with a config that recomputes layers itself "
            f"(activations.recompute={list(wanted.recompute)}); allowed: False"
        )
