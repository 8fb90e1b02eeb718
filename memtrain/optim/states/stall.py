"""A warning where a learning rate is too small for what the weights' dtype can hold."""

import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from memtrain.kernels import cpu
from memtrain.optim.states.shards import local

SAMPLE = 1024  # elements looked at
FIRST_LOOK = 8  # steps: a schedule may warm up from nothing


class StallWatch:
    """Looks at steps 8, 16, 32, ... whether the half-precision weights still move; warns once.

    The largest bfloat16 or float16 parameter stands for all: where no sampled element with a
    gradient changes, the update is below half a unit in the last place of nearly every weight.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.warned = False

    def before(
        self, groups: list[dict[str, Any]], masters: Collection[Tensor] = ()
    ) -> tuple[Tensor, Tensor, float] | None:
        """Copies for `after` to compare with, on the steps examined; `masters` cannot stall."""
        self.steps += 1
        if self.warned or self.steps < FIRST_LOOK or self.steps & (self.steps - 1):
            return None
        if cpu.is_dataless():  # nothing moves on fake tensors
            return None
        halves = [
            (param.numel(), k, param, float(group.get("lr", 1.0)))
            for k, group in enumerate(groups)
            for param in group["params"]
            if param.grad is not None
            and param.numel()
            and param.dtype in (torch.bfloat16, torch.float16)
            and param not in masters
            and float(group.get("lr", 1.0)) > 0
        ]
        if not halves:
            return None
        _, _, param, lr = max(halves, key=lambda each: each[0])
        return param, _sample(param).clone(), lr

    def after(self, seen: tuple[Tensor, Tensor, float] | None) -> None:
        """Warn if nothing moved that has a gradient."""
        if seen is None:
            return
        param, old, lr = seen
        moving = _sample(param.grad) != 0 if param.grad is not None else old != old
        if not bool(moving.any()) or bool((_sample(param) != old)[moving].any()):
            return
        self.warned = True
        warnings.warn(
            f"the weights have stalled: at lr={lr:g} no sampled weight of a {param.dtype} "
            f"parameter of shape {tuple(param.shape)} moved at step {self.steps}, since updates "
            "are below half its last place; keep a correction term or float32 weights, or raise lr",
            RuntimeWarning,
            stacklevel=4,
        )


def _sample(x: Tensor) -> Tensor:
    """At most some `SAMPLE` elements, spread over the first dimension; of any strides."""
    x = local(x.detach())
    while x.dim() > 1:
        x = x[:: max(1, x.shape[0] // 32)].flatten(0, 1) if x.dim() == 2 else x[:, 0]
    return x[:: max(1, x.numel() // SAMPLE)]
