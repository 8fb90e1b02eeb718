"""Norms of gradients; a CUDA device's are read together when a step ends."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memtrain.kernels.dispatch import is_for_cuda
from memtrain.optim.states.shards import is_sharded, whole_of

PIECE = 2**22
"""Elements of a 16-bit gradient on a CPU whose norm is computed at once: torch casts them to
float32."""


def stays_pending(norm: Tensor) -> bool:
    """Whether reading a norm at once would make the host wait for its device."""
    return is_for_cuda(norm)


def count_of(states: Mapping[Tensor, dict[str, Any]], param: Tensor) -> Tensor | float | None:
    """Return a copy of a parameter's step counter: 0 without a counter, None without states."""
    state = states.get(param)
    if not state:
        return None
    count = state.get("step", 0.0)
    return count.clone() if isinstance(count, Tensor) else count


def set_count(states: Any, param: Tensor, count: Tensor | float | None) -> None:
    """Restore the step counter from before a skipped update; without one, drop the states."""
    if count is None:
        states.pop(param, None)
    elif "step" in states[param]:
        states[param]["step"] = count


def norm_of(grad: Tensor) -> float | Tensor:
    """Return the norm of a whole gradient; a tensor if reading it would make the host wait.

    For a 16-bit gradient on a CPU, torch makes a float32 copy of `PIECE` elements, or of one row.
    """
    grad = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    norm_in = partial(torch.linalg.vector_norm, dtype=dtype)
    large = grad.numel() > PIECE and grad.itemsize < 4 and not is_sharded(grad)
    if large and grad.is_cpu and not is_for_cuda(grad):
        rows = max(1, PIECE * len(grad) // grad.numel())
        norm: Any = norm_in(torch.stack([*map(norm_in, grad.split(rows))]))
    else:
        norm = norm_in(grad)
    whole = whole_of(norm)
    return whole if stays_pending(whole) else whole.item()


def read(numbers: Sequence[Tensor]) -> list[float]:
    """Return the values of numbers on devices: one wait per device and dtype."""
    found: list[float] = [0.0] * len(numbers)
    groups: dict[object, list[int]] = defaultdict(list)
    for k, number in enumerate(numbers):
        groups[number.device, number.dtype].append(k)
    for indices in groups.values():
        values = torch.stack([numbers[k] for k in indices]).tolist()
        for k, value in zip(indices, values, strict=True):
            found[k] = value
    return found
