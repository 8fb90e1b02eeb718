"""`Function.apply` at the price of torch's C++ alone."""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor
from torch._C import _are_functorch_transforms_active as _in_transform
from torch._C._functorch import unwrap_if_dead
from torch.autograd import Function
from torch.compiler import is_compiling


def direct(function: type[Function]) -> Callable[..., Any]:
    """`function.apply` without what torch does around it in Python, unless it is needed.

    torch's own looks for a `setup_context`, refuses to run in a transform of functorch without one,
    and takes what is left of a finished transform off its arguments: as long as a small kernel.

    Args:
        function: With the context in `forward`; no `setup_context`.

    Returns:
        A callable of `forward`'s arguments: the first a tensor, others no tensors.

    Example:
        >>> import torch
        >>> class Double(Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return x * 2
        >>> direct(Double)(torch.ones(2))
        tensor([2., 2.])
    """
    in_cpp = cast(Any, super(Function, function)).apply

    def apply(x: Tensor, *others: Any) -> Any:
        if is_compiling() or _in_transform():
            return function.apply(x, *others)
        return in_cpp(unwrap_if_dead(x), *others)

    return apply
