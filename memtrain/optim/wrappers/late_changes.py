"""Detects gradients that are changed after the backward has applied them."""

from collections import Counter

from torch import Tensor

from memtrain.optim.states.shards import local
from memtrain.optim.wrappers.release_checks import REQUIRED


class LateChanges:
    """Keeps one applied gradient until the step ends, to detect clipping that comes too late.

    The gradient is that of a parameter with the fewest elements. `passes` is the number of backward
    passes of a step; 0 keeps no gradient.
    """

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self.fewest = 0
        """Elements of the smallest parameter."""
        self._kept: tuple[Tensor, Tensor, int] | None = None  # parameter, gradient, version
        self._arrived = Counter[Tensor]()

    def keeps(self, param: Tensor, grad: Tensor) -> bool:
        """Whether an applied gradient stays on its parameter until the step ends."""
        if self._kept is not None or not self.passes or param.numel() != self.fewest:
            return False
        self._arrived[param] += 1
        if self._arrived[param] != self.passes:  # autograd would add the next gradient to it
            return False
        self._kept = param, grad, local(grad)._version
        return True

    def is_kept(self, param: Tensor) -> bool:
        """Whether this parameter has the gradient that was applied and kept."""
        return self._kept is not None and self._kept[0] is param

    def refuse(self) -> None:
        """Raise RuntimeError if the kept gradient was replaced or modified."""
        if self._kept is None or self._kept[0].grad is None:
            return
        param, grad, version = self._kept
        if param.grad is not grad or local(grad)._version != version:
            raise RuntimeError(
                "gradients were changed between backward and step() (clip_grad_norm_, "
                "clip_grad_value_ or similar), but gradients=release had already applied and freed "
                "the unchanged gradients: set release.clip to value, parameter, previous or "
                "two_pass and release.limit in the config, and remove that call; or use "
                f"gradients=keep. {REQUIRED}"
            )

    def restart(self) -> None:
        """Count the gradients of a step from the beginning; the kept one stays."""
        self._arrived.clear()

    def forget(self) -> None:
        """Free the kept gradient: the next one begins a step."""
        if self._kept is not None:
            self._kept[0].grad = self._kept = None
        self._arrived.clear()
