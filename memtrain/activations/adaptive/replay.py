"""Gradients of a model, computed again and again from one state that is restored at the end."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memtrain.activations.trace.restored import attributes_restored
from memtrain.kernels.random.generators import random_state, set_random_state

Closure = Callable[[], Any]
Gradient = list[Tensor]


@contextmanager
def gradient_replay(model: nn.Module) -> Iterator[Callable[[Closure], Gradient]]:
    """Give a function that computes gradients; restore all that it changes, whatever happens.

    Each computation starts from the same random states (torch's, CPU and CUDA, Python's and
    NumPy's), the same buffers (running statistics) and no gradients, so that two of them differ
    only by what the caller has changed between them. At the end these, modules' attributes, and
    the gradients that were there, are as they were, the same objects.

    The function takes a closure, which runs forward and backward, and returns one tensor per
    trainable parameter, zeros where no gradient came.

    Memory:
        A copy of the buffers; each gradient that is returned.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> with gradient_replay(model) as gradient:
        ...     gradient(lambda: model(torch.ones(1, 2)).sum().backward())
        [tensor([[1., 1.]])]
        >>> model.weight.grad is None
        True
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = [p.grad for p in parameters]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    states = random_state(), random.getstate(), np.random.get_state()

    def restore() -> None:
        set_random_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)

    def gradient(closure: Closure) -> Gradient:
        restore()
        for p in parameters:
            p.grad = None
        with torch.enable_grad():
            closure()
        if all(p.grad is None for p in parameters):
            raise ValueError("the closure left no gradient; it must run forward and backward")
        return [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in parameters]

    try:
        with attributes_restored(model):
            yield gradient
    finally:
        restore()
        for p, grad in zip(parameters, gradients, strict=True):
            p.grad = grad


def dot(a: Gradient, b: Gradient) -> float:
    """Compute the inner product of two gradients, in float64."""
    return float(sum((x.double() * y.double()).sum() for x, y in zip(a, b, strict=True)))


def squared_distance(a: Gradient, b: Gradient) -> float:
    """Compute the squared norm of the difference of two gradients, in float64."""
    pairs = zip(a, b, strict=True)
    return float(sum((x.double() - y.double()).square().sum() for x, y in pairs))


def mean(gradients: Sequence[Gradient]) -> Gradient:
    """Compute the mean of several gradients, in float64."""
    return [torch.stack([x.double() for x in xs]).mean(0) for xs in zip(*gradients, strict=True)]
