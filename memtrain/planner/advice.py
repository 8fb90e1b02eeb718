"""Advice where no plan fits a budget; sizes and noise in it are tried on predicted steps."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from memtrain.audit.peak import Moment
from memtrain.audit.peak.largest import WHAT
from memtrain.audit.peak.predict import MEASURE
from memtrain.audit.peak.timeline import GRADIENTS, STATES, WEIGHTS
from memtrain.config.sizes import format_size
from memtrain.planner.goal import ALLOWED, Goal

_MEANS = {
    "quantise": "compresses saved tensors and optimizer states",
    "recompute": "recomputes blocks in the backward",
    "release": "lets each gradient go as soon as it is used",
    "weights": "keeps weights in 2 bytes, or in 3 with a correction",
}
_DEVICES = 64
"""To shard over more is no advice: what is not sharded takes the budget."""
_NAMES = {"batch": "a smaller batch", "seq": "shorter sequences"}
_LINES = {
    "batch": "a batch of {size} in place of {now} (and accumulated gradients)",
    "seq": "sequences of {size} in place of {now}",
}


def advice(
    budget: int,
    smallest: Moment,
    batch: Any,
    goal: Goal,
    largest: Callable[[str, int], int],
    enough_error: Callable[[], float | None],
) -> list[str]:
    """Advise how to make a step fit.

    Args:
        budget: Bytes.
        smallest: The moment of the smallest peak that was found.
        batch: What the model is called with.
        goal: What was asked.
        largest: `batch` or `seq`, and the most -> the largest such size whose peak fits under the
            smallest plan, 0 if none does.
        enough_error: A `max_error` with which a plan fits, or None if more noise does not help.

    Returns:
        Lines.

    Example:
        >>> peak = Moment("step", "step", 100, {"weights": 80, "inputs": 20})
        >>> goal = Goal(allow=("quantise", "recompute", "release", "weights"))
        >>> advice(60, peak, (), goal, lambda what, most: 0, lambda: None)
        ['weights, gradients and states (0.08 KiB) sharded over 2 devices']
    """
    fixed = sum(smallest.parts.get(name, 0) for name in (WEIGHTS, GRADIENTS, STATES))
    rest = smallest.nbytes - fixed
    lines: list[str] = []
    if fixed < budget:
        lines += _smaller(batch, largest)
    devices = -(-fixed // (budget - rest)) if rest < budget else 0
    if 1 < devices <= _DEVICES:
        lines.append(
            f"weights, gradients and states ({format_size(fixed)}) sharded over {devices} devices"
        )
    missing = [name for name in ALLOWED if name not in goal.names]
    if missing:
        means = "; ".join(_MEANS[name] for name in missing)
        lines.append(f"allow={','.join(ALLOWED)} ({means})")
    if "quantise" in goal.names and (not missing or goal.max_error < 1):
        error = enough_error()
        if error is not None:
            lines.append(f"max_error={error:g} (noise in units of the preset balanced's)")
    return lines


def _smaller(batch: Any, largest: Callable[[str, int], int]) -> Iterator[str]:
    """The first of a smaller batch and shorter sequences that fits, or why it is unknown."""
    for what, now in _sizes(batch).items():
        try:
            size = largest(what, now - 1) if now > 1 else 0
        except (RuntimeError, ValueError) as error:  # as of a loss that has this batch's labels
            first = str(error).partition("\n")[0].removesuffix(f": {MEASURE}")
            yield f"{_NAMES[what]} could not be tried: {first}"
            continue
        if size:
            yield _LINES[what].format(size=size, now=now)
            return


def _sizes(batch: Any) -> dict[str, int]:
    """Samples, and of text the tokens of each."""
    given = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if given is None:
        tensors = [x for x in tree_leaves(batch) if isinstance(x, Tensor) and x.dim()]
        given = tensors[0] if tensors else None
    if given is None:
        return {}
    text = given.dim() == 2 and not given.is_floating_point()
    return dict(zip(WHAT, given.shape[: 1 + text], strict=False))
