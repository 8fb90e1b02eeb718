"""`gradient_quality`: what a config's compression of activations does to the gradient."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from memtrain.activations.adaptive.quality import GradientQuality, measure
from memtrain.activations.trace.fake_forward import arguments
from memtrain.api import plan_of
from memtrain.plan.plan import Plan, activation_plan


def gradient_quality(
    model: nn.Module,
    closure_or_batch: Any,
    cfg: Any = None,
    *,
    seeds: Sequence[int] = (0, 1, 2, 3),
    per_site: bool = True,
    warn: bool = True,
) -> GradientQuality:
    """Compare the gradient of one batch with that of the exact twin.

    Nothing of the model, its gradients or the random states is changed. It takes one pass, and one
    for each seed, for the whole plan and then for each site.

    Args:
        model: Wrapped by memtrain or not.
        closure_or_batch: A function that runs forward, loss and backward on one batch; or what the
            model is called with, whose loss is then the output's own `loss`, or else a random
            projection of the floats in the output.
        cfg: Anything that `memtrain.config.load` takes; None: the plan of a wrapped model, or
            `"balanced"`. Automatic bits are those of the plan, or uniform.
        seeds: Of the stochastic rounding, at least two.
        per_site: Whether each site is also measured alone, all others exact.
        warn: Whether the result's `complaint`, where it has one, is a warning.

    Returns:
        Cosine, relative variance and relative bias: `whole`, and `sites`. It prints as a table.

    Raises:
        ValueError: For fewer than two seeds, a closure that leaves no gradient, or a config that
            is not valid.
        TypeError: For a config of the wrong type.

    Warns:
        UserWarning: If the plan's variance is above 10% of the gradient's own from batch to batch
            (of a batch with `labels`, whose halves tell it), or else of its squared norm.

    Memory:
        One gradient per seed.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
        >>> found = gradient_quality(model, torch.randn(32, 64), "balanced")
        >>> found.whole.cosine > 0.99, [site.name for site in found.sites]
        (True, ['1 / gelu / input', '2 / linear / input'])
    """
    plan = _plan(model, cfg)
    closure = (
        closure_or_batch if callable(closure_or_batch) else closure_of(model, closure_or_batch)
    )
    halves = [] if callable(closure_or_batch) else _halves(model, closure_or_batch)
    found = measure(
        model,
        closure,
        plan.choose_activation,
        seeds=seeds,
        per_site=per_site,
        options=plan.options,
        halves=halves,
    )
    if warn and found.complaint:
        warnings.warn(found.complaint, stacklevel=2)
    return found


def _halves(model: nn.Module, batch: Any) -> list[Callable[[], None]]:
    """The model's own loss on each half of a batch; none where it has none, or no halves."""
    leaves = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
    sizes = {x.shape[0] if x.dim() else 0 for x in leaves}
    if not isinstance(batch, Mapping) or "labels" not in batch or len(sizes) != 1 or min(sizes) < 2:
        return []
    n = min(sizes) // 2
    parts = (slice(n), slice(n, 2 * n))
    return [
        closure_of(model, tree_map_only(Tensor, lambda x, part=part: x[part], batch))
        for part in parts
    ]


def _plan(model: nn.Module, cfg: Any) -> Plan:
    if cfg is None and hasattr(model, "_memtrain"):
        return plan_of(model)
    return activation_plan(model, cfg)


def closure_of(model: nn.Module, batch: Any) -> Callable[[], None]:
    """A forward and a backward on a batch.

    Args:
        model: Is called with the batch.
        batch: A tensor, a tuple of arguments or a dict of keyword arguments.

    Returns:
        A function of no arguments; the loss is the output's own `loss`, or else a random
        projection of the floats in the output.
    """
    args, kwargs = arguments(batch)

    def run() -> None:
        output = model(*args, **kwargs)
        loss = getattr(output, "loss", None)
        (_projection(output) if loss is None else loss).backward()

    return run


def _projection(output: Any) -> Tensor:
    """A random projection of all floats in the output, the same every time."""
    leaves = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        raise ValueError("the model's output has no tensor that requires a gradient")
    generator = torch.Generator().manual_seed(0)
    return sum(
        (x.float() * torch.randn(x.shape, generator=generator).to(x.device)).sum() for x in leaves
    )  # type: ignore[return-value]
