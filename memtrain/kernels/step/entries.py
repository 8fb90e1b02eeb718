"""What the kernels that step many tensors at once share: which entries they serve."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from memtrain.kernels.dispatch import choose

AnyEntry = TypeVar("AnyEntry", bound=Any)
"""A NamedTuple with `param`, `grad` and `beside`: an Entry of `adamw` or `blockstep`."""

FLOAT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as cpu/halves.h has them


def fits(entry: Any) -> bool:
    """Whether the kernels serve an entry, but for the strides of its gradient.

    Example:
        >>> from memtrain.kernels.step.blockstep import Entry
        >>> from memtrain.kernels.step.scalars import sgd
        >>> p, h = torch.ones(4, 2), sgd(lr=1.0, momentum=0.0)
        >>> fits(Entry(p, p, (), "sgd", 0, h)), fits(Entry(p.t(), p.t(), (), "sgd", 0, h))
        (True, False)
    """
    if not entry.param.is_contiguous() or not entry.beside.is_contiguous():
        return False
    return entry.param.dtype in FLOAT_TYPES and entry.grad.dtype in FLOAT_TYPES


def check_sizes(entry: Any, kept: Sequence[tuple[Mapping[str, Tensor], Mapping[str, int]]]) -> None:
    """Raise where what belongs to a parameter is not of its size: kernels write by address.

    Args:
        entry: Whose gradient and correction are looked at.
        kept: Its states, each with the elements that every tensor of it must have.

    Raises:
        ValueError: With both sizes.
    """
    n = entry.param.numel()
    found = [("the gradient", entry.grad, n)]
    if entry.beside.correction is not None:
        found.append(("the correction", entry.beside.correction, n))
    for state, sizes in kept:
        found += [(f"{name!r} of a state", state[name], size) for name, size in sizes.items()]
    for what, tensor, size in found:
        if tensor.numel() != size:
            raise ValueError(
                f"{what} has {tensor.numel():,} elements; a parameter of shape "
                f"{tuple(entry.param.shape)} needs {size:,}. A parameter that has changed its size "
                "needs a new optimizer"
            )


def gather(
    entries: Sequence[AnyEntry],
    reference: Callable[[AnyEntry], None],
    serves: Callable[[AnyEntry], bool] = fits,
) -> list[AnyEntry]:
    """Step by the reference what no kernel serves.

    Args:
        entries: What to step; those without elements are skipped.
        reference: Steps one entry in pure torch.
        serves: Whether the kernels serve an entry.

    Returns:
        The entries for the kernels, with contiguous gradients.
    """
    together: list[AnyEntry] = []
    for entry in entries:
        if not entry.param.numel():
            continue
        if choose(entry.param) != "reference" and serves(entry):
            together.append(entry._replace(grad=entry.grad.contiguous()))
        else:
            reference(entry)
    return together


def read(entry: Any) -> Tensor:
    """The value that an entry's step begins with, in the dtype of its arithmetic."""
    param = entry.param.detach()
    if entry.beside.any:
        return entry.beside.read(param)
    return param.to(torch.float64 if param.dtype == torch.float64 else torch.float32)


def write(entry: Any, new: Tensor) -> None:
    """Round the stepped value into the entry's parameter."""
    param = entry.param.detach()
    if entry.beside.any:
        entry.beside.write(new, param)
    else:
        param.copy_(new)
