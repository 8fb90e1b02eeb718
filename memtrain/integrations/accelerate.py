"""Hugging Face's accelerate: `memtrain.wrap` for a loop around an `Accelerator`."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

import memtrain
from memtrain.integrations.framework import for_framework, passes, uses_ddp


def wrap(
    accelerator: Any,
    model: nn.Module,
    optimizer: Optimizer,
    cfg: Any = None,
    *,
    max_norm: float | None = None,
) -> tuple[nn.Module, Optimizer]:
    """`memtrain.wrap`, before `accelerator.prepare` or (without a GradScaler) after it.

    Where gradients are released, `gradient_accumulation_steps` of the accelerator goes into the
    config, and so does `max_norm`, in place of `accelerator.clip_grad_norm_`.

    Args:
        accelerator: An `accelerate.Accelerator`.
        model: The model.
        optimizer: Its optimizer.
        cfg: Anything that `memtrain.wrap` takes.
        max_norm: What the loop clips the global norm to; None without.

    Returns:
        As `memtrain.wrap`.

    Raises:
        ValueError: As `memtrain.wrap`.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> accelerator = SimpleNamespace(gradient_accumulation_steps=2, num_processes=1)
        >>> model = nn.Linear(4, 4)
        >>> model, optimizer = wrap(
        ...     accelerator, model, torch.optim.AdamW(model.parameters()), "all_four"
        ... )
        >>> optimizer.accumulate
        2
    """
    ddp = uses_ddp(accelerator)
    arriving = 1 if ddp else passes(accelerator, accelerator.gradient_accumulation_steps)
    config = for_framework(cfg, norm=max_norm, accumulate=arriving, ddp=ddp, owner="accelerate")
    return memtrain.wrap(model, optimizer, config)
