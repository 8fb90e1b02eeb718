"""The largest batch, or the longest sequence, whose training step fits a memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from memtrain.activations.trace.call_arguments import check_order
from memtrain.activations.trace.fake_copies import caches_cleared
from memtrain.audit.peak.predict import predict
from memtrain.audit.peak.timeline import Timeline
from memtrain.audit.peak.training_step import StepOptions, check_batch, default_optimizer
from memtrain.config.sizes import format_size, parse_size

WHAT = ("batch", "seq")
GROWTH = 8
"""While all sizes fit, the next size is at most this multiple of the last one."""


@dataclass(frozen=True)
class Largest:
    """The largest size that fits, and all simulated peaks."""

    size: int
    """Samples, or tokens per sample; 0 if no size fits."""
    timeline: Timeline | None
    """The step of that size; None for size 0."""
    peaks: Mapping[int, int]
    """Size -> bytes that the step needs, for every simulated size."""
    what: str = "batch"
    """`batch` or `seq`."""
    memory: int = 0
    """Bytes of the memory."""

    def __str__(self) -> str:
        lines = [f"largest {self.what} in {format_size(self.memory)}: {self.size or 'none'}"]
        for size, nbytes in self.peaks.items():
            fits = "fits" if nbytes <= self.memory else "does not fit"
            lines.append(f"{size:>10,}  {format_size(nbytes):>12}  {fits}")
        return "\n".join(lines)


@caches_cleared()
def largest(  # noqa: PLR0913 (most have a default)
    model: nn.Module,
    batch: Any,
    cfg: Any,
    memory: str | int,
    *,
    optimizer: Optimizer | None = None,
    what: str = "batch",
    most: int = 2**20,
    options: StepOptions = StepOptions(),  # noqa: B008 (a frozen value)
) -> Largest:
    """Search for the largest batch or sequence length whose predicted peak fits.

    Each size is a simulated step (`predict`). The next size is extrapolated linearly from two known
    sizes, so that a few steps are enough. The peak must not fall if the size grows.

    Args:
        model: Real or fake; not changed.
        batch: A batch of any size. With `batch`, dimension 0 grows in every tensor where it equals
            dimension 0 of the first tensor. With `seq`, every later dimension grows that equals
            dimension 1 of the first tensor.
        cfg: Anything that `memtrain.wrap` takes; None for PyTorch without memtrain.
        memory: Memory of the device, such as `"24GiB"`, or bytes. On CUDA, the CUDA context and
            the allocator's cache count (`Timeline.needed`).
        optimizer: By default `torch.optim.AdamW` for the trained parameters; not changed.
        what: `batch` or `seq`.
        most: The largest size to try, such as a model's number of positions.
        options: Options of the step.

    Returns:
        The size, at most `most`, with all simulated peaks.

    Raises:
        ValueError: If `what` is unknown, a size is below 1, the batch has no such dimension, or
            `predict` raises it.
        TypeError: If `predict` raises it.

    Memory:
        Fake tensors allocate no data.

    Example:
        >>> model = nn.Linear(64, 64)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> found = largest(model, torch.ones(1, 64), None, "1MiB", optimizer=optimizer)
        >>> found.size, found.peaks[found.size] <= 2**20 < found.peaks[found.size + 1]
        (1983, True)
    """
    check_order(model, batch)
    memory = parse_size(memory, "memory")
    optimizer = default_optimizer(model) if optimizer is None else optimizer
    _check(batch, memory, what, most)
    timelines: dict[int, Timeline] = {}

    def peak(size: int) -> int:
        if size not in timelines:
            sized = resized(batch, what, size)
            timelines[size] = predict(model, optimizer, sized, cfg, options)
        return timelines[size].needed.nbytes

    size = search(peak, memory, most)
    peaks = {tried: timelines[tried].needed.nbytes for tried in sorted(timelines)}
    return Largest(size, timelines.get(size), peaks, what, memory)


def search(peak: Callable[[int], int], memory: int, most: int) -> int:
    """Return the largest size in 1 .. `most` whose peak (not falling) fits; 0 if none fits.

    Example:
        >>> search(lambda size: 10 + 3 * size, 100, 1000)
        30
    """
    if peak(1) > memory:
        return 0
    fits, over, low, high = 1, most + 1, 1, min(2, most)
    for attempt in count(1):
        if over - fits <= 1:
            break
        slope = (peak(high) - peak(low)) / max(1, high - low)
        reach = int(min((memory - peak(fits)) / slope, over)) if slope > 0 else over
        # Extrapolation makes small steps on a bent curve, and a size far beyond the memory takes
        # long to simulate.
        third = attempt % 3 == 0
        if over <= most:
            ahead = (over - fits) // 2 if third else reach
        else:
            ahead = min(max(reach, fits) if third else reach, GROWTH * fits)
        guess = min(fits + max(1, ahead), over - 1)
        low, high = fits, guess
        fits, over = (guess, over) if peak(guess) <= memory else (fits, guess)
    return fits


def resized(batch: Any, what: str, size: int) -> Any:
    """Return a batch of another size, without data.

    Example:
        >>> tokens = torch.ones(2, 8)
        >>> resized({"input_ids": tokens, "mask": torch.ones(2, 1, 8, 8)}, "seq", 5)["mask"].shape
        torch.Size([2, 1, 5, 5])
    """
    return tree_map_only(
        Tensor, partial(_resized, old=_extent(batch, what), what=what, new=size), batch
    )


def _resized(x: Tensor, *, old: int, what: str, new: int) -> Tensor:
    shape = [
        new if length == old and (dimension == 0) == (what == "batch") else length
        for dimension, length in enumerate(x.shape)
    ]
    return torch.empty(shape, dtype=x.dtype, device="meta")


def _extent(batch: Any, what: str) -> int:
    """Return the batch's size."""
    dim = WHAT.index(what)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > dim:
            return leaf.shape[dim]
    raise ValueError(f"what={what!r}: no tensor of the batch has {dim + 1} dimensions")


def _check(batch: Any, memory: int, what: str, most: int) -> None:
    check_batch(batch)
    if what not in WHAT:
        raise ValueError(f"unknown what={what!r}; allowed: {', '.join(WHAT)}")
    for name, value in (("memory", memory), ("most", most)):
        if value < 1:
            raise ValueError(f"{name}={value} is out of range; allowed: 1 or more")
    _extent(batch, what)
