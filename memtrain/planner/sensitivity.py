"""Noise of each item's options in the gradient: measured on a batch, or by analysis."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import log
from typing import Any

from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_leaves

from memtrain.activations.adaptive.replay import (
    Closure,
    Gradient,
    dot,
    gradient_replay,
    squared_distance,
)
from memtrain.activations.intercept.hooks import Interception
from memtrain.activations.saved.site import Site
from memtrain.compressors import Compressor, Keep
from memtrain.planner.knapsack import Item, Option, Segment
from memtrain.planner.saved_tensors import pareto_options
from memtrain.planner.search_space import SearchSpace


def analytic(space: SearchSpace) -> SearchSpace:
    """Count every saved tensor alike: its relative squared error, shared among all of them.

    Args:
        space: Of a model.

    Returns:
        The same with errors as shares of the gradient's square, and without the options that others
        then dominate.
    """
    lossy = sum(any(option.error for option in item.options) for item in space.items)
    return _scaled(space, lambda item: lambda family: 1 / max(1, lossy))


def measured(model: nn.Module, closure: Closure, space: SearchSpace) -> SearchSpace:
    """Run forward and backward with one kind of items and compressors at a time, all others exact.

    Items at the same place of their blocks are a kind, and are measured together, for each family
    of compressors at the widths that come nearest to the preset `balanced` in error: the squared
    distance of the gradient from the exact one, as a share of its square, divided evenly. The
    family's other widths follow by the ratio of their analytic errors.

    Args:
        model: Real; nothing of it is changed.
        closure: Runs forward and backward on one batch.
        space: Of this model and batch.

    Returns:
        As of `analytic`.
    """
    scales: dict[str, dict[str, float]] = {}
    with gradient_replay(model) as gradient:

        def run(choices: Mapping[Site, Compressor | Keep]) -> Gradient:
            interception = Interception(
                model,
                lambda site: choices.get(site, Keep("kept for the measurement")),
                options=space.plan.options,
                seed=0,
                on_saved=lambda records: None,
            )
            with interception.alone():
                return gradient(closure)

        exact = run({})
        norm = dot(exact, exact)
        for items in _kinds(space.segments).values():
            own: dict[str, float] = {}
            for family, shown in _families(items).items():
                analysed = sum(option.error for option in shown)
                choices = {site: chosen for one in shown for site, chosen in one.choices.items()}
                own[family] = (
                    squared_distance(run(choices), exact) / norm / analysed if norm else 0.0
                )
            scales |= {item.name: own for item in items}
    return _scaled(space, lambda item: lambda family: scales[item.name].get(family, 0.0))


def _scaled(space: SearchSpace, scale: Callable[[Item], Callable[[str], float]]) -> SearchSpace:
    """The search space with errors times the scale of their item and family."""

    def scaled(item: Item) -> Item:
        of = scale(item)
        options = [replace(own, error=own.error * of(own.families)) for own in item.options]
        balanced = replace(item.balanced, error=item.balanced.error * of(item.balanced.families))
        return replace(item, options=pareto_options(options), balanced=balanced)

    segments = [replace(one, items=[*map(scaled, one.items)]) for one in space.segments]
    return replace(space, segments=segments)


def _families(items: Sequence[Item]) -> dict[str, list[Option]]:
    """Family -> of each item that has it, the lossy option that is nearest to `balanced`."""
    found: dict[str, list[Option]] = {}
    for item in items:
        near: dict[str, Option] = {}
        lossy = [option for option in (item.balanced, *item.options) if option.error]
        for option in sorted(lossy, key=lambda own: abs(log(own.error / lossy[0].error))):
            near.setdefault(option.families, option)
        for family, option in near.items():
            found.setdefault(family, []).append(option)
    return found


def is_real(model: nn.Module, batch: Any) -> bool:
    """Whether a step can be run: neither the model nor the batch is fake."""
    given = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    tensors = [*model.parameters(), *given]
    return detect_fake_mode(tensors) is None and not any(x.is_meta for x in tensors)


def _kinds(segments: Sequence[Segment]) -> dict[str, list[Item]]:
    kinds: dict[str, list[Item]] = {}
    for segment in segments:
        for item in segment.items:
            name = item.name.removeprefix(segment.name) if segment.name else f"/{item.name}"
            kinds.setdefault(name, []).append(item)
    return kinds
