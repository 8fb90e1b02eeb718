"""Parameters to step, with their gradients, by group."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memtrain.kernels.dispatch import is_simulated
from memtrain.kernels.step.split import NO_MASTER, MasterWeight
from memtrain.optim.states.shards import USUAL, local_gradient


class Target(NamedTuple):
    """A parameter to step."""

    param: Tensor
    grad: Any
    """Read in place of `param.grad`; fused kernels take another dtype than the parameter's."""
    guard: Tensor | None = None
    """A scalar on the parameter's device: if it is not finite, nothing is stepped."""
    master: MasterWeight = NO_MASTER
    """The storage of a 16-bit parameter's float32 master, which fused kernels read and write."""


Part = tuple[dict[str, Any], Sequence[Target]]
"""A group, and its parameters to step."""


def parts_of(groups: Iterable[dict[str, Any]]) -> list[Part]:
    """Return every group with its parameters that have gradients."""
    return [
        (group, [Target(p, grad) for p in group["params"] if (grad := p.grad) is not None])
        for group in groups
    ]


def with_local_gradients(targets: Sequence[Target]) -> Sequence[Target]:
    """Return targets with this process's parts of their gradients."""
    if {type(t.param) for t in targets} | {type(t.grad) for t in targets} <= USUAL:
        return targets
    return [t._replace(grad=local_gradient(t.param, t.grad)) for t in targets]


def refuse_sparse(targets: Iterable[tuple[Tensor, Any, *tuple[Any, ...]]], owner: str) -> None:
    """Raise `RuntimeError` for sparse gradients, before anything is changed."""
    for param, grad, *_ in targets:
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"{owner} takes dense gradients only, a parameter of shape {tuple(param.shape)} "
                f"has layout {grad.layout}; use sparse=False in its embedding"
            )


def refuse_meta(targets: Iterable[Target], owner: str) -> None:
    """Raise `RuntimeError` for a parameter on the meta device that has a gradient."""
    for param, *_ in targets:
        if param.is_meta and not is_simulated():
            raise RuntimeError(
                f"{owner} requires all the params to hold data, got one of shape "
                f"{tuple(param.shape)} on the meta device: call to_empty() and load its values "
                "before the first step"
            )
