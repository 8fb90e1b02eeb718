"""Dense tensors in any order of dimensions, seen as flat ones."""

from collections.abc import Sequence

import torch
from torch import Tensor


def memory_order(x: Tensor) -> Tensor:
    """Return a dense tensor as a flat view in memory order."""
    return x.as_strided((x.numel(),), (1,))


def is_dense(x: Tensor) -> bool:
    """Return whether the elements fill one range of memory, each once, in any order of dimensions.

    Example:
        >>> x = torch.zeros(4, 6)
        >>> is_dense(x.t()), is_dense(x[:, ::2]), is_dense(x[:1].expand(4, 6))
        (True, False, False)
    """
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size == 0:
            return True
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def in_order(x: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return `x` in the memory order of a dense tensor's strides, a copy if necessary."""
    found = x.stride()
    if found == stride or all(
        size <= 1 or a == b for size, a, b in zip(shape, found, stride, strict=True)
    ):
        return x
    return torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device).copy_(x)
