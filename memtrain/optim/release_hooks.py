"""The options and hooks of gradient release, and torch's random state between its two passes."""

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from memtrain.optim.around import Link

CLIPS = ("none", "value", "parameter", "previous", "two_pass")
"""How gradients may be clipped; `ReleaseGradients` says what each does."""


class Releasing(Protocol):
    """What the hooks call."""

    def arrived(self, param: Tensor) -> None:
        """A parameter's gradient is complete."""

    def follow(self, ddp: Any) -> None:
        """Update after the all-reduces of a DistributedDataParallel."""


class Arrived:
    """The hook on a parameter; it does not keep the optimizer alive."""

    def __init__(self, release: Releasing) -> None:
        self._release = Link(release)

    def __call__(self, param: Tensor) -> None:
        """Tell the optimizer, if it is there."""
        release = self._release()
        if release is not None:
            release.arrived(param)


class FollowDDP:
    """A forward pre-hook that lets updates follow DDP's all-reduce once it finds the model in it.

    Args:
        release: The optimizer that `wrap` returned.
    """

    def __init__(self, release: Releasing) -> None:
        self._release = Link(release)
        self._found = False

    def __call__(self, module: Any, args: Any) -> None:
        """Look for an active DistributedDataParallel, until one was found."""
        if self._found or not torch.distributed.is_available():
            return
        ddp = torch.nn.parallel.DistributedDataParallel._active_ddp_module
        release = self._release()
        if ddp is not None and release is not None:
            self._found = True
            release.follow(ddp)


def check_options(clip: str, limit: float, loss_scale: float) -> None:
    """Raise ValueError for options of `ReleaseGradients` that are not allowed."""
    if clip not in CLIPS:
        raise ValueError(f"clip={clip!r} is unknown; allowed: {', '.join(CLIPS)}")
    for name, value in (("limit", limit), ("loss_scale", loss_scale)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value} is out of range; allowed: above 0 and finite")


def random_state() -> tuple[Tensor, list[Tensor]]:
    """The states of torch's random generators, CPU and CUDA."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return torch.get_rng_state(), cuda


def set_random_state(state: tuple[Tensor, list[Tensor]]) -> None:
    """Put back what `random_state` gave."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
