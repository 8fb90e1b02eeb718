"""Norms of gradients that the host reads when a step ends, where it would have to wait for each."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memtrain.kernels.dispatch import is_for_cuda
from memtrain.optim.states.shards import is_sharded, whole_of

PIECE = 2**22
"""Elements of a 16-bit gradient on a CPU that are added up at once: torch casts them to float32."""


class LateNorm(NamedTuple):
    """A gradient's norm that its device has still."""

    param: Tensor
    norm: Tensor
    count: Tensor | float | None
    """Of the parameter's steps before; None where it had no states."""


def is_late(norm: Tensor) -> bool:
    """Whether the host would wait for a norm, so that all are read at once when the step ends."""
    return is_for_cuda(norm)


def count_of(states: Mapping[Tensor, dict[str, Any]], param: Tensor) -> Tensor | float | None:
    """A copy of a parameter's count of steps; 0 where its states have none, None without states."""
    own = states.get(param)
    if not own:
        return None
    count = own.get("step", 0.0)
    return count.clone() if isinstance(count, Tensor) else count


def set_count(states: Any, param: Tensor, count: Tensor | float | None) -> None:
    """Take back the count of a step that was none; without an earlier one, the states too."""
    if count is None:
        states.pop(param, None)
    elif "step" in states[param]:
        states[param]["step"] = count


def norm_of(grad: Tensor) -> float | Tensor:
    """The norm of a whole gradient, float64 ones in float64, all others in float32.

    A tensor where reading it would make the host wait.

    Memory:
        On a CPU of a 16-bit gradient a float32 copy of `PIECE` elements, or of one row.
    """
    grad = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    norm_in = partial(torch.linalg.vector_norm, dtype=dtype)
    cast = grad.is_cpu and not is_for_cuda(grad) and grad.dtype.itemsize < 4
    if cast and not is_sharded(grad) and grad.numel() > PIECE:
        rows = max(1, PIECE * len(grad) // grad.numel())
        norm: Any = norm_in(torch.stack([*map(norm_in, grad.split(rows))]))
    else:
        norm = norm_in(grad)
    whole = whole_of(norm)
    return whole if is_late(whole) else whole.item()
