"""Steps whose gradients overflowed are skipped; a user's own GradScaler takes over."""

import sys
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from memtrain.precision.boundary import Boundary

DEPTH = 12  # of calls between a GradScaler's step and an optimizer's


class SkipOverflows:
    """Hooks on an optimizer's step.

    A skipped step finds no gradients, so neither parameters nor states nor step counts change; the
    gradients are there again after it.

    Args:
        boundary: Knows whether a gradient has overflowed.
    """

    def __init__(self, boundary: Boundary) -> None:
        self.boundary = boundary
        self._hidden: list[tuple[Tensor, Tensor]] = []

    def attach(self, optimizer: Optimizer) -> list[Any]:
        """Put the hooks on; gives their handles."""
        return [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        scale = self.boundary.state.scale
        if scale.active and _inside_grad_scaler():
            scale.turn_off("left to the GradScaler that calls the optimizer")
        overflowed, self.boundary.overflowed = self.boundary.overflowed, False
        if not overflowed or scale.off:
            return
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._hidden.append((p, p.grad))
                    p.grad = None

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        hidden, self._hidden = self._hidden, []
        for p, grad in hidden:
            p.grad = grad


def _inside_grad_scaler() -> bool:
    frame = sys._getframe(1)
    for _ in range(DEPTH):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            return True
        frame = frame.f_back
    return False
