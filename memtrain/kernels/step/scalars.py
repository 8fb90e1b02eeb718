"""The eight numbers of one tensor's step, by rule: on the host, or on the device."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Number = float | Tensor
"""Known on the host, or on the device only: float64, of one element or one for each entry."""
AnyNumbers = TypeVar("AnyNumbers", bound=Any)
COUNT = 8


class Hyper(NamedTuple):
    """Of AdamW and Adam; `hyper` makes them. Rounded to float32 in use."""

    decay: Number
    l2: Number
    sign: Number
    w1: Number
    b2: Number
    w2: Number
    step_size: Number
    eps: Number


class SGD(NamedTuple):
    """Of SGD; `sgd` makes them. Rounded to float32 in use."""

    decay: Number
    l2: Number
    sign: Number
    keep: Number
    take: Number
    nesterov: Number
    lr: Number
    unused: Number


class Lion(NamedTuple):
    """Of Lion; `lion` makes them. Rounded to float32 in use."""

    decay: Number
    l2: Number
    sign: Number
    b1: Number
    w1: Number
    b2: Number
    w2: Number
    lr: Number


def hyper(
    step: Number,
    *,
    lr: Number,
    betas: tuple[Number, Number],
    eps: float,
    weight_decay: float = 0.0,
    maximize: bool = False,
    decoupled: bool = True,
) -> Hyper:
    """The numbers of step `step` (1 is the first), with bias corrections folded in.

    `lr / (1 - b1^t) * m / (sqrt(v) / c + eps)` equals `lr * c / (1 - b1^t) * m / (sqrt(v) +
    c * eps)` with `c = sqrt(1 - b2^t)`: one division an element fewer.

    Args:
        step: The step's number, from 1.
        lr: Learning rate.
        betas: Decay of the first and of the second moment.
        eps: Added to the root of the corrected second moment.
        weight_decay: Decoupled (AdamW) or added to the gradient (Adam).
        maximize: Ascend instead of descend.
        decoupled: Which form of weight decay.

    Returns:
        The numbers.

    Example:
        >>> hyper(1, lr=0.5, betas=(0.0, 0.0), eps=0.0).step_size
        0.5

    Reference:
        Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101.
    """
    b1, b2 = betas
    lost = 1 - b2**step
    correction = lost.sqrt() if isinstance(lost, Tensor) else math.sqrt(lost)
    return Hyper(
        decay=1 - lr * weight_decay if decoupled else 1.0,
        l2=0.0 if decoupled else weight_decay,
        sign=-1.0 if maximize else 1.0,
        w1=1 - b1,
        b2=b2,
        w2=1 - b2,
        step_size=lr * correction / (1 - b1**step),
        eps=eps * correction,
    )


def sgd(
    *,
    lr: Number,
    momentum: float,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    maximize: bool = False,
    first: bool = False,
) -> SGD:
    """The numbers of `buf = momentum * buf + (1 - dampening) * g`, `p -= lr * buf`.

    Args:
        lr: Learning rate.
        momentum: Decay of the buffer.
        dampening: How much less of the gradient the buffer takes.
        nesterov: Step by `g + momentum * buf` instead.
        weight_decay: Times the parameter, added to the gradient.
        maximize: Ascend instead of descend.
        first: The first step, where `buf = g`, whatever the dampening (as in torch).

    Returns:
        The numbers.

    Example:
        >>> sgd(lr=0.5, momentum=0.9, dampening=0.5).take
        0.5

    Reference:
        torch.optim.SGD.
    """
    return SGD(
        decay=1.0,
        l2=weight_decay,
        sign=-1.0 if maximize else 1.0,
        keep=0.0 if first else momentum,
        take=1.0 if first else 1 - dampening,
        nesterov=momentum if nesterov else 0.0,
        lr=lr,
        unused=0.0,
    )


def lion(
    *, lr: Number, betas: tuple[Number, Number], weight_decay: float = 0.0, maximize: bool = False
) -> Lion:
    """The numbers of `p -= lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * p)`, and of `m`.

    Args:
        lr: Learning rate.
        betas: Weight of the momentum in the update, and its decay.
        weight_decay: Decoupled from the gradient.
        maximize: Ascend instead of descend.

    Returns:
        The numbers.

    Example:
        >>> lion(lr=0.5, betas=(0.75, 0.5)).w1
        0.25

    Reference:
        Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, algorithm 2.
    """
    b1, b2 = betas
    return Lion(
        decay=1 - lr * weight_decay,
        l2=0.0,
        sign=-1.0 if maximize else 1.0,
        b1=b1,
        w1=1 - b1,
        b2=b2,
        w2=1 - b2,
        lr=lr,
    )


def on_device(given: Sequence[Number], count: int, device: torch.device) -> Tensor:
    """The same numbers for `count` entries, where kernels read them: nothing is read back.

    Args:
        given: Eight numbers; a tensor has one element, or one for each entry.
        count: Of entries.
        device: Where the entries are.

    Returns:
        float64, [count, 8]; an entry takes a row in place of its numbers.

    Example:
        >>> steps = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> given = hyper(steps, lr=0.5, betas=(0.0, 0.0), eps=0.0)
        >>> on_device(given, 2, torch.device("cpu"))[:, 6]
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    rows = torch.empty(count, COUNT, dtype=torch.float64, device=device)
    for column, number in zip(rows.unbind(1), given, strict=True):
        column.copy_(number) if isinstance(number, Tensor) else column.fill_(number)
    return rows


def is_on_device(given: Any) -> bool:
    """Whether an entry's numbers are a row of `on_device`."""
    return isinstance(given, Tensor)


def known(kind: type[AnyNumbers], given: AnyNumbers | Tensor) -> AnyNumbers:
    """An entry's numbers by their names: of a row of `on_device`, tensors of one element."""
    return kind(*given.unbind()) if isinstance(given, Tensor) else given


def together(given: Sequence[Any], device: torch.device) -> Tensor:
    """What kernels read: float32, [n, 8], of the numbers of n entries (of all of one sort)."""
    if isinstance(given[0], Tensor):
        return torch.stack(list(given)).float()
    return torch.tensor(given, dtype=torch.float32).to(device)


def where(number: Number, yes: Callable[[], Tensor], no: Tensor) -> Tensor:
    """`yes()` unless a number is zero, without reading it back from a device."""
    if isinstance(number, Tensor):
        return torch.where(number != 0, yes(), no)
    return yes() if number else no
