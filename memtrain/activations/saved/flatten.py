"""Any strided tensor as a dense flat one and back, in memory order: no copy where it is dense."""

from typing import NamedTuple

from torch import Tensor


class Layout(NamedTuple):
    """How to see a flat tensor again as the tensor it came from."""

    shape: tuple[int, ...]
    order: tuple[int, ...]  # dimensions from the largest stride to the smallest
    expanded: tuple[bool, ...]  # stride 0: stored once


def flatten(x: Tensor) -> tuple[Tensor, Layout]:
    """`x` as a contiguous 1-d tensor of its distinct elements, in memory order.

    A permuted dense tensor (transposed, channels-last) is flattened without a copy; a strided
    slice is copied; dimensions of stride 0 are stored once.

    Args:
        x: Any strided tensor.

    Returns:
        flat: A contiguous 1-d tensor, a view of `x` where it is dense.
        layout: What `restore` needs.

    Example:
        >>> import torch
        >>> flat, layout = flatten(torch.arange(6).view(2, 3).t())
        >>> flat
        tensor([0, 1, 2, 3, 4, 5])
        >>> restore(flat, layout).stride()
        (1, 3)
    """
    layout = layout_of(x)
    for dim, once in enumerate(layout.expanded):
        if once:
            x = x.narrow(dim, 0, 1)
    return x.permute(layout.order).reshape(-1), layout


def layout_of(x: Tensor) -> Layout:
    """How `flatten` would see `x`; nothing is copied."""
    expanded = tuple(
        stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)
    )
    # Stable, so that equal strides (of size-1 dimensions) keep their order.
    order = tuple(sorted(range(x.dim()), key=lambda dim: -x.stride(dim)))
    return Layout(tuple(x.shape), order, expanded)


def restore(flat: Tensor, layout: Layout) -> Tensor:
    """The tensor that `flatten` was given: same shape, same order of dimensions in memory.

    Args:
        flat: 1-d, as many elements as `flatten` returned.
        layout: Of the same call.

    Returns:
        A view of `flat`.
    """
    stored = [1 if once else size for size, once in zip(layout.shape, layout.expanded, strict=True)]
    inverse = [layout.order.index(dim) for dim in range(len(layout.order))]
    x = flat.view([stored[dim] for dim in layout.order]).permute(inverse)
    return x.expand(layout.shape) if any(layout.expanded) else x


def memory_key(x: Tensor) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Two tensors on one storage with equal keys hold the same elements in the same memory order.

    Args:
        x: Any strided tensor whose elements do not overlap.

    Returns:
        Offset, and the (stride, size) pairs that are left once neighbouring dimensions are
        merged: a view that only regroups or permutes dense dimensions has an equal key.
    """
    pairs = zip(x.stride(), x.shape, strict=True)
    merged: list[tuple[int, int]] = []
    for stride, size in sorted(pair for pair in pairs if pair[0] > 0 and pair[1] > 1):
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((stride, size))
    return int(x.storage_offset()), tuple(merged)


def overlaps(x: Tensor) -> bool:
    """Whether elements of `x` may share memory other than by a stride of 0, as windows do.

    Example:
        >>> import torch
        >>> overlaps(torch.arange(6.0).unfold(0, 3, 1)), overlaps(torch.ones(2, 3).t())
        (True, False)
    """
    reach = 1
    pairs = zip(x.stride(), x.shape, strict=True)
    for stride, size in sorted(pair for pair in pairs if pair[0] > 0 and pair[1] > 1):
        if stride < reach:
            return True
        reach += (size - 1) * stride
    return False
