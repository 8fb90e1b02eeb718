"""Prediction of the peak for a batch, or for the largest batch of a data set."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.activations.trace.call_arguments import check_order
from memtrain.audit.peak.largest import resized
from memtrain.audit.peak.predict import predict
from memtrain.audit.peak.timeline import Moment, Timeline
from memtrain.audit.peak.training_step import StepOptions, default_optimizer
from memtrain.config.sizes import format_size, parse_size

_MASK = "attention_mask"
_Size = tuple[int, int, bool]  # samples, tokens of each, whether some of them are padding


@dataclass(frozen=True)
class Estimate:
    """The predicted peak of a training step."""

    timeline: Timeline
    """The step of the batch, or of the largest batch of a data set."""
    worst: tuple[int, int] | None
    """Samples and tokens of that batch; None without `lengths`."""
    peaks: Mapping[tuple[int, int], int]
    """Samples and tokens -> peak in bytes, for every predicted size."""

    @property
    def peak(self) -> Moment:
        """The moment with most live bytes."""
        return self.timeline.peak

    def fits(self, memory: str | int) -> bool:
        """Return whether the step fits a memory of `"24GiB"`, or of a number of bytes.

        On CUDA, the allocator's cache and the CUDA context count (`Timeline.needed`).
        """
        return self.timeline.needed.nbytes <= parse_size(memory, "memory")

    def __str__(self) -> str:
        parts = ", ".join(f"{format_size(size)} {name}" for name, size in self.peak.parts.items())
        of = "" if self.worst is None else " for {} x {} tokens".format(*self.worst)
        needed = self.timeline.needed.nbytes
        card = (
            "" if self.timeline.reserved is None else f"; needs {format_size(needed)} of a device"
        )
        return f"{format_size(self.peak.nbytes)}{of} in {self.peak.label}: {parts}{card}"


def estimate(
    model: nn.Module,
    batch: Any = None,
    cfg: Any = None,
    *,
    optimizer: Optimizer | None = None,
    lengths: Iterable[int] | Iterable[Iterable[int]] | None = None,
    batch_size: int = 1,
    options: StepOptions = StepOptions(),  # noqa: B008 (a frozen value)
) -> Estimate:
    """Predict the peak of a training step by a simulation on fake tensors.

    The model's forward, backward and step run on fake tensors (`predict`); no formula is used. The
    prediction therefore includes adapters, frozen and quantised bases, large vocabularies,
    attention masks and the compression that `cfg` requests.

    With `lengths`, the result is the peak of the largest possible batch of a data set. A batch is
    padded to its longest sample. A batch is not simulated if another one has at least as many
    samples, tokens and padding (transformers builds a mask for padding).

    Args:
        model: Real, on the meta device, or built under a `FakeTensorMode`; not changed.
        batch: The model's input: a tensor, a tuple of arguments or a dict of keyword arguments.
            With `lengths`, a batch of any size, whose tensors' dimensions grow as in
            `memtrain.largest`; optional for a transformers model of text.
        cfg: Anything that `memtrain.wrap` takes; None for PyTorch without memtrain.
        optimizer: By default `torch.optim.AdamW` for the trained parameters; not changed.
        lengths: Tokens per sample of the data set, or, with a batch sampler, a list of tokens per
            sample for each batch.
        batch_size: Samples per batch, if `lengths` has one number per sample.
        options: Device, autocast, and the loss.

    Returns:
        The estimate, which `print` shows.

    Raises:
        ValueError: If both batch and lengths are missing, if a length or size is below 1, or if
            `predict` raises it.
        TypeError: If `predict` raises it.

    Memory:
        Fake tensors allocate no data.

    Example:
        >>> model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 1000))
        >>> tokens = torch.zeros(1, 8, dtype=torch.long)
        >>> found = estimate(model, tokens, lengths=[100, 20, 30], batch_size=2)
        >>> found.worst, found.fits("2MiB"), found.fits("5MiB")
        ((2, 100), False, True)
    """
    check_order(model, batch)
    optimizer = default_optimizer(model) if optimizer is None else optimizer
    if lengths is None:
        if batch is None:
            raise ValueError("estimate needs a batch, or lengths")
        return Estimate(predict(model, optimizer, batch, cfg, options), None, {})
    batch = _text_batch(model) if batch is None else batch
    timelines = {
        size[:2]: predict(model, optimizer, _sized(batch, *size), cfg, options)
        for size in _largest_ones(_sizes(lengths, batch_size))
    }
    peaks = {size: timeline.needed.nbytes for size, timeline in timelines.items()}
    worst = max(peaks, key=lambda size: peaks[size])
    return Estimate(timelines[worst], worst, peaks)


def _sizes(lengths: Iterable[Any], batch_size: int) -> set[_Size]:
    """Return the sizes of the batches that may be the largest."""
    found = [length if isinstance(length, int) else tuple(length) for length in lengths]
    samples = [length for length in found if isinstance(length, int)]
    batches: Sequence[tuple[int, ...]] = [x for x in found if not isinstance(x, int)]
    if samples and batches:
        raise ValueError("lengths are of samples or of batches: whole numbers, or lists of them")
    least = min([*samples, *(n for batch in batches for n in (len(batch), *batch))], default=0)
    if least < 1 or batch_size < 1:
        raise ValueError(
            f"the smallest of lengths is {least}, batch_size={batch_size}; allowed: 1 or more"
        )
    if samples:  # shuffled: any samples may form a batch, the longest with the shortest
        n = min(batch_size, len(samples))
        batches = [(max(samples),) if n == 1 else (*[max(samples)] * (n - 1), min(samples))]
    return {(len(batch), max(batch), min(batch) < max(batch)) for batch in batches}


def _largest_ones(sizes: set[_Size]) -> list[_Size]:
    """Return the sizes that no other size dominates."""
    return [
        size
        for size in sorted(sizes)
        if not any(
            other != size and all(a >= b for a, b in zip(other, size, strict=True))
            for other in sizes
        )
    ]


def _sized(batch: Any, samples: int, length: int, padded: bool) -> Any:
    sized = resized(resized(batch, "seq", length), "batch", samples)
    if isinstance(sized, Mapping) and _MASK in sized:
        # With data: transformers builds another mask for padding.
        mask = torch.ones(samples, length, dtype=sized[_MASK].dtype)
        mask[-1, -1] = 0 if padded else 1
        return {**sized, _MASK: mask}
    return sized


def _text_batch(model: Any) -> dict[str, Tensor]:
    if getattr(model, "main_input_name", "") != "input_ids":
        raise ValueError(
            f"{type(model).__name__} is not a transformers model of text: lengths= needs a batch, "
            "of any size"
        )
    return {
        name: torch.empty(1, 8, dtype=torch.long, device="meta")
        for name in ("input_ids", _MASK, "labels")
    }
