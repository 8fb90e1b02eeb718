"""Spatial dimensions: arguments of one number or one per dimension, and memory formats."""

from operator import index
from typing import Any, SupportsIndex

import torch
from torch import Tensor


def per_dimension(value: Any, n: int) -> tuple[Any, ...]:
    """One number, or None, for each of `n` dimensions.

    Args:
        value: A number, also NumPy's or a tensor's; None; or a sequence of `n` or of one.
        n: How many dimensions there are.

    Example:
        >>> per_dimension(3, 2), per_dimension([3], 2), per_dimension((3, None), 2)
        ((3, 3), (3, 3), (3, None))
    """
    if isinstance(value, SupportsIndex):
        return (index(value),) * n
    if value is None:
        return (None,) * n
    return tuple(value) * (n if len(value) == 1 else 1)


def strides_of(value: Any, kernel: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a pool's windows: None and an empty sequence stand for the kernel's own size.

    Example:
        >>> strides_of(None, (2, 3)), strides_of([], (2, 3)), strides_of(1, (2, 3))
        ((2, 3), (2, 3), (1, 1))
    """
    if value is None or (isinstance(value, list | tuple) and not value):
        return kernel
    return per_dimension(value, len(kernel))


def memory_format_of(x: Tensor) -> torch.memory_format:
    """The memory format that `x` has, of those that kernels know.

    Example:
        >>> x = torch.ones(2, 3, 4, 5)
        >>> memory_format_of(x.contiguous(memory_format=torch.channels_last))
        torch.channels_last
    """
    for dims, format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dims and x.is_contiguous(memory_format=format) and not x.is_contiguous():
            return format
    return torch.contiguous_format
