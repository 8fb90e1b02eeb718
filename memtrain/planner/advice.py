"""Advice where no plan fits a budget; its sizes are tried on predicted steps."""

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
"""Most devices to advise: over more, the parts that are not sharded take the budget."""
_NAMES = {"batch": "a smaller batch", "seq": "shorter sequences"}
_LINES = {
    "batch": "a batch of {size} in place of {now} (and accumulated gradients)",
    "seq": "sequences of {size} in place of {now}",
}


def advice(
    budget: int, smallest: Moment, batch: Any, goal: Goal, largest: Callable[[str, int], int]
) -> list[str]:
    """Advise how to make a step fit whose smallest known peak is `smallest`.

    `largest` maps `batch` or `seq`, and a limit, to the largest such size whose peak fits under the
    smallest plan; 0 if none does.

    Example:
        >>> peak = Moment("step", "step", 100, {"weights": 80, "inputs": 20})
        >>> goal = Goal(allow=("quantise", "recompute", "release", "weights"))
        >>> advice(60, peak, (), goal, lambda what, most: 0)
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
    return lines


def _smaller(batch: Any, largest: Callable[[str, int], int]) -> Iterator[str]:
    """Yield the first of a smaller batch and shorter sequences that fits, or why it is unknown."""
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
    """Return the number of samples and, for text, of tokens per sample."""
    first = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if first is None:
        tensors = (x for x in tree_leaves(batch) if isinstance(x, Tensor) and x.dim())
        first = next(tensors, None)
    if first is None:
        return {}
    text = first.dim() == 2 and not first.is_floating_point()
    return dict(zip(WHAT, first.shape[: 1 + text], strict=False))
