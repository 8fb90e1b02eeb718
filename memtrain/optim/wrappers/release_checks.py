"""Checks of released gradients: what they cannot serve is refused before anything changes."""

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.optim.states.known_optimizers import is_separable
from memtrain.optim.states.shards import local

CLIPS = ("none", "value", "parameter", "previous", "two_pass", "global_norm")
"""How gradients may be clipped; `ReleaseGradients` says what each does."""
REQUIRED = (
    "All that gradients=release asks of a loop: optimizer.step() after every backward, or "
    "release.accumulate; release.clip and release.limit in place of clip_grad_norm_; learning "
    "rates that change after step() and before the next backward; release.loss_scale in place of "
    "a GradScaler"
)
"""The end of each error of a loop that breaks one of these, so that the next run has none."""


def check_options(
    clip: str, limit: float, loss_scale: float, accumulate: int, prefix: str = ""
) -> None:
    """Raise ValueError for options out of range; `prefix` precedes their names in the error."""
    if accumulate < 1:
        raise ValueError(f"{prefix}accumulate={accumulate} is out of range; allowed: 1 or more")
    if accumulate > 1 and clip == "two_pass":
        raise ValueError(
            f"{prefix}accumulate={accumulate}; allowed with {prefix}clip=two_pass: 1, since its "
            "closure runs backward once"
        )
    if clip not in CLIPS:
        raise ValueError(f"{prefix}clip={clip!r} is unknown; allowed: {', '.join(CLIPS)}")
    for name, value in (("limit", limit), ("loss_scale", loss_scale)):
        if not 0 < value < math.inf:
            raise ValueError(f"{prefix}{name}={value} is out of range; allowed: above 0 and finite")


def check_complex(params: Iterable[Tensor], clip: str, accumulate: int) -> None:
    """Raise ValueError for complex parameters if an option needs real gradients."""
    kept = {"clip='value'": clip == "value", f"accumulate={accumulate}": accumulate > 1}
    for param in params:
        for option in [name for name, is_set in kept.items() if is_set and param.is_complex()]:
            raise ValueError(
                f"{option} takes gradients of real numbers, and a parameter of shape "
                f"{tuple(param.shape)} is {param.dtype}; allowed for it: clip=none, parameter, "
                "previous or two_pass, and accumulate=1"
            )


def refuse_scaler(release: object) -> None:
    """Raise RuntimeError if a GradScaler has handed over what it found."""
    found = [name for name in ("grad_scale", "found_inf") if name in vars(release)]
    for name in found:
        delattr(release, name)
    if found:
        raise RuntimeError(
            "GradScaler must see all gradients before any update, but backward has applied "
            "and freed them. Without a scaler: multiply the loss by a constant and set loss_scale "
            "to it; updates with Inf are then skipped per parameter and counted in `skipped`. Or "
            "use clip='two_pass' with step(closure), which skips all updates of the step"
        )


def second_gradient(param: Tensor) -> RuntimeError:
    """The error of a parameter whose gradient comes again before the step has ended."""
    return RuntimeError(
        f"a second gradient of a parameter of shape {tuple(param.shape)} arrived before "
        "optimizer.step(): the first has been applied and freed, so gradients cannot be "
        "accumulated. Call optimizer.step() after every backward, set release.accumulate "
        "to the number of backward passes of a step, or use gradients=keep; what a loss "
        f"only passes through (a GAN's discriminator) needs requires_grad_(False). {REQUIRED}"
    )


def broken_off(done: int, count: int) -> RuntimeError:
    """The error of a gradient after a backward that raised when some had been applied."""
    return RuntimeError(
        "a backward before this one raised (out of memory, for example) after "
        f"{done} of {count} parameters had been updated: call optimizer.zero_grad() after such an "
        "error, which ends that step, and go on with the next batch"
    )


def warn_of_skipped(what: str) -> None:
    """Warn of the first update, or step, that is skipped for NaN or Inf."""
    warnings.warn(
        f"{what} was skipped: its gradient has NaN or Inf. optimizer.skipped counts such updates "
        "from now on, without a warning; release.skip_nonfinite=false applies them",
        RuntimeWarning,
        stacklevel=3,
    )


def warn_of_late_rates(used: list[float], now: list[float]) -> None:
    """Warn if a learning rate was changed after backward had used the earlier one."""
    if used != now:
        warnings.warn(
            f"learning rates were {used} in the backward, whose updates used them, and are {now} "
            f"in step(): with gradients=release the change comes a step late. {REQUIRED}",
            RuntimeWarning,
            stacklevel=4,
        )


def check_separable(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer that may read the gradients of all parameters at once."""
    if is_separable(optimizer):
        return
    raise ValueError(
        "gradients='release' updates each parameter separately in the backward, and "
        f"{type(optimizer).__name__} may read all gradients (only torch's and memtrain's "
        "optimizers, and classes with separable=True, are known not to); allowed: gradients=keep"
    )


def check_separate(params: Iterable[Tensor]) -> None:
    """Raise ValueError for parameters whose in-place updates count as changes of each other.

    Views of one tensor (`weight.unbind()`) share its version counter: an update of one inside the
    backward would invalidate the saved tensors of the others.
    """
    by_storage: dict[int, list[Tensor]] = defaultdict(list)
    for param in {id(param): param for param in params if param.requires_grad}.values():
        part = local(param)
        if part.numel() and not part.is_meta:
            by_storage[part.untyped_storage()._cdata].append(part)
    for first, *others in by_storage.values():
        before = [other._version for other in others]
        if others:
            torch.autograd.graph.increment_version(first)
        for other, version in zip(others, before, strict=True):
            if other._version != version:
                raise ValueError(
                    f"gradients='release' with parameters of shapes {tuple(first.shape)} and "
                    f"{tuple(other.shape)} that are views of one tensor (unbind, chunk, split): "
                    "the update of one inside the backward counts as a change of the other, which "
                    "autograd refuses; allowed: parameters of their own (clone each view before "
                    "nn.Parameter), or gradients=keep"
                )


def check_gradient_readers(model: nn.Module) -> None:
    """Raise ValueError for a model with parts that read `.grad` after the backward."""
    for name, module in model.named_modules():
        if any(base.__name__.startswith("AdaLora") for base in type(module).__mro__):
            raise ValueError(
                f"gradients='release' with PEFT's AdaLoRA ({name or 'the model'} is a "
                f"{type(module).__name__}): update_and_allocate reads the gradients after the "
                "backward, when they are freed; allowed: gradients=keep, or LoraConfig"
            )
