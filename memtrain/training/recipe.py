"""The optimizer of a run and its learning rate."""

import math

import torch
from torch import nn

from memtrain.training.settings import OptimizerConfig


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Build AdamW; biases and norms get no weight decay."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    first, second = config.betas
    return torch.optim.AdamW(groups, lr=config.lr, betas=(first, second), eps=config.eps)


def learning_rate(step: int, *, peak: float, warmup: int, steps: int, final: float) -> float:
    """Return the rate: a linear warm-up, then a cosine down to the fraction `final` of the peak.

    Example:
        >>> [learning_rate(s, peak=1.0, warmup=2, steps=4, final=0.0) for s in range(5)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * share)))
