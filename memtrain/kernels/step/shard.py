"""Tensors of which each process holds a part: what the parts must know of each other."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Shard(NamedTuple):
    """A part's place in its whole."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    groups: tuple[tuple[int, Any], ...]
    """Dimension -> the process group that splits it; several may split one dimension."""

    @property
    def by_rows(self) -> bool:
        """Whether only dimension 0 is split."""
        return all(dim == 0 for dim, _ in self.groups)


Pending = list[tuple[Any, Tensor]]
"""Process groups, and contiguous float32 tensors that each reduces."""


def for_collectives(x: Tensor, group: Any) -> Tensor:
    """`x` where a process group has a backend: itself, or a copy on the group's first device.

    FSDP2's `CPUOffloadPolicy` keeps parts on the host, and a group of NCCL alone takes none there.

    Args:
        x: Of a few elements, on any device.
        group: A process group that this process belongs to.
    """
    devices = group._device_types
    return x if x.device.type in {device.type for device in devices} else x.to(devices[0])


def all_reduce(pending: Iterable[tuple[Any, Tensor]], op: str) -> None:
    """Reduce tensors in place over their process groups: one collective for each group.

    Maxima are compared as integers, so that NaN is the largest, whatever the order.

    Args:
        pending: The same on each process of a group, in the same order. A tensor may stand there
            for several groups: they then follow each other.
        op: `"sum"`, or `"max"` of values that are not negative.
    """
    batches: dict[Any, list[Tensor]] = {}
    for group, tensor in pending:
        batches.setdefault(group, []).append(tensor)
    for group, tensors in batches.items():
        flat = for_collectives(torch.cat([tensor.reshape(-1) for tensor in tensors]), group)
        if op == "max":
            bits = flat.view(torch.int32).bitwise_and_(0x7FFFFFFF)  # torch's maxima give -NaN
            torch.distributed.all_reduce(bits, torch.distributed.ReduceOp.MAX, group=group)
        else:
            torch.distributed.all_reduce(flat, group=group)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


def of_maxima(scale: Tensor, part_shape: torch.Size, shard: Shard) -> Pending:
    """Reduction that makes `rank1.maxima` of a part those of the whole.

    The maxima of a dimension are the whole's over the parts that share its indices.

    Args:
        scale: float32, [sum(part_shape)].
        part_shape: Of this process's part.
        shard: Its place.

    Returns:
        What to give to `all_reduce` with `"max"`.
    """
    parts = scale.split(list(part_shape))
    return [
        (group, part) for split, group in shard.groups for d, part in enumerate(parts) if d != split
    ]


def of_sums(row: Tensor, col: Tensor, shard: Shard) -> Pending:
    """Reduction of a part's sums of rows and columns to those of the whole tensor."""
    return [(group, row if split else col) for split, group in shard.groups]


def mean_of(row: Tensor, col: Tensor, shard: Shard) -> Tensor:
    """The mean of the whole, of which `row` and `col` hold means, at least one of them whole.

    Mean row and mean column agree but for rounding: the one that this process holds whole serves.
    """
    if all(dim != 0 for dim, _ in shard.groups):
        return row.mean()
    if shard.by_rows:
        return col.mean()
    total = row.sum()
    all_reduce([(group, total) for split, group in shard.groups if not split], "sum")
    return total / shard.shape[0]
