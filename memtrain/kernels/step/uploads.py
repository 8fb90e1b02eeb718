"""Numbers between the host and devices: sent without a wait, read with one for each device."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def send(numbers: Tensor, to: Tensor) -> None:
    """Copy from the host to where kernels will read it; the host does not wait.

    The host may write to `numbers` at once: a copy to a GPU begins in pinned memory of its own,
    which PyTorch gives out again only when that copy has ended.

    Args:
        numbers: On the host, contiguous.
        to: Of the same size and dtype.

    Example:
        >>> there = torch.empty(2)
        >>> send(torch.ones(2), there)
        >>> there
        tensor([1., 1.])
    """
    to.copy_(_sendable(numbers, to.device), non_blocking=True)


def _sendable(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy that nobody writes, where a device can read it on its own."""
    pinned = device.type == "cuda" and not isinstance(numbers, FakeTensor)
    return numbers.pin_memory() if pinned else numbers


def read(numbers: Sequence[Tensor]) -> list[float]:
    """Numbers of devices, in order: one wait for each device and dtype."""
    found: list[float] = [0.0] * len(numbers)
    groups: dict[object, list[int]] = defaultdict(list)
    for k, number in enumerate(numbers):
        groups[number.device, number.dtype].append(k)
    for indices in groups.values():
        values = torch.stack([numbers[k] for k in indices]).tolist()
        for k, value in zip(indices, values, strict=True):
            found[k] = value
    return found
