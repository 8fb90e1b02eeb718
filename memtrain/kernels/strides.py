"""Dense tensors in any order of dimensions, seen as flat ones."""

from torch import Tensor


def memory_order(x: Tensor) -> Tensor:
    """`x` as a flat view in memory order; `x` must be dense.

    Example:
        >>> import torch
        >>> memory_order(torch.arange(6).view(2, 3).t())
        tensor([0, 1, 2, 3, 4, 5])
    """
    return x.as_strided((x.numel(),), (1,))


def is_dense(x: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each once, in any order of dimensions.

    Example:
        >>> import torch
        >>> x = torch.zeros(4, 6)
        >>> is_dense(x.t()), is_dense(x[:, ::2]), is_dense(x[:1].expand(4, 6))
        (True, False, False)
    """
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size == 0:
            return True
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
