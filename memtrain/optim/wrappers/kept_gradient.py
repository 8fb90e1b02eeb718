"""A released gradient that stays until the step's end, and shows if gradients were changed late."""

from typing import NamedTuple

import torch
from torch import Tensor

from memtrain.optim.states.shards import local
from memtrain.optim.wrappers.release_checks import REQUIRED


class KeptGradient(NamedTuple):
    """A gradient that was applied, to be compared with the parameter's own at the step's end."""

    param: Tensor
    grad: Tensor
    version: int | None = None  # None where it is a copy

    def changed(self) -> bool:
        """Whether the gradient is another one by now."""
        now = self.param.grad
        if now is None:
            return False
        if self.version is None:
            return not torch.allclose(now.to(self.grad), self.grad, 0.0, 0.0, equal_nan=True)
        return now is not self.grad or local(now)._version != self.version


def refuse_changes(kept: KeptGradient | None) -> None:
    """Raise RuntimeError if the gradient that stayed shows that gradients were changed."""
    if kept is not None and kept.changed():
        raise RuntimeError(
            "gradients were changed between backward and step() (clip_grad_norm_, "
            "clip_grad_value_ or the like), but with gradients=release they had been applied "
            "and freed by then, unchanged: set release.clip to value, parameter, previous or "
            "two_pass and release.limit in the config, and leave that call out; or use "
            f"gradients=keep. {REQUIRED}"
        )
