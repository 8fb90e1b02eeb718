"""Collectives between the parts of tensors that are split over processes."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Shard(NamedTuple):
    """The position of a part in its whole tensor."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    groups: tuple[tuple[int, Any], ...]
    """Dimension -> the process group that splits it; several may split one dimension."""

    @property
    def by_rows(self) -> bool:
        """Whether only dimension 0 is split."""
        return all(dim == 0 for dim, _ in self.groups)


Pending = list[tuple[Any, Tensor]]
"""Process groups, and contiguous float32 tensors that each reduces."""


def for_collectives(x: Tensor, group: Any) -> Tensor:
    """Return `x`, or a copy on the group's first device if the group has no backend for `x`.

    FSDP2's `CPUOffloadPolicy` keeps parts on the host, where a group of NCCL has no backend.
    """
    devices = group._device_types
    return x if x.device.type in {device.type for device in devices} else x.to(devices[0])


def all_reduce(pending: Iterable[tuple[Any, Tensor]], op: str) -> None:
    """Reduce tensors in place over their process groups: one collective per group.

    `pending` must have the same order on each process of a group. A tensor may be there for several
    groups, one after the other. `op` is `"sum"`, or `"max"` of values that are not negative:
    maxima are compared as integers, so that NaN is the largest.
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
    """Return the reductions (`"max"`) that make `rank1.maxima` of a part those of the whole.

    The maxima of a dimension are reduced over the parts that share its indices.
    """
    parts = scale.split(list(part_shape))
    return [
        (group, part) for split, group in shard.groups for d, part in enumerate(parts) if d != split
    ]


def of_sums(row: Tensor, col: Tensor, shard: Shard) -> Pending:
    """Return the reductions of a part's sums of rows and columns to those of the whole tensor."""
    return [(group, row if split else col) for split, group in shard.groups]


def mean_of(row: Tensor, col: Tensor, shard: Shard) -> Tensor:
    """Return the mean of the whole from its means of rows and columns, one of them complete.

    Both give the same mean but for rounding: the one that this process has completely is used.
    """
    if all(dim != 0 for dim, _ in shard.groups):
        return row.mean()
    if shard.by_rows:
        return col.mean()
    total = row.sum()
    all_reduce([(group, total) for split, group in shard.groups if not split], "sum")
    return total / shard.shape[0]
