"""Gradients of a model from one state that is restored at the end, and the noise in them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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


def mean(gradients: Sequence[Gradient]) -> Gradient:
    """Compute the mean of several gradients, in float64."""
    return [torch.stack([x.double() for x in xs]).mean(0) for xs in zip(*gradients, strict=True)]


THRESHOLD = 0.1
"""A share of the gradient's variance above which a warning is due (GACT's bound)."""
_WORST = 3


def noise_warning(
    noise: Mapping[str, float],
    reference: float,
    name: str,
    remedy: str,
    total: float,
) -> str:
    """Word the warning of too much quantisation noise; empty where there is little.

    The noise of a site is the variance that it adds to the gradient, and `total` that of all sites.
    `reference`, in the same unit, is the variance or norm that it is compared to: the gradient's
    `name`. `remedy` is a change that lowers the noise.

    Example:
        >>> noise = {"a / linear / input": 1.0, "b / linear / input": 3.0}
        >>> noise_warning(noise, 16.0, "variance", "8 bits", 4.0)
        "quantisation noise of the saved activations is 25% of the gradient's variance, most of it
        from b / linear / input (19%), a / linear / input (6%); 8 bits would lower it"
        >>> noise_warning({"a / linear / input": 1.0}, 16.0, "variance", "8 bits", 1.0)
        ''
    """
    if not total > THRESHOLD * reference:  # nor where either is NaN
        return ""

    def share(value: float) -> str:
        return f"{value / reference:.0%}" if reference else "more than 100%"

    worst = sorted(noise, key=lambda site: -noise[site])[:_WORST]
    named = ", ".join(f"{site} ({share(noise[site])})" for site in worst)
    return (
        f"quantisation noise of the saved activations is {share(total)} of the gradient's {name}, "
        f"most of it from {named}; {remedy} would lower it"
    )
