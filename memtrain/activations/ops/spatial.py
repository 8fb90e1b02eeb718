"""Memory formats of tensors with spatial dimensions."""

import torch
from torch import Tensor


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
