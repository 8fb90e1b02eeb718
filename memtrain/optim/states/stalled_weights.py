"""A warning if the learning rate is too small for the dtype of the weights."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from memtrain.kernels.dispatch import is_simulated
from memtrain.optim.states.per_parameter import stands_for
from memtrain.optim.states.shards import local
from memtrain.optim.states.targets import Part, Target

SAMPLE = 1024  # elements that are compared
FIRST_CHECK = 8  # steps: a schedule may warm up from nothing


class StalledWeights:
    """Checks at steps 8, 16, 32, ... that half-precision weights change, and warns once.

    The largest bfloat16 or float16 parameter is sampled. If no sampled element with a gradient
    changes, updates are below half a unit in the last place of nearly every weight.

    With released gradients, `before` is called per parameter: a step begins when a parameter occurs
    for the second time.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.warned = False
        self._seen: set[int] = set()  # in this step, the first of those that came together
        self._largest = 0  # elements, known after step 7
        self._checked = 0  # the last step that was examined

    def before(self, parts: Sequence[Part]) -> tuple[Target, Tensor, float] | None:
        """Return a sample for `after` if this step is checked; masters cannot stall."""
        self._count(parts)
        counts = self.steps == FIRST_CHECK - 1
        checks = self.steps >= FIRST_CHECK and not self.steps & (self.steps - 1)
        if self.warned or self._checked == self.steps or not (counts or checks):
            return None
        if is_simulated():  # nothing moves on fake tensors
            return None
        halves = [
            (target.param.numel(), target, float(group.get("lr", 1.0)))
            for group, targets in parts
            for target in targets
            if target.param.numel()
            and target.param.dtype in (torch.bfloat16, torch.float16)
            and not target.master.any
            and float(group.get("lr", 1.0)) > 0
        ]
        if not halves:
            return None
        size, target, lr = max(halves, key=lambda each: each[0])
        if counts or size < self._largest:
            self._largest = max(self._largest, size)
            return None
        self._checked = self.steps
        return target, _sample(target.param).clone(), lr

    def _count(self, parts: Sequence[Part]) -> None:
        first = next((targets[0].param for _, targets in parts if targets), None)
        key = id(stands_for(first))
        if not self._seen or key in self._seen:
            self._seen.clear()
            self.steps += 1
        self._seen.add(key)

    def after(self, seen: tuple[Target, Tensor, float] | None) -> None:
        """Warn if no sampled element with a gradient has changed."""
        if seen is None:
            return
        (param, grad, *_), old, lr = seen
        moving = _sample(grad) != 0
        if not bool(moving.any()) or bool((_sample(param) != old)[moving].any()):
            return
        self.warned = True
        warnings.warn(
            f"the weights have stalled: at lr={lr:g} no sampled weight of a {param.dtype} "
            f"parameter of shape {tuple(param.shape)} moved at step {self.steps}: updates "
            "are below half the last bit; keep a correction term or float32 weights, or raise lr",
            RuntimeWarning,
            stacklevel=4,
        )


def _sample(x: Tensor) -> Tensor:
    """Return about `SAMPLE` elements, spread over the first dimension, for any strides."""
    x = local(x.detach())
    while x.dim() > 1:
        x = x[:: max(1, x.shape[0] // 32)].flatten(0, 1) if x.dim() == 2 else x[:, 0]
    return x[:: max(1, x.numel() // SAMPLE)]
