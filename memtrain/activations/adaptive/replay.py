"""Gradients of a model from one state that is restored at the end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.activations.intercept.recompute import buffers_restored
from memtrain.activations.trace.restored import attributes_restored, random_states_restored

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
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = [p.grad for p in parameters]

    def gradient(closure: Closure) -> Gradient:
        for p in parameters:
            p.grad = None
        with random_states_restored(), buffers_restored(model), torch.enable_grad():
            closure()
        if all(p.grad is None for p in parameters):
            raise ValueError("the closure left no gradient; it must run forward and backward")
        return [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in parameters]

    try:
        with attributes_restored(model):
            yield gradient
    finally:
        for p, grad in zip(parameters, gradients, strict=True):
            p.grad = grad


def dot(a: Gradient, b: Gradient) -> float:
    """Compute the inner product of two gradients, in float64."""
    return float(sum((x.double() * y.double()).sum() for x, y in zip(a, b, strict=True)))


def squared_distance(a: Gradient, b: Gradient) -> float:
    """Compute the squared norm of the difference of two gradients, in float64."""
    pairs = zip(a, b, strict=True)
    return float(sum((x.double() - y.double()).square().sum() for x, y in pairs))
