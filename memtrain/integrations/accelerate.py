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
    """Call `memtrain.wrap` before `accelerator.prepare` or (without a GradScaler) after it.

    If gradients are released, the config gets `gradient_accumulation_steps` of the accelerator, and
    `max_norm`, the limit of the loop's `accelerator.clip_grad_norm_`. The other arguments, results
    and errors are those of `memtrain.wrap`.

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
