"""The options and hooks of gradient release, and torch's random state between its two passes."""

import math
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from memtrain.optim.wrappers.around import Link

CLIPS = ("none", "value", "parameter", "previous", "two_pass")
"""How gradients may be clipped; `ReleaseGradients` says what each does."""


class Releasing(Protocol):
    """What the hooks call."""

    def arrived(self, param: Tensor) -> None:
        """A parameter's gradient is complete."""

    def follow(self, ddp: Any) -> None:
        """Update after the all-reduces of a DistributedDataParallel."""

    def _update(self, param: Tensor, grad: Tensor) -> None:
        """Clip and apply one gradient."""


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


def hook_buckets(release: Releasing, ddp: Any) -> None:
    """Register a communication hook that updates after each bucket's all-reduce.

    Args:
        release: Is not kept alive.
        ddp: A DistributedDataParallel without a communication hook.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    own = weakref.ref(release)

    def update(bucket: Any, reduced: Any) -> Tensor:
        buffer = reduced.value()[0] if isinstance(reduced.value(), list) else reduced.value()
        release = own()
        if release is not None:
            for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                release._update(param, grad)
        return buffer

    # DDP checks these annotations.
    def reduce_then_update(
        group: Any, bucket: torch.distributed.GradBucket
    ) -> torch.futures.Future[Tensor]:
        return allreduce_hook(group, bucket).then(lambda done: update(bucket, done))

    ddp.register_comm_hook(None, reduce_then_update)


def check_options(clip: str, limit: float, loss_scale: float, accumulate: int) -> None:
    """Raise ValueError for options of `ReleaseGradients` that are not allowed."""
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate} is out of range; allowed: at least 1")
    if accumulate > 1 and clip == "two_pass":
        raise ValueError(
            f"accumulate={accumulate} with clip='two_pass': its closure runs backward once"
        )
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


def norm_of(grad: Tensor) -> float:
    """The norm of a whole gradient, float64 ones in float64, all others in float32."""
    dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    norm: Any = torch.linalg.vector_norm(grad, dtype=dtype)
    whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole.item()


def refuse_scaler(release: object) -> None:
    """Raise RuntimeError if a GradScaler has handed over what it found."""
    given = [name for name in ("grad_scale", "found_inf") if name in vars(release)]
    for name in given:
        delattr(release, name)
    if given:
        raise RuntimeError(
            "GradScaler must see all gradients before any update, and they were applied and "
            "freed in backward. Without it: multiply the loss by a constant and give it as "
            "loss_scale, then updates with Inf are skipped parameter by parameter and counted "
            "in `skipped`; or clip='two_pass' with step(closure), which skips the whole step"
        )
