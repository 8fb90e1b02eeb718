"""Any strided tensor as a dense flat one and back, in memory order: no copy where it is dense."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """How to see a flat tensor again as the tensor it came from."""

    shape: tuple[int, ...]
    order: tuple[int, ...]  # dimensions from the largest stride to the smallest
    expanded: tuple[bool, ...]  # stride 0: stored once


Memory = tuple[int, tuple[tuple[int, int], ...]]
"""Offset, and (stride, size) pairs with neighbouring dimensions merged: see `memory_of`."""


def flatten(
    x: Tensor, layout: Layout | None = None, *, rows: Memory | None = None
) -> tuple[Tensor, Layout]:
    """Return a contiguous 1-d tensor of the distinct elements of `x`, and its layout.

    A permuted dense tensor (transposed, channels-last) is flattened without a copy; a strided
    slice is copied; dimensions of stride 0 are stored once.

    With the layout of another tensor, the result is a copy in that memory order. With `rows`, the
    tensor's `memory_of`, equal runs with equal gaps between them are a view [runs, elements of a
    run]: the third that queries take of a projection's output, for example.

    Example:
        >>> import torch
        >>> flat, layout = flatten(torch.arange(6).view(2, 3).t())
        >>> flat
        tensor([0, 1, 2, 3, 4, 5])
        >>> restore(flat, layout).stride()
        (1, 3)
    """
    layout = layout or layout_of(x)
    if x.is_contiguous() and layout.order == (*range(x.dim()),):
        return x.view(-1), layout
    for dim, once in enumerate(layout.expanded):
        if once:
            x = x.narrow(dim, 0, 1)
    if rows is not None and len(rows[1]) == 2 and rows[1][0][0] == 1:
        (_, columns), (stride, runs) = rows[1]
        return x.as_strided((runs, columns), (stride, 1)), layout
    return x.permute(layout.order).reshape(-1), layout


def layout_of(x: Tensor) -> Layout:
    """Return the layout that `flatten` would return; nothing is copied."""
    return memory_of(x)[0]


def restore(flat: Tensor, layout: Layout) -> Tensor:
    """Return the tensor that `flatten` was given, in its shape and memory order."""
    stored, inverse, expanded = steps_of(layout)
    x = flat if flat.shape == stored else flat.view(stored)
    x = x if inverse is None else x.permute(inverse)
    return x.expand(layout.shape) if expanded else x


def steps_of(layout: Layout) -> tuple[torch.Size, list[int] | None, bool]:
    """The shape in memory order, the permutation back, if there is one, and whether to expand."""
    try:
        return _steps(layout)
    except TypeError:  # symbolic sizes have no hash
        return _steps.__wrapped__(layout)


@lru_cache(maxsize=4096)
def _steps(layout: Layout) -> tuple[torch.Size, list[int] | None, bool]:
    stored = [1 if once else size for size, once in zip(layout.shape, layout.expanded, strict=True)]
    inverse = [layout.order.index(dim) for dim in range(len(layout.order))]
    in_memory = [stored[dim] for dim in layout.order]
    plain = inverse == list(range(len(inverse)))
    return torch.Size(in_memory), None if plain else inverse, any(layout.expanded)


def memory_of(x: Tensor) -> tuple[Layout, Memory | None]:
    """Return where the elements of a tensor lie in its storage: a layout and a key.

    Two tensors on one storage with equal keys have the same elements
    in the same memory order: a view that only regroups or permutes dense dimensions has an equal
    key. The key is None where elements share memory other than by a stride of 0, as windows do.

    Example:
        >>> import torch
        >>> [memory_of(x)[1] for x in (torch.ones(2, 3).t(), torch.ones(6).unfold(0, 3, 1))]
        [(0, ((1, 6),)), None]
    """
    try:  # a model's tensors have few forms
        return _memory_of(x.shape, x.stride(), x.storage_offset())
    except TypeError:  # symbolic sizes have no hash
        return _memory_of.__wrapped__(x.shape, x.stride(), x.storage_offset())


@lru_cache(maxsize=4096)
def _memory_of(
    sizes: torch.Size, strides: tuple[int, ...], offset: int
) -> tuple[Layout, Memory | None]:
    shape = tuple(sizes)
    expanded = (False,) * len(shape)
    if 0 in strides:
        pairs = zip(shape, strides, strict=True)
        expanded = tuple([stride == 0 and size > 1 for size, stride in pairs])
    # Stable, so that equal strides (of size-1 dimensions) keep their order.
    order = tuple(sorted(range(len(shape)), key=strides.__getitem__, reverse=True))
    layout = Layout(shape, order, expanded)
    merged: list[tuple[int, int]] = []
    reach = 1  # elements that the dimensions so far span
    for dim in reversed(order):
        stride, size = strides[dim], shape[dim]
        if stride == 0 or size <= 1:
            continue
        if stride < reach:
            return layout, None
        reach += (size - 1) * stride
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((stride, size))
    return layout, (int(offset), tuple(merged))


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Return the memory format of a tensor, of those that kernels know.

    Example:
        >>> x = torch.ones(2, 3, 4, 5)
        >>> memory_format_of(x.contiguous(memory_format=torch.channels_last))
        torch.channels_last
    """
    for dims, format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dims and x.is_contiguous(memory_format=format) and not x.is_contiguous():
            return format
    return torch.contiguous_format
